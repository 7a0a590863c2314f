"""Reuse of compiled code: functions that Numba compiled in a checkout, with which tests and documentation begin in
other checkouts of the same sources; and programs that XLA compiled for TensorFlow, for later tests."""
import fcntl
import hashlib
import itertools
import os
import platform
import re
import shutil
import sys
import tempfile
import zlib
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parent.parent
# Next to the environments that `kit` creates
CACHE = Path(os.environ.get('XDG_CACHE_HOME') or Path.home()/'.cache')/'b2t_kaggle'
COMPILED = Path(os.environ.get('B2T_ENVS') or CACHE)/'numba'
PROGRAMS = COMPILED.parent/'xla'
LARGEST = 2**30 # Maximum bytes of programs, enough for about ten versions of the sources

BEGAN_WITH = set() # Marker of the sources with which this session began


def compiled_files(package): return sorted(package.rglob('__pycache__/*.nb[ci]'))


def compiled_marker():
    """The file whose name identifies the sources of this checkout's compiled functions: all modules with such functions
    together, because Numba does not notice when a function in another module changes."""
    compiled = re.compile(rb'njit|numba|^(BLANK|SIL|LN10) *=', re.M) # Functions, intrinsics, frozen constants
    sources = [p for p in sorted((ROOT/'b2t_kaggle').rglob('*.py')) if compiled.search(p.read_bytes())]
    key = hashlib.sha256(f'{version("numba")} {sys.version}'.encode())
    for p in sources: key.update(str(p.relative_to(ROOT)).encode() + p.read_bytes())
    return ROOT/'b2t_kaggle'/'__pycache__'/f'numba-{key.hexdigest()[:16]}'


def snapshots(marker):
    "Folders of compiled functions, the fullest last; they are never changed."
    return sorted((COMPILED/marker.name).glob('[0-9]*'))


def take_compiled():
    "Begin with the functions that another checkout of the same sources compiled; delete those of other sources."
    marker = compiled_marker()
    BEGAN_WITH.add(marker)
    package = ROOT/'b2t_kaggle'
    marker.parent.mkdir(exist_ok=True)
    with (marker.parent/'numba.lock').open('w') as lock: # `./kit test` starts three sessions at once
        fcntl.flock(lock, fcntl.LOCK_EX)
        if marker.exists(): return
        for old in (*compiled_files(package), *marker.parent.glob('numba-*')): old.unlink(missing_ok=True)
        for folder in snapshots(marker)[-1:]: shutil.copytree(folder, package, dirs_exist_ok=True)
        marker.touch()


def keep_compiled():
    "Save compiled functions for other checkouts, if they are a tenth more than before; keep a few sets of sources."
    marker = compiled_marker()
    package = ROOT/'b2t_kaggle'
    files = compiled_files(package)
    name = f'{len(files):05}'
    kept = snapshots(marker)
    if marker not in BEGAN_WITH or not marker.exists() or not files: return
    if kept and int(kept[-1].name) > 0.9*len(files): return
    marker_folder = COMPILED/marker.name
    marker_folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=COMPILED) as tmp:
        for p in files:
            copy = Path(tmp)/name/p.relative_to(package)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(p, copy)
        if not (marker_folder/name).exists(): os.rename(Path(tmp)/name, marker_folder/name)
    for old in sorted(COMPILED.glob('numba-*'), key=os.path.getmtime)[:-5]: shutil.rmtree(old, ignore_errors=True)


def instructions():
    "Instruction sets of this machine's processor: a program compiled on another may need more."
    lines = Path('/proc/cpuinfo').read_text().splitlines() if Path('/proc/cpuinfo').exists() else []
    return next((line for line in lines if line.startswith(('flags', 'Features'))), platform.processor())


def keep_programs(environ=os.environ):
    """Have TensorFlow save the programs that XLA compiles, and reuse them for identical programs. Each environment and
    processor has its own folder, which is emptied when it has grown too large."""
    key = hashlib.sha256(f'{sys.prefix} {environ.get("XLA_FLAGS")} {instructions()}'.encode()).hexdigest()[:16]
    folder = PROGRAMS/key
    folder.mkdir(parents=True, exist_ok=True)
    files = list(folder.iterdir())
    if sum(p.stat().st_size for p in files) > LARGEST:
        for p in files: p.unlink(missing_ok=True)
    if ' ' not in str(folder): # A space would end the flag
        environ.setdefault('TF_XLA_FLAGS', f'--tf_xla_persistent_cache_directory={folder}')


def number_names(test):
    """Make a test's names of TensorFlow's functions and Keras' layers independent of earlier tests in its process. Both
    number their names consecutively, and a saved program is found by its names. Each test has its own numbers."""
    ops = sys.modules.get('tensorflow.python.framework.ops')
    keras = sys.modules.get('keras')
    if ops: ops.uid = itertools.count(zlib.crc32(test.encode()) << 20).__next__
    if keras: keras.utils.clear_session(free_memory=False)
