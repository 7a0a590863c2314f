"""Trainings that a test kills. They take only as many steps as they may before they are killed, so that none comes to
its end first, however fast it is and however late the test."""
import time
from collections.abc import Callable
from pathlib import Path

from copies import CONTEXT, call

from b2t_kaggle.files import file_state

LIMIT = 400 # Seconds until there is a checkpoint, on a machine that is busy with other things


def ask_before_each_step(trainer: type, allowed) -> None:
    "In the training's process: a step of this class waits for the semaphore `allowed`."
    train_step = trainer.train_step

    def asking(self, *args):
        allowed.acquire()
        return train_step(self, *args)

    trainer.train_step = asking


def kill_behind_a_checkpoint(function: Callable, arguments: tuple, last: Path, steps: int, delay: float = 0.) -> None:
    """Call a function of a module in a process of its own, with a semaphore for so many steps and `arguments`. It
    trains, and asks before each step. Kill it when it has written the checkpoint `last`, or some seconds later: then it
    is in one of its steps, or waits."""
    before = file_state(last)
    end = time.monotonic() + LIMIT
    allowed = CONTEXT.Semaphore(steps) # Is gone for the process, too, when nothing here refers to it any more
    p = call(function, allowed, *arguments)
    try:
        while file_state(last) == before:
            assert p.is_alive(), 'it ended by itself'
            assert time.monotonic() < end, f'it has not written {last.name}'
            time.sleep(.002)
        time.sleep(delay)
        assert p.is_alive(), 'it ended before it could be killed'
    finally:
        p.kill()
        p.join()
