"""Damaged and hostile files of every kind: the same result as undamaged, or one line that names the file.

`pytest tests/faults --faults 1000` tries a thousand drawn cases of each kind instead of a few. A kind is tried in a
process of its own that begins as a copy of this one, so that a crash or a hang is one of the case's results; its memory
and time are limited.
"""
import faulthandler
import json
import os
import resource
import shutil
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path

import h5py
import numpy as np
import pytest

import b2t_kaggle

sys.path.insert(0, str(Path(__file__).parent))
from cases import HOSTILE, SECRET, Kind, damaged, make_kinds  # noqa: E402

HERE = Path(b2t_kaggle.__file__).parent
REPORTED = ValueError, RuntimeError, OSError, ImportError  # What the command turns into one line
MAX_GROWTH = 100 << 20  # Bytes of memory that reading one file of some kilobytes may take
SECONDS = 20            # Of processor time for one file


@pytest.fixture(scope='module')
def kinds(tmp_path_factory): return make_kinds(tmp_path_factory.mktemp('kinds'))


@pytest.fixture(scope='module')
def secret(tmp_path_factory):
    "A file of somebody else, as bytes and as HDF5."
    path = tmp_path_factory.mktemp('elsewhere')/'secret'
    path.write_text(SECRET)
    with h5py.File(path.with_suffix('.h5'), 'w') as f:
        f['codes'] = np.array([ord(c) for c in SECRET.ljust(500, '\0')], 'i4')
        f.attrs['sentence_label'] = SECRET
    return path


def memory(name: str) -> int:
    "A figure of this process in bytes: `VmRSS`, or `VmHWM`, the most since it was reset."
    lines = Path('/proc/self/status').read_text().splitlines()
    return 1024*next(int(line.split()[1]) for line in lines if line.startswith(name))


def complaint(e: Exception, path: Path) -> str:
    "What is wrong with an error; empty where nothing is."
    text = str(e)
    raised_in = Path(traceback.extract_tb(e.__traceback__)[-1].filename)
    if not isinstance(e, REPORTED): return 'an error that the command does not expect'
    if not (raised_in.is_relative_to(HERE) or isinstance(e, OSError)): return f'raised in {raised_in}'
    if path.name not in text and path.parent.name not in text: return 'it does not name the file'
    if SECRET in text: return 'it quotes another file'
    if 'weights_only' in text: return 'it quotes advice to run what is in the file'
    return 'more than one line' if '\n' in text.strip() else 'a page' if len(text) > 1500 else ''


def outcome(kind: Kind, path: Path) -> dict:
    "What reading a file ends in: `result`, or `error`; and `complaint`, where that is not as promised."
    Path('/proc/self/clear_refs').write_text('5')  # The most memory is counted from here on
    before = memory('VmRSS')
    try: found = dict(result=str(kind.read(path)))
    except AssertionError as e: found = dict(error=str(e)[:2000], complaint='an assertion of the reader')
    except Exception as e: found = dict(error=f'{type(e).__name__}: {e}'[:2000], complaint=complaint(e, path))
    growth = memory('VmHWM') - before
    if growth > MAX_GROWTH: found['complaint'] = f'{growth >> 20} MB of memory'
    if SECRET in found.get('result', ''): found['complaint'] = 'it shows another file'
    return found


def put(kind: Kind, folder: Path) -> Path:
    "A copy of all that belongs to a whole file, which may be changed."
    shutil.rmtree(folder, ignore_errors=True)
    root = kind.path.parents[1]
    shutil.copytree(root, folder)
    return folder/kind.path.relative_to(root)


def try_all(kind: Kind, cases: list, folder: Path, out) -> None:
    "Try cases, (name, make, arguments) each, and write a line about each, one before and one after."
    warnings.simplefilter('ignore')
    limit = memory('VmSize') + (4 << 30)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    path = put(kind, folder)
    expected = outcome(kind, path)
    print(json.dumps(dict(case='whole', **expected)), file=out, flush=True)
    for name, make, *arguments in cases:
        print(json.dumps(dict(case=name)), file=out, flush=True)
        used = int(time.process_time())
        resource.setrlimit(resource.RLIMIT_CPU, (used + SECONDS, resource.RLIM_INFINITY))
        path = put(kind, folder)
        make(path, *arguments)
        found = outcome(kind, path)
        if name.isdigit() and kind.has_checksum and found.get('result', expected['result']) != expected['result']:
            found['complaint'] = 'damage was not noticed'
        print(json.dumps(dict(case=name, **found)), file=out, flush=True)


def in_a_process(kind: Kind, cases: list, folder: Path) -> list[dict]:
    "What each case ended in; a case that the process did not survive has `complaint`."
    log = folder.with_suffix('.log')
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            faulthandler.disable()  # A crash is a result, and no matter for a page
            with open(log, 'w') as out: try_all(kind, cases, folder, out)
            status = 0
        except BaseException: traceback.print_exc()
        finally: os._exit(status)
    _, status = os.waitpid(pid, 0)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    found = [line for line in lines if 'result' in line or 'error' in line]
    if status:
        last = lines[-1] if lines else dict(case='whole')
        found.append(last | dict(complaint=f'the process ended with status {status}'))
    return found


def report(found: list[dict]) -> str:
    "The cases that did not end as promised."
    return '\n'.join(f'{f["case"]}: {f["complaint"]}: {f.get("error", "")[:400]}' for f in found if f.get('complaint'))


@pytest.mark.parametrize('name', HOSTILE)
def test_hostile_files_and_damaged_ones(kinds, secret, tmp_path, name, request):
    kind = kinds[name]
    n = request.config.getoption('--faults')
    cases = [(str(i), lambda path, i: path.write_bytes(damaged(kind, name, i)), i) for i in range(n)]
    cases += [(case, make, secret) for case, make in HOSTILE[name].items()]
    found = in_a_process(kind, cases, tmp_path/'case')
    assert not report(found), report(found)
    assert len(found) == 1 + len(cases)


def test_the_campaign_notices_what_it_looks_for(kinds, tmp_path, secret):
    "A reader that fails in each of the ways in turn."
    path = kinds['config'].path
    def raises(error): return lambda p: (_ for _ in ()).throw(error)
    readers = {
        'an error that': raises(KeyError(path.name)), 'raised in': raises(ValueError(path.name)),
        'MB of memory': lambda p: np.ones(20 << 20).sum(), 'another file': lambda p: secret.read_text(),
        'ended with status': lambda p: os.kill(os.getpid(), signal.SIGSEGV),
    }
    for expected, read in readers.items():
        found = in_a_process(Kind(path, read), [('0', lambda p: None)], tmp_path/'case')
        assert expected in report(found), (expected, found)
    silent = Kind(path, lambda p: p.read_text(), has_checksum=True)
    found = in_a_process(silent, [('0', lambda p: p.write_text('changed'))], tmp_path/'case')
    assert report(found).startswith('0: damage was not noticed')
