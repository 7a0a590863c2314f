"All kinds of faults in session files are found and named, by checks, reading and writing."
import errno
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import h5py
import no_locks
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from b2t_kaggle.data.sessions import (
    SessionError,
    Trial,
    iter_trials,
    list_sessions,
    read_session,
    session_path,
    tidy_bad_trials,
    validate,
    write_session,
)
from b2t_kaggle.data.store import TrialStore
from b2t_kaggle.data.t12 import train_sentences

DAY = 't15.2023.08.13'


def trial(i=0, n_bins=20, sentence="It's fine.", class_ids=(17, 31, 40, 14, 6, 23, 40), **changes):
    features = np.random.default_rng(i).standard_normal((n_bins, 512)).astype(np.float32)
    return replace(Trial(DAY, 'train', f'trial_{i:04d}', 3, i, features, np.array(class_ids), sentence), **changes)


@pytest.fixture
def data_dir(tmp_path):
    write_session(session_path(tmp_path, DAY, 'train'), (trial(i) for i in range(3)))
    write_session(session_path(tmp_path, DAY, 'val'), (trial(i) for i in range(3, 5)))
    write_session(session_path(tmp_path, DAY, 'test'), (trial(i) for i in range(5, 7)))
    assert validate(tmp_path).empty
    return tmp_path


def edit(data_dir, change, split='train', key='trial_0001'):
    path = session_path(data_dir, DAY, split)
    with h5py.File(path, 'a') as f: change(f[key] if key else f)
    return path


def put(name, value):
    def change(group):
        if name in group: del group[name]
        group[name] = value
    return change


def attr(name, value): return lambda group: group.attrs.__setitem__(name, value)


def remove(name):
    def change(group):
        if name in group: del group[name]
        else: del group.attrs[name]
    return change


def poison(value):
    def change(group): group['input_features'][11, 400] = value
    return change


ids = np.zeros(500, np.int32)
FAULTS = {
    'nan': ('input_features', poison(np.nan)),
    'infinity': ('input_features', poison(-np.inf)),
    'feature count': ('input_features', put('input_features', np.zeros((20, 256), np.float32))),
    'feature type': ('input_features', put('input_features', np.zeros((20, 512)))),
    'one dimension': ('input_features', put('input_features', np.zeros(512, np.float32))),
    'no time steps': ('input_features', put('input_features', np.zeros((0, 512), np.float32))),
    'text instead of features': ('input_features', put('input_features', 'oops')),
    'group instead of features': ('input_features', lambda g: (g.__delitem__('input_features'),
                                                               g.create_group('input_features'))),
    'n_time_steps': ('n_time_steps', attr('n_time_steps', 21)),
    'n_time_steps not whole': ('n_time_steps', attr('n_time_steps', 20.5)),
    'seq_len too long': ('seq_len', attr('seq_len', 8)),
    'seq_len too short': ('seq_len', attr('seq_len', 6)),
    'no labels': ('seq_len', lambda g: (put('seq_class_ids', ids)(g), attr('seq_len', 0)(g))),
    'label 41': ('seq_class_ids', put('seq_class_ids', np.where(np.arange(500) < 7, 41, 0))),
    'blank in the middle': ('seq_class_ids', put('seq_class_ids', np.where(np.isin(np.arange(500), [0, 1, 6]), 5, 0))),
    'negative label': ('seq_class_ids', put('seq_class_ids', np.where(np.arange(500) < 7, -1, 0))),
    'labels not whole': ('seq_class_ids', put('seq_class_ids', np.ones(500))),
    'other sentence': ('transcription', attr('sentence_label', 'It was fine.')),
    'not a character': ('transcription', put('transcription', np.where(np.arange(500) < 7, -1, 0))),
    'sentence not text': ('sentence_label', attr('sentence_label', 3)),
    'other session': ('session', attr('session', 't15.2023.08.18')),
    'duplicate': ('trial_num', attr('trial_num', 0)),
    'duplicate across splits': ('trial_num', attr('trial_num', 3)),
} | {f'no {name}': (name, remove(name)) for name in
     ('input_features', 'seq_class_ids', 'transcription', 'n_time_steps', 'seq_len', 'sentence_label', 'session',
      'block_num', 'trial_num')}
# The trial can still be used
WARNINGS = {'other sentence', 'not a character', 'duplicate', 'duplicate across splits'}


