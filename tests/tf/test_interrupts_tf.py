"""A TensorFlow training is stopped by each kind of signal: it saves its progress, and reports how much it saved."""
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

pytest.importorskip('tensorflow', reason='needs TensorFlow: pip install b2t_kaggle[tf]')
sys.path.insert(0, str(Path(__file__).parents[1]))
import copies
from killed import LIMIT
from test_interrupts import STEPS, WITHOUT_END, bars_are_drawn, command, family, read_until  # noqa: F401
from test_pipeline import SMALL, stages_here
from test_trainer import open_stores, write_toy
from test_trainer_tf import cpu_config
from train_toy import start_copies

from b2t_kaggle.pipeline.execute import run_stages
from b2t_kaggle.pipeline.run import Run
from b2t_kaggle.tensorflow.checkpoint import load_last, load_model
from b2t_kaggle.tensorflow.trainer import train


@pytest.fixture(scope='module')
def toy(tmp_path_factory):
    folder = tmp_path_factory.mktemp('toy')
    write_toy(folder)
    open_stores(folder)
    return folder


def train_and_write_output(folder, out, writing):
    "Train in a separate process: its output goes to a pipe, and the message of its interruption to a file."
    signal.signal(signal.SIGHUP, signal.SIG_DFL) # `nohup` ignores it
    for stream in 1, 2: os.dup2(writing.fileno(), stream)
    writing.close()
    try: train(*open_stores(folder), cpu_config(**WITHOUT_END), out)
    except KeyboardInterrupt as e: (out/'said').write_text(str(e))


@pytest.mark.parametrize('how', ['SIGINT', 'SIGTERM', 'SIGHUP', 'a pipe that is gone'])
def test_a_training(toy, tmp_path, how):
    start_copies()
    reading, writing = copies.CONTEXT.Pipe(duplex=False)
    p = copies.call(train_and_write_output, toy, tmp_path, writing)
    writing.close()
    read_until(reading.fileno(), STEPS)
    if how in signal.Signals.__members__: os.kill(p.pid, signal.Signals[how])
    else: reading.close()
    p.join(LIMIT)
    saved = load_last(tmp_path/'last.weights.h5')['run']['step']
    assert p.exitcode == 0 and saved >= 3 and load_model(tmp_path/'last.weights.h5')
    assert (tmp_path/'said').read_text() == f'{saved:,} of 1,000,000 batches are saved'
    left = [f for f in tmp_path.rglob('.*') if '.tmp' in f.name]
    assert not left, left


def test_a_scheduler_that_ends_every_process_of_a_run(tmp_path):
    "SIGTERM to the command and to all processes that it started."
    values = {'train.framework': 'tensorflow', 'data.n_buckets': 1}
    with stages_here(): run_stages(Run(tmp_path/'run', tmp_path/'data', SMALL | values), 'pack')
    line = command(tmp_path, tmp_path/'data', **values)
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as p:
        read_until(p.stdout.fileno(), STEPS)
        started = family(p.pid)
        for q in [p, *started]:
            with suppress(psutil.NoSuchProcess): q.send_signal(signal.SIGTERM) # The first signal may have ended others
        rest = p.stdout.read().decode()
        assert p.wait(LIMIT) == 128 + signal.SIGTERM, rest
    assert not psutil.wait_procs(started, timeout=LIMIT)[1]
    saved = load_last(tmp_path/'asked'/'train'/'last.weights.h5')['run']['step']
    assert f'Interrupted in the stage train: {saved:,} of 1,000,000 batches are saved' in rest, rest
    assert 'Traceback' not in rest, rest
