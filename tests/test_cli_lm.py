"Each verb and option of `b2t lm …`; a failing command reports the reason, and existing files stay unchanged."
import errno
import re
import subprocess
import sys

import pytest
from click.testing import CliRunner

from b2t_kaggle.cli.command import main
from b2t_kaggle.lm import backoff
from b2t_kaggle.lm.arpa import open_text, read_counts
from b2t_kaggle.lm.ngram import NGram

pytestmark = pytest.mark.filterwarnings('ignore:.*too little text')

TEXT = 'Dr. Smith bought 2 tickets. He paid $5 for each of them, and went home.\n'*3 + (
    'The cat sat on the mat. A dog sat there, too.\n')
FILES = {
    'text.txt': TEXT,
    'dev.txt': 'he went home\nthe dog sat on the mat\n',
    'x/dev.txt': 'he went\n',
    'words.txt': 'He\nWENT\nhome\nthe\ncat\nsat\non\nmat\n',
    'empty.txt': '\n',
}


def lm(*args) -> tuple[int, str]:
    r = CliRunner(catch_exceptions=False).invoke(main, ['lm', *map(str, args)], prog_name='b2t')
    return r.exit_code, r.output


def ok(*args) -> str:
    code, output = lm(*args)
    assert code == 0, output
    return output


@pytest.fixture(scope='module')
def made(tmp_path_factory):
    "Texts, and two models with the same file name, as in the folders of runs."
    d = tmp_path_factory.mktemp('lm')
    for name, text in FILES.items():
        (d/name).parent.mkdir(exist_ok=True)
        (d/name).write_text(text)
    (d/'latin.txt').write_bytes('Café. One more.'.encode('latin-1'))
    ok('build', d/'text.txt', '-o', d/'a'/'lm.arpa', '--order', 3)
    ok('build', d/'dev.txt', '-o', d/'b'/'lm.arpa', '--order', 2, '--sentences')
    return d


@pytest.mark.parametrize('command, code, message', [
    ('clean text.txt --vocab empty.txt', 1, 'empty.txt: no words'),
    ('clean latin.txt', 1, 'latin.txt: not UTF-8 text'),
    ('clean nothing.txt', 2, 'nothing.txt. does not exist'),
    ('build text.txt --vocab empty.txt', 1, 'empty.txt: no words'),
    ('build text.txt --prune 0,x', 2, "--prune.*'0,x' is not of the form 0,0,1"),
    ('build text.txt --prune 1,0', 1, 'do not fall'),
    ('build text.txt --order 0', 1, 'order is 0'),
    ('build text.txt --threshold -1', 2, '--threshold.*-1.0 is not a share of 0 or more'),
    ('build text.txt --threshold nan', 2, '--threshold.*nan is not'),
    ('build empty.txt --sentences', 1, 'the text holds no words'),
    ('mix a/lm.arpa b/lm.arpa --weights 0.5,x', 2, "--weights.*'0.5,x' is not of the form 0.7,0.3"),
    ('mix a/lm.arpa b/lm.arpa --weights inf,1', 2, "--weights.*'inf,1' is not"),
    ('mix a/lm.arpa b/lm.arpa --weights nan,1', 2, "--weights.*'nan,1' is not"),
    ('mix a/lm.arpa b/lm.arpa --weights 1', 1, 'expected 2'),
    ('mix a/lm.arpa b/lm.arpa --weights 0,0', 1, 'expected 2 finite numbers from 0, not all 0'),
    ('mix a/lm.arpa b/lm.arpa --dev empty.txt', 1, 'no model knows a word'),
    ('mix a/lm.arpa b/lm.arpa', 1, 'give either a development text'),
    ('mix text.txt --weights 1', 1, 'text.txt: line 1: found'),
    ('prune a/lm.arpa', 2, '--threshold'),
    ('prune a/lm.arpa --threshold nan', 2, '--threshold.*nan is not'),
    ('prune text.txt --threshold 0', 1, 'text.txt: line 1: found'),
])
def test_refuses(command, code, message, made, tmp_path):
    (tmp_path/'out.arpa').write_text('old')
    verb, *args = (str(made/x) if '.arpa' in x or '.txt' in x else x for x in command.split())
    found, output = lm(verb, *args, '-o', tmp_path/'out.arpa')
    assert found == code and re.search(f'(?s)Error: .*{message}', output), output
    assert [p.name for p in tmp_path.iterdir()] == ['out.arpa'] and (tmp_path/'out.arpa').read_text() == 'old'


def test_clean(made, tmp_path):
    def lines(name, *options):
        ok('clean', made/'text.txt', '-o', tmp_path/name, *options)
        with open_text(tmp_path/name, 'rt') as f: return f.read().splitlines()
    assert lines('a.txt')[0] == 'dr smith bought two tickets'
    assert lines('b.txt.gz', '--no-numbers')[0] == 'dr smith bought tickets'
    assert lines('c.txt', '--vocab', made/'words.txt') == ['the cat sat on the mat']