@pytest.mark.parametrize('fault', FAULTS)
def test_faults_are_found_and_named(data_dir, fault):
    field, change = FAULTS[fault]
    path = edit(data_dir, change)
    problems = validate(data_dir)
    where = 'trial_0000' if fault == 'duplicate across splits' else 'trial_0001'
    rows = problems[(problems.field == field) & (problems.trial == where)]
    assert len(rows) == 1, problems
    row = rows.iloc[0]
    assert row.found and row.expected and row.advice
    assert row.severity == ('warning' if fault in WARNINGS else 'error')
    if fault in WARNINGS:
        assert len(read_session(path)) == 3
        return
    assert row.file == str(path)
    with pytest.raises(SessionError) as e: read_session(path)
    problem = e.value.problem
    for part in (str(path), 'trial_0001', problem.found, problem.expected, problem.advice): assert part in str(e.value)
    assert e.value.problem.field in set(problems.field)


def test_all_problems_of_all_files_are_in_one_table(data_dir):
    edit(data_dir, poison(np.nan))
    edit(data_dir, attr('seq_len', 99), key='trial_0002')
    edit(data_dir, remove('trial_num'), split='test')
    broken = session_path(data_dir, 't15.2023.08.18', 'val')
    broken.parent.mkdir()
    broken.write_bytes(b'not hdf5')
    assert list(validate(data_dir).field) == ['trial_num', 'input_features', 'seq_len', '']


def test_reading_continues_until_the_fault(data_dir):
    path = edit(data_dir, poison(np.nan))
    read = []
    with pytest.raises(SessionError):
        for t in iter_trials(path): read.append(t.key)
    assert read == ['trial_0000']


@pytest.mark.parametrize('kept', [0, 7, 100, 3000, 60_000, 0.5, 0.9, 0.999])
def test_truncated_files(data_dir, kept):
    path = session_path(data_dir, DAY, 'train')
    whole = path.read_bytes()
    path.write_bytes(whole[:kept if isinstance(kept, int) else int(kept*len(whole))])
    assert set(validate(data_dir).file) == {str(path)}
    with pytest.raises(SessionError, match=DAY): read_session(path)


def test_damaged_bytes_never_escape_as_another_error(data_dir):
    path = session_path(data_dir, DAY, 'train')
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    metadata = [i for i in range(0, len(whole), 64) if len(set(whole[i:i + 64])) < 40][:400]
    for start in rng.choice(metadata, 60):
        damaged = bytearray(whole)
        damaged[start:start + 64] = rng.bytes(64)
        path.write_bytes(damaged)
        validate(data_dir)
        try: read_session(path)
        except SessionError: pass


def test_groups_out_of_order(data_dir):
    path = edit(data_dir, lambda f: f.move('trial_0001', 'trial_0007'), key=None)
    assert list(validate(data_dir).trial) == ['trial_0002']
    assert [t.key for t in read_session(path)] == ['trial_0000', 'trial_0002', 'trial_0007']


def test_a_dataset_instead_of_a_trial(data_dir):
    edit(data_dir, lambda f: (f.__delitem__('trial_0002'), f.__setitem__('trial_0002', 1)), key=None)
    assert list(validate(data_dir).trial) == ['trial_0002']


def test_a_file_without_trials(data_dir):
    with h5py.File(session_path(data_dir, DAY, 'val'), 'w'): pass
    assert list(validate(data_dir).found) == ['no trials']


def test_folders(data_dir):
    (data_dir/'t15.2023.08.20').mkdir()             # no file
    (data_dir/'t15.2023.02.30').mkdir()             # not a date
    shutil.copytree(data_dir/DAY, data_dir/'day 2') # sessions under another name
    (data_dir/'notes').mkdir()                      # not a session
    shutil.copy(session_path(data_dir, DAY, 'val'), data_dir/DAY/'data_dev.hdf5')
    named = {Path(f).name for f in validate(data_dir).file}
    assert named == {'t15.2023.08.20', 't15.2023.02.30', 'day 2', 'data_dev.hdf5'}
    assert list_sessions(data_dir) == [DAY, 't15.2023.08.20']


def test_no_data(tmp_path):
    assert list(validate(tmp_path/'nowhere').found) == ['no such folder']
    assert list(validate(tmp_path).found) == ['no sessions']
    write_session(session_path(tmp_path/'hdf5_data_final', DAY, 'train'), [trial()])
    assert 'hdf5_data_final' in validate(tmp_path).advice[0]


