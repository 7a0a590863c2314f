"""The page 'Adding an encoder', done as it says: a notebook in a copy of the checkout, and the kit trains, decodes and
tests it."""

import hashlib
import itertools
import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import nbformat
import pytest

from b2t_kaggle.pipeline.submission import validate_submission

ROOT = Path(__file__).parent.parent
GUIDE = ROOT/'nbs'/'guides'/'adding_an_encoder.ipynb'
NEW = 'nbs/pytorch/models/06_conv.ipynb'
SLOW = 'nbs/pytorch/models/07_slow.ipynb'

# A run of seconds; only fields that this encoder has
SMALL = {'model.name': 'conv', 'n_channels': 16, 'simulate.n_sessions': 2, 'simulate.train': 24, 'simulate.val': 4,
         'simulate.test': 4, 'simulate.lm_sentences': 400, 'data.batch_size': 4, 'data.days_per_batch': 2,
         'num_training_batches': 6, 'batches_per_val_step': 3, 'batches_per_save': 2, 'lr_warmup_steps': 2,
         'lr_warmup_steps_day': 2, 'train.processes': 1, 'decode.beam': 20}


# One that needs more than a hundred steps, because its logits hardly move
SLOW_ENCODER = """
class SlowConfig(CentredConfig):
    name: Literal['slow'] = 'slow'

class Slow(Centred):
    Config = SlowConfig
    def encode(self, x, day_idx, n_bins): return 0.05*super().encode(x, day_idx, n_bins)
"""


def cells_of_the_page(tag):
    return [c.source for c in nbformat.read(GUIDE, 4).cells if tag in c.metadata.get('tags', [])]


def notebook(name, *cells):
    "The notebook of a new encoder."
    nb = nbformat.v4.new_notebook()
    nb.cells = [nbformat.v4.new_markdown_cell(f'# pytorch.models.{name}\n\n> Two layers over time.'),
                nbformat.v4.new_code_cell(f'#| default_exp pytorch.models.{name}'),
                *(nbformat.v4.new_code_cell('#| export\n' + source) for source in cells)]
    return nb


def notebooks_as_the_page_says():
    "One made of the cells of the page, and one that looks at the whole trial and learns slowly."
    imports = 'from typing import Literal\nfrom b2t_kaggle.pytorch.models.conv import Conv, ConvConfig'
    return {NEW: notebook('conv', *cells_of_the_page('encoder')),
            SLOW: notebook('slow', imports, *cells_of_the_page('lengths'), SLOW_ENCODER)}


def files(root):
    "Checksums of what a person edits: all but what `nbdev_export` writes."
    paths = [p for p in root.rglob('*') if p.is_file() and '.git' not in p.parts and '__pycache__' not in p.parts]
    edited = [p for p in paths if 'b2t_kaggle' not in p.relative_to(root).parts[:1]]
    return {str(p.relative_to(root)): hashlib.sha256(p.read_bytes()).hexdigest() for p in edited}


@pytest.fixture(scope='module')
def checkout(tmp_path_factory):
    "A copy of this checkout with the new notebook, exported."
    root = tmp_path_factory.mktemp('clone')
    listed = subprocess.run(['git', 'ls-files', '-z', '--cached', '--others', '--exclude-standard'], cwd=ROOT,
                            capture_output=True, text=True)
    if listed.returncode: pytest.skip('not a git checkout')
    for name in filter(None, listed.stdout.split('\0')):
        if not (ROOT/name).is_file(): continue
        (root/name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT/name, root/name)
    before = files(root)
    for path, nb in notebooks_as_the_page_says().items(): nbformat.write(nb, root/path)
    run(root, Path(sys.executable).with_name('nbdev_export'))
    assert {k for k, _ in files(root).items() - before.items()} == {NEW, SLOW}, 'another file was touched'
    share_compiled(root)
    return root


