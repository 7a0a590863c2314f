"""Trainings of real runs that are interrupted in each possible way: their progress is saved, they report how much was
saved, and no process is left."""
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress

import psutil
import pytest
from killed import LIMIT
from test_pipeline import SMALL, sets, stages_here

from b2t_kaggle.pipeline.execute import run_stages
from b2t_kaggle.pipeline.run import Run
from b2t_kaggle.pytorch.checkpoint import load_file

# The training lasts longer than any test, and nothing is saved before it is interrupted
WITHOUT_END = {'train.num_training_batches': 10**6, 'train.batches_per_save': 10**6,
               'train.batches_per_val_step': 10**6}


@pytest.fixture(autouse=True)
def default_hang_up_signal():
    "SIGHUP ends processes, unlike under `nohup`, whose processes and their children ignore it."
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture(autouse=True)
def bars_are_drawn(monkeypatch):
    "Progress bars are also drawn into a pipe, so that a test can wait for the first steps."
    monkeypatch.setenv('B2T_PIPED', '')


@pytest.fixture(scope='module')
def packed(tmp_path_factory):
    "The work folder of a run with packed sessions."
    tmp = tmp_path_factory.mktemp('packed')
    with stages_here(): run_stages(Run(tmp/'run', tmp/'data', SMALL), 'pack')
    return tmp/'data'


def command(folder, work, verb='train', **values):
    options = ['--out', folder, '--work', work, '--name', 'asked', *sets(SMALL | WITHOUT_END | values)]
    return [sys.executable, '-m', 'b2t_kaggle.cli', verb, *map(str, options)]


def read_until(fd, pattern, seconds=LIMIT):
    "The text that was read until a pattern occurred in it."
    text = ''
    end = time.monotonic() + seconds
    while not re.search(pattern, text):
        assert time.monotonic() < end, f'{pattern} did not come: {text[-3000:]}'
        assert select.select([fd], [], [], max(0, end - time.monotonic()))[0], f'{pattern} did not come: {text[-3000:]}'
        got = os.read(fd, 4096).decode(errors='replace')
        assert got, f'it ended: {text[-3000:]}'
        text += got
    return text


STEPS = r' ([3-9]|\d\d+)/1000000 '  # Some batches are done


def family(pid): return psutil.Process(pid).children(recursive=True)


def check_saved(folder, rest, gone, name='asked'):
    "Check that the command reported the checkpoint that exists, if it could report it, and that no process is left."
    _, alive = psutil.wait_procs(gone, timeout=LIMIT)
    assert not alive, alive
    saved = load_file(folder/name/'train'/'last.pt')['step']
    assert saved >= 3
    said = f'Interrupted in the stage train: {saved:,} of 1,000,000 batches are saved'
    assert rest is None or said in rest, rest
    left = [p for p in folder.rglob('.*') if '.tmp' in p.name]
    assert not left, left


def test_ctrl_c_that_ends_the_reader_of_the_output_first(packed, tmp_path):
    "`b2t train 2>&1 | tee log`: the pipe is closed before anything is saved or printed."
    reading, writing = os.pipe()
    p = subprocess.Popen(command(tmp_path, packed), stdout=writing, stderr=writing)
    os.close(writing)
    read_until(reading, STEPS)
    started = family(p.pid)
    os.close(reading)
    p.send_signal(signal.SIGINT)
    assert p.wait(LIMIT) in (130, 141)  # Depends on which it notices first
    check_saved(tmp_path, None, started)


@pytest.mark.parametrize('n_processes', [1, 2])
def test_a_scheduler_that_ends_every_process(packed, tmp_path, n_processes):
    "SIGTERM to the command and to all of its processes."
    with subprocess.Popen(command(tmp_path, packed, **{'train.processes': n_processes}), stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT) as p:
        read_until(p.stdout.fileno(), STEPS)
        started = family(p.pid)
        for q in [p, *started]:
            with suppress(psutil.NoSuchProcess): q.send_signal(signal.SIGTERM) # The first signal may have ended others
        rest = p.stdout.read().decode()
        assert p.wait(LIMIT) == 128 + signal.SIGTERM, rest
    assert 'Traceback' not in rest, rest
    check_saved(tmp_path, rest, started)


