"""Locks: processes exclude each other even if some are killed, and never wait for a file without a holder, also if the
file system has no `flock`."""
import errno
import os
import sqlite3
import subprocess
import sys
import time

import no_locks
import numpy as np
import pytest

from b2t_kaggle.core import locks
from b2t_kaggle.core.locks import Lock
from b2t_kaggle.data.sessions import SPLITS, Trial, session_path, write_session
from b2t_kaggle.pipeline.run import Run
from b2t_kaggle.pipeline.stages import PipelineError
from b2t_kaggle.pipeline.stamps import StageRun

# Takes the lock twenty times, and fails if another process holds it too. It can be told to die while it holds the lock
# for the n-th time; at random, some tests would kill no process
HOLDER = '''
import os, random, sys, time
from b2t_kaggle.core import locks
folder, seed, dies_after = sys.argv[1:]
random.seed(seed)
for i in range(1, 21):
    lock = locks.Lock(f'{folder}/lock', 'a test')
    while not lock._take(): time.sleep(random.random()/500)
    os.close(os.open(f'{folder}/inside', os.O_CREAT | os.O_EXCL))
    time.sleep(random.random()/500)
    os.unlink(f'{folder}/inside')
    if i == int(dies_after): os._exit(9)
    lock.release()
'''


def test_processes_exclude_each_other_even_if_some_die(tmp_path):
    started = []
    for seed, dies_after in enumerate((3, 10, 20, 0)):
        command = [sys.executable, '-c', HOLDER, tmp_path, str(seed), str(dies_after)]
        started.append(subprocess.Popen(command, stderr=subprocess.PIPE))
    assert [(p.communicate()[1], p.returncode) for p in started] == [(b'', 9)]*3+[(b'', 0)]
    assert set(os.listdir(tmp_path)) <= {'lock'} # The file of a process that was the last to die


def test_a_holder_shows_that_it_lives(tmp_path, monkeypatch):
    monkeypatch.setattr(locks, '_BEAT', 0.01)
    with Lock(tmp_path/'lock', 'a test'):
        os.utime(tmp_path/'lock', (0, 0))
        while (tmp_path/'lock').stat().st_mtime == 0: time.sleep(0.01)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize('number', [errno.ENOLCK, errno.ENOSYS])
def test_a_stage_runs_on_a_file_system_without_locks(tmp_path, number):
    day = 't15.2023.08.13'
    x = np.zeros((20, 512), 'float32')
    for i, split in enumerate(SPLITS):
        trial = Trial(day, split, 'trial_0000', i, 0, x, np.array([17, 31, 40]), 'how')
        write_session(session_path(tmp_path/'data', day, split), [trial])
    command = ['check', '--name', 'x', '--data', tmp_path/'data', '--out', tmp_path/'runs', '--work', tmp_path/'work']
    run = Run(tmp_path/'runs'/'x', tmp_path/'work', {'data.dataset_dir': str(tmp_path/'data')})
    stage = StageRun(run, 'check')
    for suffix in ('.lock', '.running'):    # As a machine with flock left them
        file = stage.stamp_path.with_suffix(suffix)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
        os.utime(file, (0, 0))
    found = subprocess.run([sys.executable, '-m', 'b2t_kaggle.cli', *command], capture_output=True, text=True,
                           env=no_locks.environment(tmp_path, number))
    assert found.returncode == 0, found.stderr
    assert not [*tmp_path.rglob('*.lock'), *tmp_path.rglob('*.running')] and stage.stamp_path.exists()


def test_a_study_that_sqlite_cannot_lock_needs_a_journal(tmp_path):
    pytest.importorskip('optuna')
    from b2t_kaggle.pipeline.sweep import Sweep, ranges_of
    run = Run(tmp_path/'toy', tmp_path/'work', {'train.accelerator': 'cpu'})
    ranges = ranges_of({'train.lr_max': '1e-4:1e-2:log'}, run.cfg)
    with sqlite3.connect(run.dir/'study.db', isolation_level='EXCLUSIVE') as other:
        other.execute('begin exclusive')
        with pytest.raises(PipelineError, match='SQLite finds it locked.*--study FILE names a journal'):
            Sweep(run, ranges)
    Sweep(run, ranges, str(tmp_path/'journal'))