def test_sessions_are_chronological(tmp_path):
    for s in ('t15.2024.02.25', 't15.2023.12.29', 't12.2024.01.02'): (tmp_path/s).mkdir()
    assert list_sessions(tmp_path) == ['t15.2023.12.29', 't12.2024.01.02', 't15.2024.02.25']


def test_bytes_are_accepted_as_text(data_dir):
    path = edit(data_dir, attr('sentence_label', np.bytes_("It's fine.")))
    assert read_session(path)[1].sentence == "It's fine."
    assert validate(data_dir).empty


def test_transcription_may_lack_punctuation(data_dir):
    path = edit(data_dir, put('transcription', np.pad([ord(c) for c in 'its fine'], (0, 492))))
    assert len(read_session(path)) == 3


def test_instructions_are_kept_and_marked_or_dropped(tmp_path):
    trials = [trial(0), trial(1, sentence='[RIGHT HAND - CLOSE]'), trial(2)]
    path = write_session(session_path(tmp_path, DAY, 'train'), trials)
    assert [t.is_instruction for t in read_session(path)] == [False, True, False]
    assert [t.key for t in iter_trials(path, drop_instructions=True)] == ['trial_0000', 'trial_0002']


@settings(max_examples=40, deadline=None)
@given(n_bins=st.integers(1, 40), ids=st.lists(st.integers(1, 40), min_size=1, max_size=499),
       sentence=st.text(st.characters(codec='utf-8', exclude_characters='\0'), min_size=1, max_size=499)
                .filter(lambda s: not s.strip().startswith('[')),
       split=st.sampled_from(['train', 'val', 'test']))
def test_round_trip(tmp_path_factory, n_bins, ids, sentence, split):
    path = session_path(tmp_path_factory.mktemp('s'), DAY, split)
    t = trial(0, n_bins, sentence, ids)
    back, = read_session(write_session(path, [t]))
    np.testing.assert_array_equal(back.features, t.features)
    assert (back.session, back.split, back.key) == (DAY, split, 'trial_0000')
    assert (back.block, back.trial, back.is_instruction) == (3, 0, False)
    if split == 'test': assert back.class_ids is None and back.sentence is None
    else: assert back.class_ids.tolist() == ids and back.sentence == sentence.strip(' \t\r\n') # Padding
    assert validate(path.parent.parent).empty


def test_the_official_reader_accepts_it(data_dir):
    "Perform the operations of the official kit on a file, one by one."
    with h5py.File(session_path(data_dir, DAY, 'val')) as f:
        for g in (f[f'trial_{t:04d}'] for t in range(len(list(f.keys())))):
            codes = g['transcription'][:]
            end = np.argwhere(codes == 0)[0, 0]
            assert ''.join(chr(c) for c in codes[:end]) == g.attrs['sentence_label'][:] == "It's fine."
            assert g['seq_class_ids'][:].shape == codes.shape == (500,)
            assert g['input_features'][:].shape == (g.attrs['n_time_steps'], 512) and g.attrs['seq_len'] == 7
            assert g.attrs['session'] == DAY and str(g.attrs['block_num']) == '3'
    with h5py.File(session_path(data_dir, DAY, 'test')) as f:
        g = f['trial_0000']
        assert set(g) == {'input_features'} and set(g.attrs) == {'n_time_steps', 'session', 'block_num', 'trial_num'}


@pytest.mark.parametrize('bad', [trial(session='t15.2023.08.18'), trial(features=np.zeros((4, 512))),
                                 trial(class_ids=[41]), replace(trial(), class_ids=None),
                                 trial(sentence='a'*500), trial(features=np.zeros((0, 512), np.float32))])
def test_unreadable_trials_are_not_written(data_dir, bad):
    path = session_path(data_dir, DAY, 'train')
    before = path.read_bytes()
    with pytest.raises(ValueError): write_session(path, [trial(8), bad])
    assert path.read_bytes() == before and [p.name for p in path.parent.glob('.*')] == []


def test_a_generator_that_fails_leaves_the_old_file(data_dir):
    def trials():
        yield trial(8)
        raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt): write_session(session_path(data_dir, DAY, 'train'), trials())
    assert len(read_session(session_path(data_dir, DAY, 'train'))) == 3