def test_build(made, tmp_path):
    def built(*options, text='text.txt', name='lm.arpa'):
        output = ok('build', made/text, '-o', tmp_path/name, '--order', 3, *options)
        assert f'Wrote {tmp_path/name}' in output
        return NGram.load(tmp_path/name), read_counts(tmp_path/name)
    plain, counts = built()
    assert 'two' in plain and 'smith' in plain and len(counts) == 3
    assert 'two' not in built('--no-numbers')[0]
    restricted, _ = built('--vocab', made/'words.txt', name='v.arpa.gz')
    assert 'cat' in restricted and 'smith' not in restricted
    rare = built('--prune', '0,0,1')[1]
    assert rare[:2] == counts[:2] and 0 < rare[2] < counts[2]
    worth = built('--threshold', '1e-2')[1]
    assert worth[0] == counts[0] and sum(worth) < sum(counts)
    assert 'dog' in built('--sentences', text='dev.txt')[0]


def test_interrupted_pruning_leaves_the_old_model(made, tmp_path, monkeypatch):
    (tmp_path/'lm.arpa').write_text('old')
    def full(*args): raise OSError(errno.ENOSPC, 'No space left on device')
    monkeypatch.setattr(backoff, 'write_backoff', full)
    options = ['--threshold', '1e-3']
    found = lm('build', made/'text.txt', '-o', tmp_path/'lm.arpa', *options)
    assert found[0] == 1 and 'lm.arpa: not written, because the disk is full; the old one is unchanged' in found[1]
    assert [p.name for p in tmp_path.iterdir()] == ['lm.arpa'] and (tmp_path/'lm.arpa').read_text() == 'old'


def test_mix(made, tmp_path):
    paths = [made/'a'/'lm.arpa', made/'b'/'lm.arpa']
    def weights(output):
        "Weight on the line of each model."
        lines = output.splitlines()
        return [float(next(x.split()[-1] for x in lines if x.startswith(str(p)))) for p in paths]
    assert weights(ok('mix', *paths, '-o', tmp_path/'given.arpa', '--weights', '3,1')) == [.75, .25]
    tuned = weights(ok('mix', *paths, '-o', tmp_path/'tuned.arpa', '--dev', made/'dev.txt'))
    assert sum(tuned) == pytest.approx(1, abs=1e-5) and tuned[1] > .5 # It was built from that text
    assert all(w in NGram.load(tmp_path/n) for w in ('smith', 'dog') for n in ('given.arpa', 'tuned.arpa'))


def test_prune(made, tmp_path):
    full = made/'a'/'lm.arpa'
    output = ok('prune', full, '-o', tmp_path/'lm.arpa', '--threshold', '1e-2')
    assert str(full) in output and sum(read_counts(tmp_path/'lm.arpa')) < sum(read_counts(full))


def test_report(made):
    "Models and texts with the same file name are distinguished by their folders."
    models, texts = [made/'a'/'lm.arpa', made/'b'/'lm.arpa'], [made/'dev.txt', made/'x'/'dev.txt']
    fits, sizes = ok('report', *models, *(x for t in texts for x in ('--text', t))).split('\n\n')
    assert len(fits.splitlines()) == 2 + 4
    assert all(fits.count(str(m)) == 1 for m in models) and all(fits.count(str(t)) == 2 for t in texts)
    assert all(sizes.count(str(m)) == 1 for m in models)


@pytest.mark.parametrize('args, code, message', [
    (('text.txt', '--text', 'dev.txt'), 1, r'text.txt: line 1: found .*, expected .data'),
    (('a/lm.arpa',), 2, '--text'),
    (('a/lm.arpa', '--text', 'nothing.txt'), 2, 'nothing.txt. does not exist'),
])
def test_report_refuses(args, code, message, made):
    found, output = lm('report', *(a if a.startswith('--') else made/a for a in args))
    assert found == code and re.search(f'(?s)Error: .*{message}', output), output


def test_an_output_does_not_replace_an_input(made):
    for args in ('build', 'text.txt', '-o', 'text.txt'), ('build', '-o', './text.txt', 'dev.txt', 'text.txt'):
        code, output = lm(args[0], *(made/a if a.endswith('.txt') else a for a in args[1:]))
        assert code == 2 and 'is also an input; choose another name' in output, output
    assert (made/'text.txt').read_text() == TEXT


def test_fine_tuning_keeps_other_files(made, tmp_path):
    (tmp_path/'results').mkdir()
    (tmp_path/'results'/'kept.csv').write_text('mine')
    code, shown = lm('finetune', tmp_path/'no_model', made/'dev.txt', '-o', tmp_path/'results')
    assert code == 1 and 'results: has files, but no adapter_config.json of an earlier call' in shown, shown
    assert (tmp_path/'results'/'kept.csv').read_text() == 'mine'


def test_a_warning_is_one_line(made, tmp_path):
    command = [sys.executable, '-m', 'b2t_kaggle.cli', 'lm', 'build', made/'dev.txt', '-o', tmp_path/'lm.arpa']
    shown = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stderr
    assert 'UserWarning: ' in shown and 'lm.py' not in shown and 'build_ngram(' not in shown, shown


def test_a_model_is_no_text(made, tmp_path):
    code, output = lm('build', made/'a'/'lm.arpa', '-o', tmp_path/'lm.arpa')
    assert code == 1 and 'lm.arpa: an n-gram, expected text' in output and not (tmp_path/'lm.arpa').exists(), output
