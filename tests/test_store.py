"Packing: memory use, kills, changed sources, damaged data, day numbers across splits."
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest

from b2t_kaggle.core.files import ChangedError
from b2t_kaggle.core.ragged import RaggedError, write_ragged
from b2t_kaggle.data.sessions import SessionError, Trial, read_session, session_path, write_session
from b2t_kaggle.data.store import StoreError, TrialStore

DAYS = ['t15.2023.08.11', 't15.2023.08.13', 't15.2023.08.18', 't15.2023.08.20']


def make(data_dir, day, split, lengths, seed=0, sentences=('Not too controversial.',)):
    "Write a session file of random trials with the given lengths."
    rng = np.random.default_rng([seed, DAYS.index(day)])
    labelled = split != 'test'
    return write_session(session_path(data_dir, day, split), (
        Trial(session=day, split=split, key='', block=1 + i//10, trial=i % 10,
              features=rng.standard_normal((n, 512), dtype='float32'),
              class_ids=rng.integers(1, 41, 5 + i) if labelled else None,
              sentence=sentences[i % len(sentences)] if labelled else None)
        for i, n in enumerate(lengths)))


@pytest.fixture
def data_dir(tmp_path):
    for d, day in enumerate(DAYS):
        sentences = ['Go.', '[DO NOTHING]', 'I am “well”, it’s fine.']
        make(tmp_path, day, 'train', [20, 35, 15 + d], sentences=sentences)
        if d in (1, 3): make(tmp_path, day, 'val', [18, 19])
        if d == 3: make(tmp_path, day, 'test', [25])
    return tmp_path


def build(data_dir, split='train', name=None, **kw):
    return TrialStore.build(data_dir, split, data_dir/f'{name or split}.arrow', progress=False, **kw)


@pytest.mark.parametrize('dtype', ['float16', 'float32'])
def test_the_store_has_the_contents_of_the_files(data_dir, dtype):
    for split in ('train', 'val', 'test'):
        store = build(data_dir, split, dtype=dtype)
        paths = [session_path(data_dir, day, split) for day in DAYS]
        want = [t for path in paths if path.exists() for t in read_session(path)]
        assert len(store) == len(want) == len(store.index) and store.split == split and store.dtype == dtype
        for i, (t, w, row) in enumerate(zip(store, want, store.index.itertuples())):
            assert (t.session, t.split, t.key, t.block, t.trial) == (w.session, split, w.key, w.block, w.trial)
            assert (t.sentence, t.is_instruction) == (w.sentence, w.is_instruction)
            assert np.array_equal(t.features, w.features.astype(dtype)) and t.features.dtype == dtype
            assert (t.class_ids is None and w.class_ids is None) or np.array_equal(t.class_ids, w.class_ids)
            n_labels = 0 if w.class_ids is None else len(w.class_ids)
            assert (row.session, row.day, row.key) == (w.session, DAYS.index(w.session), w.key)
            assert (row.n_bins, row.n_labels) == (len(w.features), n_labels)
            assert (store.day[i], store.n_bins[i], store.n_labels[i]) == (row.day, row.n_bins, row.n_labels)
            assert len(store.class_ids(i)) == n_labels
            assert t.day == row.day and store.sessions[t.day] == t.session


def test_days_are_numbered_by_the_sessions_given(data_dir):
    assert build(data_dir, 'val').day.tolist() == [1, 1, 3, 3]
    assert build(data_dir, 'val', 'some', sessions=DAYS[2:]).day.tolist() == [1, 1]
    assert build(data_dir, 'test', 'none', sessions=DAYS[:2]).index.empty
    with pytest.raises(StoreError, match='no session t15.2023.08.12; did you mean'):
        build(data_dir, sessions=['t15.2023.08.12'])


def test_an_empty_split_is_an_empty_store(data_dir):
    store = build(data_dir, 'test', sessions=DAYS[:1])
    assert len(store) == 0 and list(store) == [] and store.n_bins.shape == (0,)
    assert len(TrialStore.open(store.path)) == 0


