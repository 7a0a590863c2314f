"Submissions: what is written validates, what is damaged is named, and no file is left half written."
import csv
import os
import signal
import subprocess
import sys
import textwrap
import time

import pandas as pd
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from b2t_kaggle.phonemes import normalize_sentence
from b2t_kaggle.pipeline.submission import SubmissionError, check_order, validate_submission, write_submission

fixture_ok = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


@fixture_ok
@given(st.lists(st.text().map(normalize_sentence) | st.text(alphabet="aZ -'", max_size=9), max_size=9))
def test_round_trip(tmp_path, texts):
    p = tmp_path/'submission.csv'
    warnings = write_submission(p, texts, len(texts))
    assert warnings == validate_submission(p, len(texts))
    assert sum('empty text' in w for w in warnings) == sum(not t.strip() for t in texts)
    rows = list(csv.reader(p.open(newline='', encoding='utf-8')))
    assert rows == [['id', 'text']] + [[str(i), t] for i, t in enumerate(texts)]
    assert [f.name for f in tmp_path.iterdir()] == ['submission.csv']


@fixture_ok
@given(st.binary(max_size=60) | st.text(alphabet='id,text\n\r"0123a\x00é', max_size=40).map(str.encode))
@example(b'id,text\n0,"a\n')
@example(b'\xef\xbb\xbfid,text\n')
def test_any_bytes_validate_or_are_refused(tmp_path, data):
    p = tmp_path/'submission.csv'
    p.write_bytes(data)
    try: validate_submission(p)
    except SubmissionError as e: assert str(p) in str(e)
    else: assert data.startswith(b'id,text')


@pytest.mark.parametrize('data, message', [
    (b'', "line 1: found the header ''"),
    (b'Id,Text\n0,a\n1,b\n', "header 'Id,Text', expected 'id,text'"),
    (b'\xef\xbb\xbfid,text\n0,a\n1,b\n', 'line 1: found the header'),
    (b'0,a\n1,b\n', "line 1: found the header '0,a'"),
    (b'id,text\n0,a\n', 'found 1 rows, expected 2'),
    (b'id,text\n0,a\n1,b\n2,c\n', 'found 3 rows, expected 2'),
    (b'id,text\n0,a\n0,b\n', "line 3: id is '0', expected 1"),
    (b'id,text\n1,a\n0,b\n', "line 2: id is '1', expected 0"),
    (b'id,text\n0,a\n01,b\n', "line 3: id is '01', expected 1"),
    (b'id,text\n0,a\nx,b\n', "line 3: id is 'x', expected 1"),
    (b'id,text\n0,a\n1\n', 'line 3: found 1 fields, expected 2'),
    (b'id,text\n0,a\n1,b,c\n', 'line 3: found 3 fields, expected 2'),
    (b'id,text\n0,a\n\n1,b\n', 'line 3: found 0 fields'),
    (b'id,text\n0,a\n1,b.\n', "line 3, id 1: found '.' in 'b.'"),
    (b'id,text\n0,a\n1,b 2\n', "line 3, id 1: found '2'"),
    ('id,text\n0,a\n1,é\n'.encode(), "line 3, id 1: found 'é'"),
    ('id,text\n0,a\n1,é\n'.encode('latin1'), 'line 3: not UTF-8 (byte 0xe9)'),
    (b'id,text\n0,a\n1,"b\n', 'not a valid CSV'),
    (b'id,text\n0,a\n1,"b\nc"\n', 'id 1: found'),
])
def test_damage_is_named(tmp_path, data, message):
    p = tmp_path/'submission.csv'
    p.write_bytes(data)
    with pytest.raises(SubmissionError) as e: validate_submission(p, 2)
    assert message in str(e.value) and str(p) in str(e.value)


def test_windows_line_ends_are_fine(tmp_path):
    p = tmp_path/'submission.csv'
    p.write_bytes(b'id,text\r\n0,a\r\n1,\r\n')
    assert validate_submission(p, 2) == ['id 1: empty text']


def test_a_long_list_of_problems_is_cut(tmp_path):
    p = tmp_path/'submission.csv'
    p.write_text('id,text\n' + ''.join(f'{i},no.\n' for i in range(100)))
    with pytest.raises(SubmissionError, match='100 problems') as e: validate_submission(p)
    assert 'and 90 more' in str(e.value) and len(str(e.value).splitlines()) == 12


def test_missing_file_is_named(tmp_path):
    with pytest.raises(SubmissionError, match='none.csv: cannot be read'): validate_submission(tmp_path/'none.csv')


def test_order_of_the_real_schedule(tmp_path):
    trials = [(f't15.2023.{m:02}.{d:02}', f'trial_{k:04}') for m in (8, 11) for d in (1, 30) for k in range(120)]
    index = pd.DataFrame(trials, columns=['session', 'key'])
    assert check_order(index) == 480
    assert write_submission(tmp_path/'s.csv', ['a']*480, index) == []
    with pytest.raises(SubmissionError, match='found 479 rows, expected 480'):
        write_submission(tmp_path/'t.csv', ['a']*479, index)
    with pytest.raises(SubmissionError, match='chronological'):
        write_submission(tmp_path/'t.csv', ['a']*480, index[::-1])
    assert not (tmp_path/'t.csv').exists()


@pytest.mark.parametrize('texts', [['a', None], ['a', float('nan')], ['a', b'b'], ['a', 'b,c'], ['a', '\ud800'], 'ab'])
def test_bad_texts_are_not_written(tmp_path, texts):
    p = tmp_path/'submission.csv'
    write_submission(p, ['before'])
    with pytest.raises(SubmissionError): write_submission(p, texts)
    assert p.read_text() == 'id,text\n0,before\n' and [f.name for f in tmp_path.iterdir()] == ['submission.csv']


def test_a_killed_writer_leaves_the_old_file_or_the_new_one(tmp_path):
    p = tmp_path/'submission.csv'
    n = 20_000
    code = textwrap.dedent(f'''
        from b2t_kaggle.pipeline.submission import write_submission
        print('ready', flush=True)
        while True:
            for word in 'ab': write_submission({str(p)!r}, [word]*{n})''')
    with subprocess.Popen([sys.executable, '-c', code], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout.readline() == 'ready\n'
        while not p.exists(): assert child.poll() is None and not time.sleep(0.01)
        time.sleep(0.33)
        os.kill(child.pid, signal.SIGKILL)
    assert validate_submission(p, n) == [] and len(set(pd.read_csv(p).text)) == 1
