"""Every package that writes files is tested with a full disk, a folder that disappears, a path that is not a file, and
a kill.

Each reports one line that names the file, the reason, what was kept and the remedy; earlier files are unchanged, and no
other files are left. A limit on the size of files simulates the full disk; users who may mount file systems get a real
one.
"""
import errno
import gc
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import b2t_kaggle
from b2t_kaggle.cli.command import main
from b2t_kaggle.config import preset, with_overrides
from b2t_kaggle.core.files import WriteError, clear_leftovers, replaced_folder, require_space, write_whole
from b2t_kaggle.core.ragged import RaggedError, write_ragged
from b2t_kaggle.data.sessions import Trial, session_path, write_session
from b2t_kaggle.data.simulate import simulate_dataset
from b2t_kaggle.data.store import TrialStore, packed_bytes
from b2t_kaggle.decoding.nbest import Hypothesis, write_nbest
from b2t_kaggle.lm.automaton import _write_cache
from b2t_kaggle.lm.kneser_ney import estimate_arpa
from b2t_kaggle.pipeline.execute import execute
from b2t_kaggle.pipeline.run import Run
from b2t_kaggle.pipeline.stages import PipelineError
from b2t_kaggle.pipeline.stamps import StageRun
from b2t_kaggle.pipeline.submission import write_submission
from b2t_kaggle.pytorch.checkpoint import save_atomic
from b2t_kaggle.pytorch.models import build_model
from b2t_kaggle.pytorch.optimizer.adamw import new_state
from b2t_kaggle.training.history import History
from b2t_kaggle.training.recovery import checkpoint_bytes

DAY = 't15.2023.08.13'
LIMIT = 3000  # Bytes; each of these writers writes more
WORDS = [f'{a}{b}' for a in 'bdfgklmnprst' for b in ('ay', 'ee', 'ow', 'oo', 'an', 'it')]


def sentences(n, seed=0):
    rng = np.random.default_rng(seed)
    return [' '.join(rng.choice(WORDS, 6)) for _ in range(n)]


def trials(n_bins=20):
    "Two trials of a session."
    for i in range(2):
        features = np.random.default_rng(i).standard_normal((n_bins, 512)).astype('float32')
        yield Trial(DAY, 'train', f'trial_{i:04d}', 1, i, features, np.array([17, 38, 40]), 'Is.')


def write_history(path):
    history = History(path)
    for step in range(0, 5000, 10): history.add(step, dict(loss=1., grad_norm=1.), dict(model=.1, day=.1), 1.)
    history.save()


def write_folder(path):
    with replaced_folder(path) as new:
        new.mkdir()
        (new/'weights').write_bytes(bytes(2*LIMIT))


def write_cache(path): _write_cache(path, bytes(32), dict(order=3), dict(keys=np.zeros(LIMIT, np.int64)))


# File name and writer by package; each writes more than the limit
WRITERS = {
    'session': (f'{DAY}/data_train.hdf5', lambda p: write_session(p, trials())),
    'store': ('all.arrow', lambda p: write_ragged(p, [np.ones((LIMIT, 2))])),
    'checkpoint': ('last.pt', lambda p: save_atomic(dict(weights=torch.ones(LIMIT)), p)),
    'arpa': ('lm.arpa', lambda p: estimate_arpa(sentences(100), p, 3, [0, 0, 0], None)),
    'arpa.gz': ('lm.arpa.gz', lambda p: estimate_arpa(sentences(100), p, 3, [0, 0, 0], None)),
    'automaton': ('lm.arpa.automaton', write_cache),
    'n-best': ('nbest_val.jsonl', lambda p: write_nbest(p, [[Hypothesis('how are you', -2., -4., 3, -6.)]]*200)),
    'submission': ('submission.csv', lambda p: write_submission(p, sentences(200))),
    'history': ('history.csv', write_history),
    'text': ('notes.txt', lambda p: write_whole(p, 'x'*2*LIMIT)),
    'folder': ('adapter', write_folder),
}


@contextmanager
def largest_file(n_bytes):
    "Limit the size of files that this process writes; compiled modules would also be truncated."
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with patch.object(sys, 'dont_write_bytecode', True):
        resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
        try: yield
        finally: resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def contents(folder):
    "All files in a folder, by their paths in it."
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob('*')) if p.is_file()}


def check_line(error, path, *words):
    "Check that an error is one line that names the file, says what was kept, and gives a remedy."
    text = str(error.value)
    for expected in (str(path), 'not written, because ', '. To do: ', *words): assert expected in text, text
    assert '\n' not in text and len(text) < 500


