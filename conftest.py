"""Every notebook is a test, in addition to tests/: `pytest nbs/00_phonemes.ipynb` runs one.

Notebooks and test files share the worker processes of pytest-xdist. The longest start first, so that all cores finish
at about the same time, and each worker imports PyTorch only once.
"""
import atexit
import gc
import os
import random
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import settings

ROOT = Path(__file__).parent
sys.path.append(str(ROOT/'tools'))
from compiled import keep_compiled, keep_programs, number_names, take_compiled  # noqa: E402

# On a busy machine, an example may take longer than hypothesis' deadline
settings.register_profile('kit', deadline=None)
settings.load_profile('kit')
# Processes that a test starts use bytecode that earlier processes compiled
os.environ.pop('PYTHONDONTWRITEBYTECODE', None)
sys.dont_write_bytecode = False
# Tiny models compute in no time but compile for minutes, so LLVM need not optimise XLA's code, in TensorFlow and in
# PyTorch/XLA (40 and 60 % less processor time), nor split it into parts for more cores (a sixth less in PyTorch/XLA).
# This does not change what is compiled, how often, and what falls back to the host
os.environ['XLA_FLAGS'] = '--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1'

# Almost all objects come from imports and stay alive, so Python searches for cycles less often and skips these objects
# (a twentieth of the processor time). tests/no_network does the same in processes that tests start
gc.set_threshold(50_000, 20, 50)

# Tests and the processes they start cannot reach the network, unless a variable selects tests that need it. Some tests
# pass sys.path on, where a distribution's own sitecustomize must come later; workers of pytest-xdist do not inherit it
NO_NETWORK = str(ROOT/'tests'/'no_network')
if not {'BUILD_KENLM', 'RESOLVE'} & os.environ.keys():
    if NO_NETWORK not in sys.path: sys.path.insert(0, NO_NETWORK)
    if NO_NETWORK not in os.environ.get('PYTHONPATH', '').split(':'):
        os.environ['PYTHONPATH'] = ':'.join(filter(None, (NO_NETWORK, os.environ.get('PYTHONPATH'))))
        runpy.run_path(f'{NO_NETWORK}/sitecustomize.py')

# Files that take more than ten seconds of processor time (November 2026, Xeon). Other files start later, as short ones
# should: a worker with two tests left takes the next file, even if another worker could start it sooner
SECONDS = {'test_interrupts': 90, 'test_pipeline': 80, 'test_trainer': 65, 'test_kaggle_notebooks': 54,
           'test_extending_the_kit': 50, 'test_kills': 50, 'test_kaggle_cycle': 46, 'test_site': 34,
           'test_encoders': 30, 'test_imports': 27, 'test_finetune_kills': 22, 'test_sweep_kills': 21,
           'test_foreign_logits': 19, '02_simulate': 15,
           'test_cli': 19, 'test_sessions': 18, '09_trainer': 18, '13_explore': 18, 'test_simulate': 17,
           'test_faults': 17, 'test_participants': 16, 'test_gain': 15, 'test_opinion_pool': 15, '04_search': 14,
           '05_acoustic': 14, 'test_phonemes': 12, '12_trainer': 11, 'test_lock': 11, 'test_errors_page': 11,
           'test_encoders_xla': 74, 'test_training_xla': 74, 'test_kaggle_notebook': 45, 'test_selftest_xla': 32,
           'test_trainer_tf': 58, 'test_encoders_tf': 47, 'test_pipeline_tf': 38, 'test_kaggle_notebook_tf': 20}


# kenlm 0.3.0 does not compile on Python 3.13 and later; tests that compare with it or read its files are skipped
NO_KENLM = sys.version_info >= (3, 13) and find_spec('kenlm') is None


class Notebook(pytest.File):
    "A notebook as a file with one test."
    def collect(self): yield NotebookTest.from_parent(self, name=self.path.stem)


class NotebookTest(pytest.Item):
    "Runs a notebook like nbdev_test, without cells that directives exclude (`#| bench`, `#| eval: false`)."
    def runtest(self):
        if NO_KENLM and 'NGram.load(' in self.path.read_text(encoding='utf-8'): pytest.skip('kenlm is not installed')
        from nbdev.config import get_config
        from nbdev.test import test_nb
        # Numba caches functions compiled in cells in one folder for all processes of a user, where functions of one
        # process would meet classes that another has defined. So each notebook has its own folder, which is deleted
        # with its temporary files; variables that it sets are reset
        with (tempfile.TemporaryDirectory() as folder, patch('IPython.paths.get_ipython_cache_dir', lambda: folder),
              patch('tempfile.tempdir', folder), patch.dict(os.environ, TMPDIR=folder),
              patch('nbdev.test.CaptureShell', unkept_shell), patch('nbdev.test.NBProcessor', processed)):
            passed, _ = test_nb(self.path, skip_flags=get_config().tst_flags.split(), basepath=ROOT)
        # A benchmark uses all cores; later tests in this process must not take them from other workers
        n_threads = os.environ.get('OMP_NUM_THREADS')
        if n_threads and 'torch' in sys.modules: sys.modules['torch'].set_num_threads(int(n_threads))
        if not passed: pytest.fail('a cell raises; its traceback is above', pytrace=False)

    def reportinfo(self): return self.path, None, str(self.path.relative_to(ROOT))


