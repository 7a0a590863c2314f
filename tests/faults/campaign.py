"""Run a fault case in a separate process, so that a crash or hang is a result. Memory, CPU time and wall-clock time are
limited.

The processes are forked from a single-threaded process that has already imported their modules.
"""
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
from cases import HOSTILE, SECRET, Kind, damaged, kinds_in

import b2t_kaggle

sys.path.insert(0, str(Path(__file__).parents[1]))
import copies  # noqa: E402

HERE = Path(b2t_kaggle.__file__).parent
REPORTED = ValueError, RuntimeError, OSError, ImportError  # Errors that the command reports in one line
MAX_GROWTH = 100 << 20  # Bytes of memory allowed for reading a file of a few kilobytes
CPU_SECONDS = 20        # CPU time for one file
SECONDS = 300           # Wall-clock time for one file, on a busy machine


# In the separate process

def memory(name: str) -> int:
    "Memory of this process in bytes: `VmRSS`, or `VmHWM`, the peak since its last reset."
    lines = Path('/proc/self/status').read_text().splitlines()
    return 1024*next(int(line.split()[1]) for line in lines if line.startswith(name))


def complaint(e: Exception, kind: Kind, path: Path) -> str:
    "Problem with an error message, or `''`."
    text = str(e)
    raised_in = Path(traceback.extract_tb(e.__traceback__)[-1].filename)
    if not isinstance(e, REPORTED): return 'an error that the command does not expect'
    if not (raised_in.is_relative_to(HERE) or isinstance(e, OSError)): return f'raised in {raised_in}'
    if path.name not in text and path.parent.name not in text: return 'it does not name the file'
    if SECRET in text: return 'it quotes another file'
    if 'weights_only' in text: return 'it quotes advice to run what is in the file'
    lines = text.strip().splitlines()
    return 'too many lines' if len(lines) > kind.n_lines else 'a page' if max(map(len, lines)) > 1500 else ''


def outcome(kind: Kind, path: Path) -> dict:
    "The `result` or `error` of reading a file, with a `complaint` if it is not as promised."
    Path('/proc/self/clear_refs').write_text('5')  # Reset the memory peak
    before = memory('VmRSS')
    try: found = dict(result=str(kind.read(path)))
    except AssertionError as e: found = dict(error=str(e)[:2000], complaint='an assertion of the reader')
    except Exception as e: found = dict(error=f'{type(e).__name__}: {e}'[:2000], complaint=complaint(e, kind, path))
    growth = memory('VmHWM') - before
    if growth > MAX_GROWTH: found['complaint'] = f'{growth >> 20} MB of memory'
    if SECRET in found.get('result', ''): found['complaint'] = 'it shows another file'
    return found


def put(kind: Kind, folder: Path) -> Path:
    "A copy of a kind's file and its folder, which may be changed."
    shutil.rmtree(folder, ignore_errors=True)
    root = kind.path.parents[1]
    shutil.copytree(root, folder)
    return folder/kind.path.relative_to(root)


def try_all(kind: Kind, cases: list, folder: Path, out) -> None:
    "Try cases `(name, make, arguments)` and send a dict about each, once before and once after."
    warnings.simplefilter('ignore')
    path = put(kind, folder)
    out.send(dict(case='whole'))
    outcome(kind, path)  # Import and compile the reader's code, which is not counted
    limit = memory('VmSize') + (4 << 30)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    expected = outcome(kind, path)
    if 'result' not in expected: expected['complaint'] = expected['complaint'] or 'a whole file is refused'
    out.send(dict(case='whole', **expected))
    for name, make, *arguments in cases:
        out.send(dict(case=name))
        used = int(time.process_time())
        resource.setrlimit(resource.RLIMIT_CPU, (used + CPU_SECONDS, resource.RLIM_INFINITY))
        path = put(kind, folder)
        make(path, *arguments)
        found = outcome(kind, path)
        if name.isdigit() and kind.has_checksum and found.get('result', expected['result']) != expected['result']:
            found['complaint'] = 'damage was not noticed'
        out.send(dict(case=name, **found))


def try_kind(out, copy: Path, folder: Path, name: str, n: int, secret: Path) -> None:
    "Try all hostile cases of a kind, and `n` random ones."
    kind = kinds_in(folder)[name]
    cases = [(str(i), lambda path, i: path.write_bytes(damaged(kind, name, i)), i) for i in range(n)]
    cases += [(case, make, secret) for case, make in HOSTILE[name].items()]
    try_all(kind, cases, copy, out)


def _raise(error: Exception): raise error


# Broken readers by the expected complaint, given the path and the secret
READERS = {
    'an error that': lambda p, s: _raise(KeyError(p.name)),
    'a whole file is refused': lambda p, s: _raise(OSError(p.name)),
    'raised in': lambda p, s: _raise(ValueError(p.name)),
    'MB of memory': lambda p, s: np.ones(20 << 20).sum(),
    'another file': lambda p, s: s.read_text(),
    'ended with status': lambda p, s: os.kill(os.getpid(), signal.SIGSEGV),
    'hangs': lambda p, s: os.read(os.pipe()[0], 1),
    'damage was not noticed': lambda p, s: p.read_text(),
}


def try_reader(out, copy: Path, path: Path, expected: str, secret: Path) -> None:
    "Try one of `READERS`."
    kind = Kind(path, lambda p: READERS[expected](p, secret), has_checksum=True)
    try_all(kind, [('0', lambda p: p.write_text('changed'))], copy, out)


# In the tests' process

def start() -> None:
    "Start the process that cases are forked from."
    copies.start(['campaign'])


def in_a_process(target: Callable, *arguments, seconds: float = SECONDS) -> list[dict]:
    """Outcomes of the cases that `target(connection, *arguments)` tried; a case that crashed the process, or took
    longer than `seconds`, has a `complaint`."""
    context = multiprocessing.get_context('forkserver')
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=target, args=(sender, *arguments), daemon=True)
    process.start()
    sender.close()
    sent = [dict(case='whole')]
    hangs = False
    try:
        while not hangs:
            hangs = not receiver.poll(seconds)
            if not hangs: sent.append(receiver.recv())
    except EOFError: pass
    if hangs: process.kill()
    process.join(60)
    found = [s for s in sent if 'result' in s or 'error' in s]
    how = 'hangs' if hangs else f'the process ended with status {process.exitcode}'
    if hangs or process.exitcode: found.append(dict(case=sent[-1]['case'], complaint=how))
    return found


def report(found: list[dict]) -> str:
    "The cases with a complaint."
    return '\n'.join(f'{f["case"]}: {f["complaint"]}: {f.get("error", "")[:400]}' for f in found if f.get('complaint'))