def test_trials_that_are_left_out(data_dir):
    assert [t.key for t in build(data_dir, drop_instructions=True)] == ['trial_0000', 'trial_0002']*4
    left = build(data_dir, bad_trials={DAYS[0]: {'1': [0, 2]}, DAYS[1]: {2: [0]}})
    assert [(t.session, t.trial) for t in left][:4] == [(DAYS[0], 1), (DAYS[1], 0), (DAYS[1], 1), (DAYS[1], 2)]
    subset = build(data_dir, feature_subset=[300, 5])
    assert np.array_equal(subset[1].features, build(data_dir, name='whole')[1].features[:, [300, 5]])
    for bad in ([], [1, 1], [-1], [512]):
        with pytest.raises(StoreError, match='feature_subset'): build(data_dir, feature_subset=bad)


@pytest.mark.parametrize('change', ['content', 'time', 'removed', 'added', 'option'])
def test_a_change_is_detected(data_dir, change):
    before = build(data_dir, 'val')
    path = session_path(data_dir, DAYS[1], 'val')
    inode = before.path.stat().st_ino
    assert build(data_dir, 'val').path.stat().st_ino == inode
    if change == 'content': make(data_dir, DAYS[1], 'val', [18, 19, 20])
    if change == 'time': os.utime(path, (1, 1))
    if change == 'removed': path.unlink()
    if change == 'added': make(data_dir, DAYS[2], 'val', [30])
    after = build(data_dir, 'val', dtype='float32' if change == 'option' else 'float16')
    assert after.path.stat().st_ino != inode
    assert len(after) == dict(content=5, time=4, removed=2, added=5, option=4)[change]
    assert len(before) == 4 and np.isfinite(before[3].features).all()     # an open store stays valid


def test_a_file_that_is_not_a_store_is_replaced_by_build_and_refused_by_open(data_dir):
    path = data_dir/'train.arrow'
    for content in (b'', b'something else'):
        path.write_bytes(content)
        with pytest.raises(RaggedError, match='not an Arrow IPC file'): TrialStore.open(path)
    write_ragged(path, [np.zeros(3)], kind='log_probs')
    with pytest.raises(RaggedError, match='holds log_probs, expected trials'): TrialStore.open(path)
    assert len(build(data_dir)) == 12


def test_damaged_data_is_named_and_leaves_no_store(data_dir):
    import h5py
    with h5py.File(session_path(data_dir, DAYS[2], 'train'), 'r+') as f: f['trial_0001/input_features'][3, 7] = np.nan
    with pytest.raises(SessionError, match=r'2023.08.18.*trial_0001.*input_features'): build(data_dir)
    assert not (data_dir/'train.arrow').exists() and not list(data_dir.glob('.*tmp'))
    for block in 1, '1':
        left = build(data_dir, bad_trials={DAYS[2]: {block: [1]}})
        assert len(left) == 11 and [t.trial for t in left if t.session == DAYS[2]] == [0, 2]


def test_bad_trials_are_equivalent_in_any_notation(data_dir):
    ways = {DAYS[0]: {1: [2, 0]}}, {DAYS[0]: {'1': [0, 2]}}, {DAYS[0]: {'1': [0], 1: [2]}}
    made = [build(data_dir, bad_trials=bad).path.stat().st_ino for bad in ways]
    assert len(set(made)) == 1 and len(TrialStore.open(data_dir/'train.arrow')) == 10
    with pytest.raises(SessionError, match='bad_trials_dict'): build(data_dir, bad_trials={DAYS[0]: {'first': [1]}})


def test_indices_from_the_end_and_out_of_range(data_dir):
    store = build(data_dir)
    for i in range(-len(store), 0):
        for part in store.class_ids, store.features:
            assert len(part(i)) and np.array_equal(part(i), part(len(store) + i))
    for i in (len(store), -len(store) - 1):
        for part in store.class_ids, store.features, store.__getitem__:
            with pytest.raises(IndexError): part(i)