def test_a_pipe_that_only_the_processes_of_a_training_write_to(packed, tmp_path):
    "All processes notice that the pipe is closed, cannot report it, save and end."
    reading, writing = os.pipe()
    p = subprocess.Popen(command(tmp_path, packed, **{'train.processes': 2}), stdout=writing, stderr=writing)
    os.close(writing)
    read_until(reading, STEPS)
    started = family(p.pid)
    os.close(reading)
    assert p.wait(LIMIT) in (130, 141)  # Depends on whether the command itself wrote to the pipe
    check_saved(tmp_path, None, started)


def test_a_terminal_that_is_closed(packed, tmp_path):
    "At the end of a connection, for example, SIGHUP arrives, and nothing can be written any more."
    pid, terminal = pty.fork()
    if pid == 0: os.execv(sys.executable, command(tmp_path, packed))
    read_until(terminal, STEPS)
    started = family(pid)
    os.close(terminal)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 128 + signal.SIGHUP
    check_saved(tmp_path, None, started)


@pytest.mark.parametrize('how', ['SIGTERM', 'a pipe that is gone'])
def test_a_sweep(packed, tmp_path, how):
    "The current trial is saved, no other trial starts, and the same command continues with it."
    optuna = pytest.importorskip('optuna', reason='Optuna is not installed: ./kit env sweep')
    reading, writing = os.pipe()
    p = subprocess.Popen(command(tmp_path, packed, 'sweep', **{'model.n_units': '8,16'}), stdout=writing,
                         stderr=writing)
    os.close(writing)
    read_until(reading, STEPS)
    started = family(p.pid)
    rest = None
    if how in signal.Signals.__members__:
        p.send_signal(signal.Signals[how])
        with open(reading) as f: rest = f.read()
    else: os.close(reading)
    assert p.wait(LIMIT) in ((128 + signal.Signals[how],) if rest else (130, 141)), rest
    check_saved(tmp_path, rest, started, 'asked-000')
    assert [f.name for f in tmp_path.glob('asked-*')] == ['asked-000'] and 'Traceback' not in (rest or '')
    assert rest is None or re.search(r'Continue with:\s+\S.* sweep --out', rest), rest
    study = optuna.load_study(study_name='asked', storage=f'sqlite:///{tmp_path/"asked"/"study.db"}')
    assert [t.state.name for t in study.trials] == ['RUNNING'] # The same command continues with this trial


def processes_of(mark):
    "Processes with this value of an environment variable, whichever process is their parent now."
    found = []
    for p in psutil.process_iter():
        try:
            if p.environ().get('B2T_TEST_RUN') == mark: found.append(p)
        except (psutil.AccessDenied, psutil.NoSuchProcess, psutil.ZombieProcess): pass
    return found


def find(mark, word):
    "The first process of a run whose command line contains a word; waits until it exists."
    end = time.monotonic() + LIMIT
    while time.monotonic() < end:
        for p in processes_of(mark):
            with suppress(psutil.NoSuchProcess):
                if any(word in argument for argument in p.cmdline()): return p
        time.sleep(.01)
    raise AssertionError(f'no {word} was started')


KERNEL, TORCHRUN, WORKER = 'ipykernel.kernelapp', 'torch.distributed.run', 'worker.py'


@pytest.mark.parametrize(('importing', 'killed'), [
    (KERNEL, 'the command'), (TORCHRUN, 'its parent'), (WORKER, 'its parent'), (WORKER, 'the command')])
def test_no_process_outlives_its_parent(packed, tmp_path, importing, killed):
    "A process is killed while a process that it started is still importing modules."
    env = os.environ | {'B2T_TEST_RUN': str(tmp_path)}
    null = subprocess.DEVNULL
    p = subprocess.Popen(command(tmp_path, packed, **{'train.processes': 2}), env=env, stdout=null, stderr=null)
    try:
        begun = find(str(tmp_path), importing)
        os.kill(p.pid if killed == 'the command' else begun.ppid(), signal.SIGKILL)
        p.wait(LIMIT)
        end = time.monotonic() + LIMIT
        while alive := processes_of(str(tmp_path)):
            assert time.monotonic() < end, alive
            time.sleep(.01)
    finally:
        for q in processes_of(str(tmp_path)):
            with suppress(psutil.NoSuchProcess): q.kill()
