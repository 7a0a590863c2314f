"""The pages 'Extending the kit' and 'Pretraining', done as they say, with notebooks in a copy of the checkout. The kit
trains with a new augmentation, loss term and objective in every precision, and draws the curves."""
import json
import sys

import pytest
from checkouts import ROOT, cells_of_page, checkout_with, exported, run

GUIDES = ROOT/'nbs'/'guides'
MODULES = {'gain': ('extending_the_kit', 'augmentation'), 'smooth': ('extending_the_kit', 'loss'),
           'masked': ('pretraining', 'pretraining')}

TRAIN = """
import json, sys
sys.path.insert(0, 'tests')
from pathlib import Path
import encoders
from b2t_kaggle.config import with_overrides
from b2t_kaggle.pytorch.checkpoint import load_file
from b2t_kaggle.pytorch.trainer import train
from b2t_kaggle.training.history import plot_history, read_history
folder = Path(sys.argv[1])
encoders.write_toy(folder)
stores = encoders.open_toy(folder)
found = {}
def trained(name, run, **changes):
    cfg = encoders.config(name, **dict(num_training_batches=4, batches_per_val_step=2, batches_per_save=2) | changes)
    result = train(*stores, cfg, folder/run, progress=False)
    rows = read_history(folder/run/'history.csv')
    panels = [ax.get_ylabel() for ax in plot_history(folder/run/'history.csv').axes]
    found[run] = dict(steps=result['step'], panels=panels, **rows.iloc[-1].dropna().to_dict())
for precision in ('float32', 'bfloat16', 'float16'): trained('smooth', f'smooth {precision}', precision=precision)
trained('smooth', 'two views', cr_ctc=.2)
trained('smooth', 'in parts', accumulate=2)
trained('gain', 'gain', max_gain=.5)
trained('gain', 'again', max_gain=.5)
trained('gain', 'without', max_gain=0.)
trained('masked', 'masked')
trained('gru', 'tuned', init_checkpoint_path=str(folder/'masked'/'last.pt'))
print(json.dumps(found))
"""


@pytest.fixture(scope='module')
def checkout(tmp_path_factory):
    notebooks = {f'nbs/pytorch/models/{number:02}_{name}.ipynb':
                 exported(f'pytorch.models.{name}', 'A GRU of our own.', *cells_of_page(GUIDES/f'{page}.ipynb', tag))
                 for number, (name, (page, tag)) in enumerate(MODULES.items(), 6)}
    return checkout_with(tmp_path_factory.mktemp('clone'), notebooks)


@pytest.fixture(scope='module')
def found(checkout, tmp_path_factory):
    done = run(checkout, sys.executable, '-c', TRAIN, tmp_path_factory.mktemp('toy'))
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize('name', ['smooth float32', 'smooth bfloat16', 'smooth float16', 'two views', 'in parts'])
def test_a_term_of_the_loss_has_its_curves(found, name):
    last = found[name]
    assert last['steps'] == 4 and 'change' in last['panels']
    assert last['change'] > 0 and last['val_change'] > 0
    others = .2*last['consistency'] if name == 'two views' else 0
    assert last['loss'] > .1*last['change'] + others and last['val_loss'] > .1*last['val_change']


def test_an_augmentation_changes_the_training_and_is_repeated(found):
    assert found['gain']['loss'] == found['again']['loss'] != found['without']['loss']


def test_an_objective_of_its_own_and_its_weights(found):
    assert found['masked']['steps'] == 4 and found['masked']['val_loss'] < 10 # An error of features, not a CTC loss
    assert found['tuned']['steps'] == 4


def test_the_pretraining_fits_in_80_lines():
    assert len(cells_of_page(GUIDES/'pretraining.ipynb', 'pretraining')[0].splitlines()) < 80


def test_a_run_trains_with_it(checkout, tmp_path):
    code = """
import sys
sys.path.insert(0, 'tests')
from test_pipeline import SMALL, cli, sets, stages_here
with stages_here(): cli.main([*sys.argv[1:], *sets(SMALL)], standalone_mode=False)
"""
    folders = ['--out', tmp_path, '--work', tmp_path/'data', '--name', 'small']
    run(checkout, sys.executable, '-c', code, 'run', *folders, '--set', 'model.name=smooth')
    assert (tmp_path/'small'/'submission.csv').exists()
    header = (tmp_path/'small'/'train'/'history.csv').read_text().splitlines()[0].split(',')
    assert {'change', 'val_change'} <= set(header)


def test_encoders_are_tested_by_being_there(checkout):
    done = run(checkout, sys.executable, '-m', 'pytest', '-q', '-p', 'no:cacheprovider', 'tests/test_encoders.py',
               'tests/test_triple_gru.py', 'tests/test_house.py', '-k', 'gain or smooth or house')
    assert 'passed' in done.stdout and 'failed' not in done.stdout
