"""Trainings that a test kills. A semaphore limits their steps, so that no training ends before it is killed, however
fast it is or however late the test."""
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

from copies import CONTEXT, call

from b2t_kaggle.core.files import file_state

LIMIT = 400 # Timeout on a busy machine, in seconds, for example for a checkpoint or the end of a process


def ask_before_each_step(trainer: type, allowed) -> None:
    "Make each step of this class wait for the semaphore `allowed`; called in the training's process."
    train_step = trainer.train_step

    def asking(self, *args):
        allowed.acquire()
        return train_step(self, *args)

    trainer.train_step = asking


def wait_for_checkpoint(p: BaseProcess, last: Path, before: tuple | None = None) -> None:
    "Wait until a process has replaced the checkpoint `last`, whose state was `before`."
    end = time.monotonic() + LIMIT
    while file_state(last) == before:
        assert p.is_alive(), 'it ended by itself'
        assert time.monotonic() < end, f'it has not written {last.name}'
        time.sleep(.002)


def kill_after_a_checkpoint(function: Callable, arguments: tuple, last: Path, steps: int, delay: float = 0.) -> None:
    """Call a module's function in a separate process, with a semaphore for `steps` steps and with `arguments`. It
    trains, and acquires the semaphore before each step. The process is killed `delay` seconds after it has written the
    checkpoint `last`, in a step or while it waits."""
    before = file_state(last)
    allowed = CONTEXT.Semaphore(steps) # Referenced until the end, because the process may start late
    p = call(function, allowed, *arguments)
    try:
        wait_for_checkpoint(p, last, before)
        time.sleep(delay)
        assert p.is_alive(), 'it ended before it could be killed'
    finally:
        p.kill()
        p.join()
