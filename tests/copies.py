"""Forks of a process that has already imported large packages, because importing a framework takes longer than most
tests."""
import multiprocessing
import os
import socket
import sys
from collections.abc import Callable, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

CONTEXT = multiprocessing.get_context('forkserver')
# The campaign of tests/faults shares the process
TRAINER = ['b2t_kaggle.pytorch.trainer', 'campaign']


FAULTS = str(Path(__file__).parent/'faults')
PRELOADED: set[str] = set() # Modules of the running process


def start(preload: Sequence[str] = TRAINER) -> None:
    """Start the process to fork, which ignores modules that cannot be found. A running process is kept if it was
    started with all of these modules; otherwise it is replaced, since no copies are left when a test begins."""
    if PRELOADED.issuperset(preload): return
    if PRELOADED: forkserver._forkserver._stop()
    PRELOADED.clear()
    PRELOADED.update(preload)
    with pytest.MonkeyPatch.context() as m:
        for name in ('OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS', 'MKL_NUM_THREADS'): m.setenv(name, '1')
        m.setenv('PYTHONPATH', os.pathsep.join(p for p in [*sys.path, FAULTS] if p))
        forkserver.set_forkserver_preload([*preload, 'preloaded'])
        forkserver.ensure_running()


def call(function: Callable, *arguments) -> BaseProcess:
    "Call a module's function in a copy, which ends with this process."
    if not PRELOADED: start()
    process = CONTEXT.Process(target=function, args=arguments, daemon=True)
    process.start()
    return process


def status_of(function: Callable, *arguments, seconds: float = 300) -> int | None:
    "Exit status of a function that runs in a copy; `None` if it had to be killed after `seconds`."
    p = call(function, *arguments)
    p.join(seconds)
    status = p.exitcode
    p.kill()
    p.join()
    return status


def _with_variables(variables: dict[str, str], function: Callable, arguments: tuple) -> None:
    os.environ.update(variables)
    function(*arguments)


def call_with(variables: dict[str, str], function: Callable, *arguments) -> BaseProcess:
    "Call a function in a copy with these environment variables."
    return call(_with_variables, variables, function, arguments)


def _run_with_output(folder: Path, function: Callable, arguments: tuple) -> None:
    for i, name in ((1, 'stdout'), (2, 'stderr')):
        with (folder/name).open('wb') as file: os.dup2(file.fileno(), i)
    function(*arguments)


def run_and_read(variables: dict[str, str], folder: Path, function: Callable, *arguments, seconds: float = 800) -> str:
    """Call a function in a copy with these environment variables, and return what it prints. The function must succeed.
    Both of its output streams are written to files in `folder`."""
    p = call_with(variables, _run_with_output, folder, function, arguments)
    p.join(seconds)
    p.kill()
    assert p.exitcode == 0, f'exit code {p.exitcode}: {(folder/"stderr").read_text()[-3000:]}'
    return (folder/'stdout').read_text()


def call_as_ranks(n: int, function: Callable, *arguments, seconds: float = 300) -> int:
    """Call a function in `n` copies with the environment variables that torchrun sets; returns 0 if all succeed. If one
    fails, or takes longer than `seconds`, all are killed."""
    with socket.socket() as reserved: # Reserved until the copies end, so that no other process is given the port
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(('127.0.0.1', 0))
        shared = dict(MASTER_ADDR='127.0.0.1', MASTER_PORT=str(reserved.getsockname()[1]), WORLD_SIZE=str(n))
        ranks = [call_with(shared | dict(RANK=str(i), LOCAL_RANK=str(i)), function, *arguments) for i in range(n)]
        running = {p.sentinel: p for p in ranks}
        while running:
            ended = [running.pop(s) for s in wait(list(running), seconds)]
            if not ended or any(p.exitcode for p in ended): break
        for p in ranks:
            p.kill()
            p.join()
    return max(abs(p.exitcode) for p in ranks)