def processed(path, **options):
    """The notebook at `path` for its test. If Numba compiles functions of its module, exported cells import from the
    module, whose compiled code is cached, unless one of them has been changed since the last export."""
    from nbdev.process import NBProcessor
    processor = NBProcessor(path, **options)
    cells = [c for c in processor.nb.cells if {'export', 'exporti'} & getattr(c, 'directives_', {}).keys()]
    if not any(re.search('^@_(jit|inlined)$', c.source, re.M) for c in cells): return processor
    name, = (c.directives_['default_exp'][0] for c in processor.nb.cells if 'default_exp' in c.directives_)
    module = import_module(f'b2t_kaggle.{name}')
    exported = Path(module.__file__).read_text(encoding='utf-8')
    definitions = cells[1:] # After the imports
    if all(c.source.strip() in exported for c in definitions):
        for c in definitions:
            names = [n for n in compile(c.source, name, 'exec').co_names if n in vars(module)]
            c.source = f'from {module.__name__} import {", ".join(names)}'
    return processor


def unkept_shell(path):
    """A shell for the notebook at `path`, which is freed after its test. IPython would keep it, with everything that
    the notebook defined, and clear all shells when the process ends, which takes a minute for ninety notebooks."""
    from execnb.shell import CaptureShell
    # The plots are not shown, so a quarter of the pixels is enough, and margins need not be measured by drawing twice
    shell = CaptureShell(path, mpl_format='png')
    shell.run("set_matplotlib_formats('png', bbox_inches=None)")
    atexit.unregister(shell.atexit_operations)
    return shell


@pytest.fixture
def small_disk(tmp_path):
    "A file system of 100 kB."
    disk = tmp_path/'disk'
    disk.mkdir()
    command = ['mount', '-t', 'tmpfs', '-o', 'size=100k', 'tmpfs', str(disk)]
    if not shutil.which('mount') or subprocess.run(command, capture_output=True, timeout=30).returncode:
        pytest.skip('a file system cannot be mounted here')
    yield disk
    subprocess.run(['umount', '-l', str(disk)], check=True, timeout=30)


def shares_compiled(config):
    "Whether this process starts and ends the tests, unlike a worker of pytest-xdist."
    try: return not hasattr(config, 'workerinput') and bool(version('numba'))
    except PackageNotFoundError: return False


def pytest_configure(config):
    # A worker exits at once after the exit handlers registered from here on: Python would take ten seconds to clean up
    # the frameworks
    if hasattr(config, 'workerinput'): atexit.register(os._exit, 0)
    with suppress(OSError): # If the cache cannot be read or written, more is compiled
        if shares_compiled(config):
            take_compiled()
            keep_programs()


def pytest_unconfigure(config):
    with suppress(OSError):
        if shares_compiled(config): keep_compiled()


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish():
    "Skip pytest's five searches for cycles in all objects that tests have left."
    gc.freeze()


def pytest_addoption(parser):
    parser.addoption('--faults', type=int, default=12, metavar='N',
                     help='random cases of damage for each kind of file in tests/faults')


def pytest_collect_file(file_path, parent):
    if file_path.suffix == '.ipynb' and ROOT/'nbs' in file_path.parents and '.ipynb_checkpoints' not in file_path.parts:
        return Notebook.from_parent(parent, path=file_path)


def seed_draws():
    """Make a test's random numbers independent of earlier tests in its process: Keras takes its seeds from Python, and
    PyTorch starts with this seed in a new process."""
    random.seed(0)
    if torch := sys.modules.get('torch'): torch.default_generator.manual_seed(67280421310721)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item):
    seed_draws()
    if item.nodeid.startswith('nbs/tensorflow/'): # If it is missing, the notebook says so
        with suppress(ImportError): import_module('b2t_kaggle.tensorflow.layers')
    number_names(item.nodeid)
    return (yield from _without_kenlm())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item): return (yield from _without_kenlm())


def _without_kenlm():
    "Run a test, and skip it if it imports kenlm on a Python on which kenlm does not compile."
    try: return (yield)
    except ImportError as e:
        if not NO_KENLM or e.name != 'kenlm': raise
        pytest.skip(str(e))


def pytest_ignore_collect(collection_path, config):
    "With `-k`, do not import files that contain none of the words; a notebook is selected by its name."
    from b2t_kaggle.config.encoders.encoder import encoder_names
    words = re.findall(r'\w+', config.option.keyword.lower())
    if not words or 'not' in words or not collection_path.is_file(): return None
    text = str(collection_path.relative_to(ROOT)).lower()
    if collection_path.suffix == '.py': text += collection_path.read_text(encoding='utf-8').lower()
    if collection_path.stem.startswith('test_encoders'): text += ' '.join(encoder_names()) # Its tests' parameters
    return None if any(w in text for w in set(words) - {'and', 'or'}) else True


# Notebooks that another test also executes, and the name of that test
EXECUTED_BY = {'one_trial': 'test_the_first_page_shows_a_trial_as_it_is_decoded'}


def pytest_collection_modifyitems(items):
    names = {item.name for item in items}
    items[:] = [item for item in items if EXECUTED_BY.get(item.name) not in names]
    items.sort(key=lambda item: -SECONDS.get(item.path.stem, 0))


def pytest_collection_finish():
    "Exclude the objects imported so far from the search for cycles."
    gc.collect()
    gc.freeze()
