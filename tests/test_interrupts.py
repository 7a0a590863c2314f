"""Trainings of real runs that are asked to end in each of the ways there are: what they had is saved, they say how much
that is, and nobody of them stays."""
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

# Longer than any test, and nothing is saved unless somebody asks
WITHOUT_END = {'train.num_training_batches': 10**6, 'train.batches_per_save': 10**6,
               'train.batches_per_val_step': 10**6}


@pytest.fixture(autouse=True)
def hang_up_is_heard():
    "As outside of `nohup`, whose processes ignore SIGHUP, and so do those that they start."
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture(autouse=True)
def bars_are_drawn(monkeypatch):
    "Also into a pipe, in which they would write few lines: a test waits for the first steps."
    monkeypatch.setenv('B2T_PIPED', '')


@pytest.fixture(scope='module')
def packed(tmp_path_factory):
    "The work folder of a run whose sessions are packed."
    tmp = tmp_path_factory.mktemp('packed')
    with stages_here(): run_stages(Run(tmp/'run', tmp/'data', SMALL), 'pack')
    return tmp/'data'


def command(folder, work, verb='train', **values):
    options = ['--out', folder, '--work', work, '--name', 'asked', *sets(SMALL | WITHOUT_END | values)]
    return [sys.executable, '-m', 'b2t_kaggle.cli', verb, *map(str, options)]


def read_until(fd, pattern, seconds=LIMIT):
    "The text that is read until a pattern stands in it."
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
    "The checkpoint is that of which the command spoke, where it could; nobody is left."
    _, alive = psutil.wait_procs(gone, timeout=LIMIT)
    assert not alive, alive
    saved = load_file(folder/name/'train'/'last.pt')['step']
    assert saved >= 3
    said = f'Interrupted in the stage train: {saved:,} of 1,000,000 batches are saved'
    assert rest is None or said in rest, rest
    left = [p for p in folder.rglob('.*') if '.tmp' in p.name]
    assert not left, left


def test_ctrl_c_that_ends_the_reader_of_the_output_first(packed, tmp_path):
    "`b2t train 2>&1 | tee log`: the pipe is gone before anything can be saved, or said."
    reading, writing = os.pipe()
    p = subprocess.Popen(command(tmp_path, packed), stdout=writing, stderr=writing)
    os.close(writing)
    read_until(reading, STEPS)
    started = family(p.pid)
    os.close(reading)
    p.send_signal(signal.SIGINT)
    assert p.wait(LIMIT) in (130, 141)  # Whichever it notices first
    check_saved(tmp_path, None, started)


@pytest.mark.parametrize('n_processes', [1, 2])
def test_a_scheduler_that_ends_every_process(packed, tmp_path, n_processes):
    "SIGTERM to all that there are."
    with subprocess.Popen(command(tmp_path, packed, **{'train.processes': n_processes}), stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT) as p:
        read_until(p.stdout.fileno(), STEPS)
        started = family(p.pid)
        for q in [p, *started]:
            with suppress(psutil.NoSuchProcess): q.send_signal(signal.SIGTERM) # The first one may have ended others
        rest = p.stdout.read().decode()
        assert p.wait(LIMIT) == 128 + signal.SIGTERM, rest
    assert 'Traceback' not in rest, rest
    check_saved(tmp_path, rest, started)


def test_a_pipe_that_only_the_processes_of_a_training_write_to(packed, tmp_path):
    "They notice that nobody reads it, and say so to nobody: all of them save, and end."
    reading, writing = os.pipe()
    p = subprocess.Popen(command(tmp_path, packed, **{'train.processes': 2}), stdout=writing, stderr=writing)
    os.close(writing)
    read_until(reading, STEPS)
    started = family(p.pid)
    os.close(reading)
    assert p.wait(LIMIT) in (130, 141)  # Whether the command itself had something to say
    check_saved(tmp_path, None, started)


def test_a_terminal_that_is_closed(packed, tmp_path):
    "As by the end of a connection: SIGHUP comes, and nothing can be written any more."
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
    "The trial that is trained is saved, no other one is begun, and the same command goes on with it."
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
    assert [t.state.name for t in study.trials] == ['RUNNING'] # What the same command goes on with


def processes_of(mark):
    "Everything that was started with a variable of the environment, whoever is its parent now."
    found = []
    for p in psutil.process_iter():
        try:
            if p.environ().get('B2T_TEST_RUN') == mark: found.append(p)
        except (psutil.AccessDenied, psutil.NoSuchProcess, psutil.ZombieProcess): pass
    return found


def find(mark, word):
    "The first process of a run whose command has a word, as soon as there is one."
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
def test_nobody_outlives_what_started_it(packed, tmp_path, importing, killed):
    "It is killed while a process that it started has only begun to import."
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
