"""The page 'Adding an encoder', done as it says: a notebook in a copy of the checkout, and the kit trains, decodes and
tests it."""

import json
import sys
from importlib.util import find_spec

import pytest
from checkouts import ROOT, cells_of_page, checkout_with, exported, run

from b2t_kaggle.pipeline.submission import validate_submission

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


def notebooks_as_the_page_says():
    "One made of the cells of the page, and one that looks at the whole trial and learns slowly."
    def notebook(name, *cells): return exported(f'pytorch.models.{name}', 'Two layers over time.', *cells)
    imports = 'from typing import Literal\nfrom b2t_kaggle.pytorch.models.conv import Conv, ConvConfig'
    return {NEW: notebook('conv', *cells_of_page(GUIDE, 'encoder')),
            SLOW: notebook('slow', imports, *cells_of_page(GUIDE, 'lengths'), SLOW_ENCODER)}


@pytest.fixture(scope='module')
def checkout(tmp_path_factory):
    "A copy of this checkout with the new notebooks, exported."
    return checkout_with(tmp_path_factory.mktemp('clone'), notebooks_as_the_page_says())


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