def test_one_trial_in_memory_at_a_time(tmp_path):
    "Writing and reading 40 trials of 2 MB takes far less memory than their 80 MB."
    import tracemalloc
    path = session_path(tmp_path, DAY, 'train')
    tracemalloc.start()
    write_session(path, (trial(i, 1000) for i in range(40)))
    assert sum(len(t.features) for t in iter_trials(path)) == 40_000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20e6


@pytest.mark.parametrize('block', [3, '3'])
@pytest.mark.parametrize('fault', [f for f, (field, _) in FAULTS.items() if field not in ('block_num', 'trial_num')])
def test_a_bad_trial_is_left_out_whatever_is_wrong_with_it(data_dir, fault, block):
    path = edit(data_dir, FAULTS[fault][1])
    bad = {DAY: {block: [1]}}
    for read in read_session, iter_trials:
        assert [t.key for t in read(path, bad_trials=bad)] == ['trial_0000', 'trial_0002']
    assert validate(data_dir, bad_trials=bad).empty
    for other in ({DAY: {block: [7]}}, {DAY: {4: [1]}}, {'t15.2023.08.18': {block: [1]}}):
        assert len(validate(data_dir, bad_trials=other))


def test_a_trial_without_readable_numbers_cannot_be_left_out(data_dir):
    path = edit(data_dir, remove('trial_num'))
    with pytest.raises(SessionError, match='trial_num'): read_session(path, bad_trials={DAY: {3: [1]}})


def test_ways_to_name_bad_trials():
    assert tidy_bad_trials(None) == {} and tidy_bad_trials({DAY: {3: [2, 1], '3': (5, 1)}}) == {DAY: {'3': [1, 2, 5]}}
    for bad in ({DAY: {'three': [1]}}, {DAY: [1]}, {DAY: {3: 1}}):
        with pytest.raises(SessionError, match=DAY): tidy_bad_trials(bad)


def test_the_advice_is_to_leave_the_trial_out(data_dir):
    edit(data_dir, poison(np.nan))
    assert list(validate(data_dir).advice) == ['fetch the file again, or leave the trial out with data.bad_trials_dict']


def test_only_the_named_sessions_are_checked(data_dir):
    broken = session_path(data_dir, 't15.2023.08.18', 'val')
    broken.parent.mkdir()
    broken.write_bytes(b'not hdf5')
    (data_dir/'t15.2023.08.20').mkdir()
    (data_dir/'t15.2023.02.30').mkdir()
    assert validate(data_dir, sessions=[DAY]).empty and len(validate(data_dir)) == 3
    assert list(validate(data_dir, sessions=[DAY, 't15.2023.08.18']).file) == [str(broken)]
    assert list(validate(data_dir, sessions=['t15.2023.08.20']).found) == ['no data file']
    missing, = validate(data_dir, sessions=['t15.2023.08.31']).itertuples()
    assert (missing.file, missing.found) == (str(data_dir/'t15.2023.08.31'), 'no such folder')
    assert missing.severity == 'error' and 'did you mean' in missing.advice


def test_hidden_files_are_ignored(data_dir):
    (data_dir/DAY/'._data_train.hdf5').write_bytes(b'finder')
    (data_dir/'.Trash').mkdir()
    (data_dir/'.Trash'/'data_train.hdf5').write_bytes(b'old')
    assert validate(data_dir).empty


def test_sessions_are_read_on_a_file_system_without_locks(data_dir, tmp_path_factory):
    numbers = [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EROFS]
    code = f'''
import os
from b2t_kaggle.data.sessions import validate
from b2t_kaggle.data.t12 import train_sentences
for number in {numbers}:
    os.environ['FLOCK_ERRNO'] = str(number)
    print(number, len(validate({str(data_dir)!r})), len([*train_sentences({str(data_dir)!r}, with_val=True)]))
'''
    env = no_locks.environment(tmp_path_factory.mktemp('locks'), numbers[0])
    found = subprocess.run([sys.executable, '-c', code], env=env, capture_output=True, text=True)
    assert (found.stdout.splitlines(), found.stderr) == ([f'{number} 0 5' for number in numbers], '')


@pytest.mark.parametrize('name', ['data_train (1).hdf5', 'data_train_old.hdf5', 'data_val.HDF5', 'copy of data_test.h5',
                                  'notes.hdf5', 'data_dev.hdf5'])