@pytest.mark.parametrize('package', WRITERS)
def test_a_file_that_must_not_grow(package, tmp_path):
    "The first write, a replacement of an older file, and a write with enough space."
    name, write = WRITERS[package]
    path = tmp_path/name
    for before in ({}, None):
        if before is None:
            write(path)
            before = contents(tmp_path)
        with largest_file(LIMIT), pytest.raises(WriteError) as error: write(path)
        check_line(error, path, '(ulimit -f)', 'the old one is unchanged' if before else 'no part of it was left')
        assert contents(tmp_path) == before
    write(path)
    assert len(contents(tmp_path)) == 1


@pytest.mark.parametrize('package', WRITERS)
def test_special_files_are_not_replaced(package, tmp_path):
    name, write = WRITERS[package]
    path = tmp_path/name
    path.parent.mkdir(exist_ok=True)
    os.mkfifo(path)
    refused = f'{path}: not a (file|folder); choose another name'
    with pytest.raises(WriteError, match=refused): write(path)
    path.unlink()
    path.symlink_to('/dev/full')
    with pytest.raises(WriteError, match=f'{path}: not a (file|folder)'): write(path)
    assert path.is_char_device()


def test_a_folder_that_disappears(tmp_path, monkeypatch):
    "The folder disappears just before the file is renamed."
    rename = os.replace
    def remove_first(old, new):
        shutil.rmtree(Path(new).parent)
        rename(old, new)
    monkeypatch.setattr(os, 'replace', remove_first)
    for package in ('store', 'checkpoint', 'arpa', 'n-best'):
        name, write = WRITERS[package]
        with pytest.raises(WriteError) as error: write(tmp_path/'run'/name)
        check_line(error, tmp_path/'run'/name, 'its folder disappeared while it was written')
        assert list(tmp_path.iterdir()) == []


def test_a_full_disk(small_disk):
    for package in ('session', 'store', 'checkpoint', 'arpa.gz', 'text', 'folder'):
        name, write = WRITERS[package]
        (small_disk/'others').write_bytes(bytes(96 << 10))
        path = small_disk/package/name
        if path.parent != small_disk/package: path.parent.mkdir(parents=True)
        with pytest.raises(WriteError) as error: write(path)
        reason = 'not written, because the disk is full'
        if 'free, expected at least' not in str(error.value): check_line(error, path, reason, 'no part of it was left')
        (small_disk/'others').unlink()
        write(path)
        assert len(contents(small_disk/package)) == 1
        shutil.rmtree(small_disk/package)
    gc.collect() # Release memory maps of removed files
    with pytest.raises(WriteError, match='102 kB free, expected at least 200 kB for the trials'):
        require_space(small_disk, 200_000, 'the trials')


KILLED = '''
import os, signal, sys
from pathlib import Path
from b2t_kaggle.core.files import atomic_path, replaced_folder, scratch_folder

def write(k):
    "Write a file or a folder with each package's writer at the same time."
    if k == len(rooms):
        print('written', flush=True)
        sys.stdin.readline()
        rename = os.replace
        def only_first(old, new):
            rename(old, new)
            os.kill(os.getpid(), signal.SIGKILL)
        os.replace = only_first
        return
    kind, path = rooms[k]
    with dict(file=atomic_path, folder=replaced_folder, scratch=scratch_folder)[kind](path) as tmp:
        if kind == 'file': tmp.write_text('half')
        if kind == 'folder':
            tmp.mkdir()
            (tmp/'weights').write_text('new')
        if kind == 'scratch': (tmp/'text').write_text('some')
        write(k + 1)

rooms = [line.split() for line in sys.argv[1:]]
write(0)
'''


