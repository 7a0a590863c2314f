"Requirements of every PyTorch encoder on XLA: one program per length, and no fallback to the host."
import sys
from pathlib import Path

import pytest

pytest.importorskip('torch_xla', reason='needs torch_xla: pip install b2t_kaggle[xla]')
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from encoders import VARIANTS, open_toy, write_toy
from test_training_xla import compiled_once, xla


def names():
    "Names of files and packages; the registry would be imported here, but torch_xla must come first."
    folder = Path(__file__).parents[2]/'b2t_kaggle'/'pytorch'/'models'
    packages = {p.parent.name for p in folder.glob('*/__init__.py')}
    return sorted({p.stem for p in folder.glob('*.py')} - {'__init__', 'encoder'} | packages)


# Parts that tests of equality switch off; they must also compile to one program
EVERYTHING = {'zipformer': {'model.balancer': True, 'model.whiten': True, 'model.skips': True, 'model.dropout': 0.1,
                            'model.encoder_unmasked_dim': [16]}}
NAMES = [*names(), *VARIANTS]
SIZES = {'data.batch_size': 4, 'n_buckets': 2}
REPLAYED = 'transformer', 'triple_gru', 'mamba', 'causal zipformer'


@pytest.fixture(scope='module')
def results(tmp_path_factory):
    """Results of some steps of each encoder, all in one process, because starting one takes as long as compiling two
    programs."""
    toy = tmp_path_factory.mktemp('toy')
    write_toy(toy)
    open_toy(toy)
    changes = {name: SIZES | EVERYTHING.get(name, {}) for name in NAMES}
    changes |= {f'replayed {name}': SIZES | {'train.replay': True} for name in REPLAYED}
    return toy, xla('encoders', toy, tmp_path_factory.mktemp('steps'), changes)


@pytest.mark.parametrize('name', NAMES)
def test_one_program_per_length_and_no_fallback(name, results):
    result = results[1][name]
    assert 'error' not in result, result['error']
    assert compiled_once(result) and result['val_compiled'] == result['val_buckets'], result
    assert result['fallbacks'] == []
    assert result['losses'][-1] < result['losses'][0]


@pytest.mark.parametrize('name', REPLAYED)
def test_replayed_steps_equal_the_recorded_ones(name, results):
    "Steps are bitwise equal, with a schedule that changes in every step, and random numbers in each model."
    recorded, replayed = (results[1][f'{how}{name}'] for how in ('', 'replayed '))
    assert 'error' not in replayed, replayed['error']
    for k in ('losses', 'norms', 'val'): assert replayed[k] == recorded[k], k
