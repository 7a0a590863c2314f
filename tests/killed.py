"""Trainings that a test kills. They take only as many steps as they may before they are killed, so that none comes to
its end first, however fast it is and however late the test."""
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

from copies import CONTEXT, call

from b2t_kaggle.core.files import file_state

LIMIT = 400 # Seconds in which what is waited for comes, such as a checkpoint or an end, on a machine that is busy


def ask_before_each_step(trainer: type, allowed) -> None:
    "In the training's process: a step of this class waits for the semaphore `allowed`."
    train_step = trainer.train_step

    def asking(self, *args):
        allowed.acquire()
        return train_step(self, *args)

    trainer.train_step = asking


def wait_for_checkpoint(p: BaseProcess, last: Path, before: tuple | None = None) -> None:
    "Until a process has written the checkpoint `last`, whose state was `before`."
    end = time.monotonic() + LIMIT
    while file_state(last) == before:
        assert p.is_alive(), 'it ended by itself'
        assert time.monotonic() < end, f'it has not written {last.name}'
        time.sleep(.002)


def kill_behind_a_checkpoint(function: Callable, arguments: tuple, last: Path, steps: int, delay: float = 0.) -> None:
    """Call a function of a module in a process of its own, with a semaphore for so many steps and `arguments`. It
    trains, and asks before each step. Kill it when it has written the checkpoint `last`, or some seconds later: then it
    is in one of its steps, or waits."""
    before = file_state(last)
    allowed = CONTEXT.Semaphore(steps) # Kept here: it is gone with its last name, and the process may be late
    p = call(function, allowed, *arguments)
    try:
        wait_for_checkpoint(p, last, before)
        time.sleep(delay)
        assert p.is_alive(), 'it ended before it could be killed'
    finally:
        p.kill()
        p.join()