def share_compiled(root):
    "What Python and Numba compiled here serves the copy's equal modules, too; they go by size and time of the source."
    for module in (ROOT/'b2t_kaggle').rglob('*.py'):
        copy = root/module.relative_to(ROOT)
        if copy.read_bytes() == module.read_bytes(): shutil.copystat(module, copy)
    caches = ('*.pyc', '*.nb[ic]', 'numba-*')  # tools/compiled.py says what the latter is
    for compiled in itertools.chain(*((ROOT/'b2t_kaggle').rglob(f'__pycache__/{files}') for files in caches)):
        copy = root/compiled.relative_to(ROOT)
        copy.parent.mkdir(exist_ok=True)
        shutil.copy2(compiled, copy)


def run(root, *command):
    # nbdev does nothing where a notebook that is tested has left IN_TEST
    env = {k: v for k, v in os.environ.items() if k != 'IN_TEST'} | {'PYTHONPATH': str(root)}
    done = subprocess.run(list(map(str, command)), cwd=root, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done


def b2t(root, *args): return run(root, sys.executable, '-m', 'b2t_kaggle.cli', *args)


def test_it_is_listed_with_its_fields(checkout):
    keys = b2t(checkout, 'keys', 'model.').stdout
    assert 'model.n_channels' in keys and 'conv, slow: Channels of the hidden layer.' in keys


RUN = """
import sys
sys.path.insert(0, 'tests')
from test_pipeline import cli, stages_here
with stages_here(): cli.main(sys.argv[1:])
"""


def test_it_trains_and_decodes(checkout, tmp_path):
    "The command, with all stages in its own process: that each may have one is tried in test_pipeline."
    settings = [a for k, v in SMALL.items() for a in ('--set', f'{k}={v}')]
    folders = ['--out', tmp_path, '--work', tmp_path/'data', '--name', 'conv']
    run(checkout, sys.executable, '-c', RUN, 'run', *folders, *settings)
    validate_submission(tmp_path/'conv'/'submission.csv', expected=4)
    stamp = json.loads((tmp_path/'conv'/'stages'/'train.json').read_text())
    assert stamp['metrics']['steps'] == 6


def test_the_other_framework_refuses_it_in_one_line(checkout, tmp_path):
    if not find_spec('tensorflow'): pytest.skip('no TensorFlow')
    code = (
        "from b2t_kaggle.config import load_config, ConfigError\nfrom b2t_kaggle.tensorflow.models import build_model\n"
        "try: build_model(load_config(overrides={'model.name': 'conv'}).model, 1)\nexcept ConfigError as e: print(e)"
    )
    printed = run(checkout, sys.executable, '-c', code).stdout.splitlines()
    assert printed[-1] == 'model.name = conv: TensorFlow has no such encoder, it has gru, transformer, triple_gru'


def test_it_is_tested_by_being_there(checkout):
    "`-k conv`, as the page says, finds the tests that run over the registry; those of other modules are left out here."
    others = ['--ignore-glob', 'tests/test_[!e]*', *(f'--ignore=tests/{f}' for f in ('faults', 'tf', 'xla'))]
    tests = sys.executable, '-m', 'pytest', '-q', '-p', 'no:cacheprovider', 'tests', *others
    done = run(checkout, *tests, '-k', 'conv or slow')
    assert '20 passed' in done.stdout, done.stdout[-500:]


@pytest.mark.parametrize('word, finds', [('conv', True), ('bootstrap', False)])
def test_an_encoders_name_finds_the_tests_on_xla(checkout, word, finds):
    "Which `./kit test -k WORD` would run in an environment of their own."
    plan = run(checkout, 'bash', '-c', 'make_env() { echo "environment ${1:-}"; }; pytest_some() { echo "run $*"; };'
               f'eval "$(sed -n \'/^test_some() {{/,/^}}/p\' kit)"; test_some -k {word}').stdout
    assert ('run tests/xla' in plan) == finds and 'run nbs tests --ignore tests/xla' in plan
