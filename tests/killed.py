"""Trainings that a test kills. They take only as many steps as they may before they are killed, so that none comes to
its end first, however fast it is and however late the test."""
import subprocess
import sys
import time
from pathlib import Path

from b2t_kaggle.files import file_state

LIMIT = 400 # Seconds until there is a checkpoint, on a machine that is busy with other things


def ask_before_each_step(trainer: type) -> None:
    "In the training's process: a step of this class waits for a byte of the standard input, until that is closed."
    train_step = trainer.train_step

    def asking(self, *args):
        sys.stdin.buffer.read(1)
        return train_step(self, *args)

    trainer.train_step = asking


def kill_behind_a_checkpoint(command: list, env: dict, last: Path, steps: int, delay: float = 0.) -> None:
    """Start a training that asks before each step, allow it so many, and kill it when it has written the checkpoint
    `last`, or some seconds later: then it is in one of its steps, or waits."""
    before = file_state(last)
    end = time.monotonic() + LIMIT
    p = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    try:
        p.stdin.write(b'.'*steps)
        p.stdin.flush()
        while file_state(last) == before:
            assert p.poll() is None, 'it ended by itself'
            assert time.monotonic() < end, f'it has not written {last.name}'
            time.sleep(.002)
        time.sleep(delay)
        assert p.poll() is None, 'it ended before it could be killed'
    finally:
        p.kill()
        p.wait()
        p.stdin.close()