def test_files_of_a_killed_process_are_removed(tmp_path):
    """Temporary files stay while their process lives, and are removed afterwards; a folder that was being replaced is
    restored."""
    run = Run(tmp_path/'run', tmp_path/'work')
    adapter = run.dir/'adapter'
    adapter.mkdir()
    (adapter/'weights').write_text('old')
    files = [run.packed_dir/'train.arrow', run.dir/'train'/'last.pt', run.data_dir/DAY/'data_train.hdf5',
             tmp_path/'work'/'stages'/'pack.json']
    rooms = [f'file {f}' for f in files] + [f'scratch {run.dir}', f'folder {adapter}']
    child = subprocess.Popen([sys.executable, '-c', KILLED, *rooms], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert child.stdout.readline() == b'written\n'
        def left(): return [p for p in tmp_path.rglob('.*') if '.tmp' in p.name]
        before = left()
        StageRun(run, 'simulate')._clear_leftovers()
        clear_leftovers(run.dir)
        assert len(before) == len(rooms) and left() == before
        child.communicate(b'\n', timeout=60)
    finally: child.kill()
    assert child.returncode == -signal.SIGKILL
    assert left() == before and not adapter.exists()
    StageRun(run, 'simulate').begin()
    assert left() == [] and (adapter/'weights').read_text() == 'old'


def test_estimates_are_close_to_the_written_size(tmp_path):
    "Estimates are rather too large than too small."
    write_session(session_path(tmp_path, DAY, 'train'), trials(400))
    for options in (dict(), dict(dtype='float32', feature_subset=list(range(64)))):
        path = tmp_path/'train.arrow'
        real = TrialStore.build(tmp_path, 'train', path, progress=False, **options).path.stat().st_size
        assert real < packed_bytes(tmp_path, 'train', **options) < 1.25*real
    cfg = with_overrides(preset('demo'), {'data.sessions': [DAY]})
    model = build_model(cfg.model, 1)
    sizes = checkpoint_bytes(sum(p.numel() for p in model.parameters()), cfg)
    states = dict(best=model.state_dict(), last=[model.state_dict(), new_state(model)])
    for name, state in states.items():
        save_atomic(dict(state=state), tmp_path/name)
        real = (tmp_path/name).stat().st_size
        assert 0.9*real < sizes[name] < 1.1*real


def test_free_space_is_checked_before_anything_is_computed(tmp_path, monkeypatch):
    monkeypatch.setattr('b2t_kaggle.core.files.free_space', lambda folder: 50_000)
    size = dict(n_sessions=1, train=5, val=1, test=1, lm_sentences=10)
    with pytest.raises(WriteError, match='50.0 kB free, expected at least .* for 5 simulated trials'):
        simulate_dataset(tmp_path/'new', **size)
    write_session(session_path(tmp_path, DAY, 'train'), trials())
    monkeypatch.setattr('b2t_kaggle.core.files.free_space', lambda folder: 10_000)
    with pytest.raises(WriteError, match='expected at least .* for the packed trials of train'):
        TrialStore.build(tmp_path, 'train', tmp_path/'train.arrow')
    assert not list(tmp_path.glob('*.ar*'))


def test_the_command_reports_it_in_one_line(tmp_path):
    (tmp_path/'text').write_text('\n'.join(sentences(200)))
    build = ['lm', 'build', '--sentences', '--order', '3', str(tmp_path/'text'), '-o']
    with largest_file(LIMIT): result = CliRunner().invoke(main, [*build, str(tmp_path/'lm.arpa')])
    assert result.exit_code == 1 and result.output.startswith(f'Error: {tmp_path}/lm.arpa: not written'), result.output
    assert len(result.output.splitlines()) == 1 and os.listdir(tmp_path) == ['text']
    result = CliRunner().invoke(main, [*build, '/dev/null'])
    assert result.exit_code == 2 and '/dev/null: not a file' in result.output
    assert Path('/dev/null').is_char_device()


def test_a_stage_says_what_was_kept(tmp_path, monkeypatch):
    import papermill as pm
    run = Run(tmp_path/'run', tmp_path)
    (run.dir/'train').mkdir()
    def fail_with(error):
        def fails(*_, **__): raise error
        monkeypatch.setattr(pm, 'execute_notebook', fails)
        with pytest.raises(PipelineError) as found: execute(run, 'train')
        assert '\n' not in str(found.value)
        return str(found.value)
    inside = pm.PapermillExecutionError(3, 1, '', 'WriteError', 'last.pt: not written, because the disk is full', [])
    text = fail_with(inside)
    assert text.startswith('stage train: last.pt: not written, because the disk is full. The results of the stages')
    assert 'and nothing of it is saved yet' in text
    (run.dir/'train'/'last.pt').touch()
    assert 'and the last checkpoint is intact; the record is in ' in fail_with(inside)
    text = fail_with(OSError(errno.ENOSPC, 'No space left on device'))
    assert text.startswith(f'stage train: {run.dir}/notebooks/03_train.ipynb: not written, because the disk is full')


def test_errors_name_files_that_change_while_they_are_read(tmp_path):
    path = tmp_path/'a.arrow'
    store = write_ragged(path, [np.arange(3.), np.arange(4.)])
    damaged = bytearray(path.read_bytes())
    at = damaged.index(np.arange(4.).tobytes())
    damaged[at + 8] ^= 1
    path.write_bytes(damaged)   # Change the mapped file
    os.utime(path, (0, 0))
    store[0]
    with pytest.raises(RaggedError, match=r'a\.arrow: changed since it was opened, array 1'): store[1]
    with pytest.raises(RaggedError, match=r'a\.arrow: damaged, array 1'): type(store)(path)[1]


def test_temporary_files_are_made_in_one_place():
    "All temporary files have recognisable names, so that those of killed processes can be found."
    sources = Path(b2t_kaggle.__file__).parent.rglob('*.py')
    assert [f.name for f in sources if re.search(r'^(import|from) tempfile', f.read_text(), re.M)] == ['files.py']