def test_beyond_float16_is_an_error_with_the_trial(data_dir):
    import h5py
    with h5py.File(session_path(data_dir, DAYS[2], 'train'), 'r+') as f: f['trial_0002/input_features'][3, 7] = -70000
    found = r'2023.08.18.*trial_0002, input_features: .*has the value -70000, beyond float16'
    with pytest.raises(RaggedError, match=found): build(data_dir)
    assert build(data_dir, dtype='float32').features(8).min() == -70000


def test_a_source_that_changes_while_it_is_packed_is_detected(data_dir, monkeypatch):
    import b2t_kaggle.data.store as stores
    def change_source(path, *args):
        yield from read_session(path)
        os.utime(session_path(data_dir, DAYS[0], 'train'), (1, 1))
    monkeypatch.setattr(stores, 'iter_trials', change_source)
    with pytest.raises(ChangedError, match=r'data_train\.hdf5: changed while it was packed'): build(data_dir)
    assert not list(data_dir.glob('*.arrow'))


def test_it_can_be_sent_to_another_process(data_dir):
    store = build(data_dir)
    copy = pickle.loads(pickle.dumps(store))
    assert np.array_equal(copy[5].features, store[5].features) and copy.sessions == store.sessions


CHILD = '''if True:
    import re, sys
    from b2t_kaggle.data.store import TrialStore
    data_dir, *sessions = sys.argv[1:]
    # of this program alone: ru_maxrss would start with the memory of the process that forked it
    peak = lambda: int(re.search(r'VmHWM:\\s+(\\d+) kB', open('/proc/self/status').read())[1])/1024
    TrialStore.build(data_dir, 'train', f'{data_dir}/one.arrow', sessions=sessions[:1], progress=False)
    one = peak()
    TrialStore.build(data_dir, 'train', f'{data_dir}/all.arrow', sessions=sessions, progress=False)
    print(one, peak())'''


@pytest.fixture(scope='module')
def big_dir(tmp_path_factory):
    "Four sessions of 90 MB each."
    d = tmp_path_factory.mktemp('big')
    for day in DAYS: make(d, day, 'train', [700]*64)
    return d


def test_memory_does_not_grow_with_the_data(big_dir):
    command = [sys.executable, '-c', CHILD, big_dir, *DAYS]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    one, everything = map(float, out.split()[-2:])
    size = (big_dir/'all.arrow').stat().st_size/2**20
    assert size > 170 and everything - one < 40 and everything < 500, out       # MB


WAITS = """if True:
    import sys
    import b2t_kaggle.data.store as stores
    data_dir, n_packed = sys.argv[1:]
    read = stores.iter_trials
    given = []
    def iter_trials(path, *args):
        for trial in read(path, *args):
            if len(given) == int(n_packed):
                print('waiting', flush=True)
                sys.stdin.read()
            given.append(trial.key)
            yield trial
    stores.iter_trials = iter_trials
    stores.TrialStore.build(data_dir, 'train', f'{data_dir}/all.arrow', progress=False)"""


def test_the_next_packing_removes_files_of_a_killed_one(big_dir):
    "The process is killed at the first trial, and at a trial of the second session."
    for n_packed in ('0', '100'):
        (big_dir/'all.arrow').unlink(missing_ok=True)
        command = [sys.executable, '-c', WAITS, big_dir, n_packed]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as p:
            assert p.stdout.readline() == 'waiting\n'
            p.kill()
        assert not (big_dir/'all.arrow').exists() and list(big_dir.glob('.all.arrow.*.tmp'))
    store = TrialStore.build(big_dir, 'train', big_dir/'all.arrow', progress=False)
    assert len(store) == 256 and not list(big_dir.glob('.*.tmp'))