def test_an_additional_file_is_named_and_ignored(data_dir, tmp_path, name):
    before = [t.key for t in read_session(session_path(data_dir, DAY, 'train'))]
    shutil.copy(session_path(data_dir, DAY, 'train'), data_dir/DAY/name)
    row, = validate(data_dir).itertuples()
    assert (Path(row.file).name, row.severity) == (name, 'warning') and row.found == f'file name {name}'
    assert 'not read' in row.advice
    TrialStore.build(data_dir, 'train', tmp_path/'train.arrow')
    assert len(TrialStore.open(tmp_path/'train.arrow')) == len(before)
    named, = validate(data_dir, sessions=[DAY]).itertuples()
    assert named[1:] == row[1:]


@pytest.mark.parametrize('name', ['data_val (1).hdf5', 'data_val.HDF5', 'data_dev.hdf5'])
def test_a_split_under_another_name_is_an_error(data_dir, name):
    session_path(data_dir, DAY, 'val').rename(data_dir/DAY/name)
    row, = validate(data_dir).itertuples()
    assert (Path(row.file).name, row.severity) == (name, 'error') and 'rename the file' in row.advice


PADDED = { # Text and numbers as Fortran, C, MATLAB and others write them to HDF5
    'spaces': lambda text: text + '   ', 'spaces before': lambda text: '  ' + text,
    'end of line': lambda text: text + '\n',
    'bytes with spaces': lambda text: np.bytes_(text.encode().ljust(30)),
    'zeros': None, # See below
    'an array': lambda text: np.array([text], object), 'an array of bytes': lambda text: np.array([text.encode()]),
}


@pytest.mark.parametrize('pad', PADDED)
@pytest.mark.parametrize('name, value', [('session', DAY), ('sentence_label', "It's fine.")])
def test_padded_attributes(data_dir, pad, name, value):
    def change(group):
        if pad == 'zeros': # Fixed length, padded with zeros that belong to the text
            kind = h5py.h5t.C_S1.copy()
            kind.set_size(40)
            kind.set_strpad(h5py.h5t.STR_SPACEPAD)
            del group.attrs[name]
            space = h5py.h5s.create(h5py.h5s.SCALAR)
            attribute = h5py.h5a.create(group.id, name.encode(), kind, space)
            attribute.write(np.array(value.encode().ljust(40, b'\0'), 'S40'))
        else: group.attrs[name] = PADDED[pad](value)
    path = edit(data_dir, change)
    assert validate(data_dir).empty
    found = read_session(path)[1]
    assert (found.session, found.sentence) == (DAY, "It's fine.")


def test_numbers_in_arrays_of_one(data_dir):
    names = 'n_time_steps', 'seq_len', 'trial_num'
    path = edit(data_dir, lambda g: [attr(n, np.array([g.attrs[n]]))(g) for n in names])
    assert validate(data_dir).empty and read_session(path)[1].trial == 1
    edit(data_dir, attr('trial_num', np.array([1, 2])))
    assert list(validate(data_dir).field) == ['trial_num']


def test_errors_name_a_file_that_another_process_writes(data_dir):
    path = session_path(data_dir, DAY, 'train')
    code = f"import h5py; f = h5py.File({str(path)!r}, 'a'); print('open', flush=True); input()"
    writer = subprocess.Popen([sys.executable, '-c', code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert writer.stdout.readline() == 'open\n'
        row, = validate(data_dir).itertuples()
        assert row.file == str(path) and 'another process has open for writing' in row.found
        assert 'wait until it is complete, or end that process' in row.advice and row.severity == 'error'
        with pytest.raises(SessionError, match='another process has open for writing'): read_session(path)
        with pytest.raises(SessionError, match=r'data_train.hdf5: found a file that another process has open'):
            list(train_sentences(data_dir))
    finally: writer.communicate('\n')
    assert validate(data_dir).empty


def test_errors_name_a_file_whose_writer_was_killed(data_dir):
    "HDF5 records in such a file that it is open."
    path = session_path(data_dir, DAY, 'train')
    code = f"import h5py, os; f = h5py.File({str(path)!r}, 'w', libver='latest'); f.swmr_mode = True; os._exit(1)"
    subprocess.run([sys.executable, '-c', code], check=False)
    row, = validate(data_dir).itertuples()
    assert row.file == str(path) and 'has open for writing' in row.found and 'fetch the file again' in row.advice
