"""A run with --framework tensorflow leaves the same files as with PyTorch, and continues in the other framework.
Papermill executes the stages that compute with TensorFlow; the others are tested in test_pipeline."""
import csv
import json
import sys
from pathlib import Path

import pytest
import yaml

pytest.importorskip('tensorflow', reason='needs TensorFlow: pip install b2t_kaggle[tf]')
sys.path.insert(0, str(Path(__file__).parents[1]))
from test_pipeline import SMALL, b2t, command, sets, stages_here, stamps

from b2t_kaggle.config import preset, with_overrides
from b2t_kaggle.devices.tensorflow import configure_mixed_precision
from b2t_kaggle.logits import LogitStore
from b2t_kaggle.pipeline.run import Run
from b2t_kaggle.pytorch.checkpoint import to_official_args
from b2t_kaggle.tensorflow.checkpoint import load_model
from b2t_kaggle.training.history import read_history

# Some have separate options, which --set must not contradict
SIZES = {'data.batch_size': 8, 'train.num_training_batches': 4}
TINY = sets(SMALL | {'data.n_buckets': 1} | SIZES)


@pytest.fixture(scope='module')
def finished(tmp_path_factory):
    "A run up to the submission: its folder, and the options that made it."
    tmp = tmp_path_factory.mktemp('runs')
    options = ['--output-dir', tmp/'mine', '--work', tmp/'data']
    sizes = ['--batch-size', '8', '--num-batches', '4', '--disable_mixed_precision']
    shared = ['--set', 'framework=tensorflow', *options, *TINY]
    with stages_here():
        folders = ['--out', tmp, '--name', 'mine', '--work', tmp/'data']
        r = command('pack', '--set', 'framework=tensorflow', *folders, *TINY)
        assert r.exit_code == 0, r.output[-3000:]
    r = b2t('train', *shared, *sizes)
    assert r.returncode == 0, r.stderr[-3000:]
    with stages_here() as names:
        r = command('run', *shared, *sizes)
        assert r.exit_code == 0 and names == ['infer', 'lm', 'decode', 'submit', 'report'], r.output[-3000:]
    return tmp/'mine', options


@pytest.fixture(autouse=True)
def float32_afterwards():
    "Reset the precision that a run in this process sets."
    yield
    configure_mixed_precision('float32')


def test_inference_and_weights_for_pytorch(finished, tmp_path):
    out, options = finished
    work = out.parent/'data'
    assert (out/'train'/'best.weights.h5').exists() and list((out/'train'/'tensorboard').glob('events.*'))
    assert read_history(out/'train'/'history.csv').step.iloc[-1] == 4
    ids = [row['id'] for row in csv.DictReader((out/'submission.csv').open())]
    assert ids == [str(i) for i in range(4)]   # the first session has neither val nor test trials
    before = stamps(out)
    r = b2t('infer', '--framework', 'tensorflow', *options, '--force', 'infer')
    assert r.returncode == 0, r.stderr[-3000:]
    assert {k for k, v in stamps(out).items() if v != before[k]} == {'infer'}
    theirs = LogitStore.open(out/'logits'/'val.arrow')
    assert theirs.provenance['config']['data']['batch_size'] == 8 and len(theirs) == 4
    assert json.loads((out/'stages'/'infer.json').read_text())['metrics']['PER'] > 0

    r = command('convert', out, tmp_path/'best.pt')
    assert r.exit_code == 0, r.output
    folders = ['--output-dir', tmp_path/'other', '--work', work, '--checkpoint', tmp_path/'best.pt']
    with stages_here(): r = command('infer', *folders, '--disable-mixed-precision', *TINY)
    assert r.exit_code == 0, r.output[-3000:]
    ours = LogitStore.open(tmp_path/'other'/'logits'/'val.arrow')
    for a, b in zip(theirs, ours, strict=True): assert abs(a - b).max() < 1e-4


def test_the_official_configuration_trains_as_it_is(finished, tmp_path):
    "The usual command trains it; only values that are too large for a small machine are overridden."
    out, _ = finished
    sessions = ['t15.2023.08.11', 't15.2023.08.13']
    cfg = with_overrides(preset('official'), {'data.sessions': sessions})
    args = to_official_args(cfg) | dict(mode='train', gpu_number='1')
    (tmp_path/'rnn_args.yaml').write_text(yaml.safe_dump(args))
    data_dir = Run(out, out.parent/'data').data_dir
    sizes = ['--batch-size', '4', '--num-batches', '2']
    options = ['--framework', 'tensorflow', '--config', tmp_path/'rnn_args.yaml', '--data', data_dir, *sizes,
               '--output-dir', tmp_path/'official', '--work', tmp_path/'data']
    with stages_here(): r = command('train', *options, *sets(dict(days_per_batch=2, n_units=32, n_buckets=1)))
    assert r.exit_code == 0, r.output[-3000:]
    model, cfg = load_model(tmp_path/'official')
    assert (cfg.data.sessions, cfg.train.lr_decay_steps, cfg.model.n_layers) == (sessions, 120_000, 5)
    assert model.day_weights.shape == (2, 512, 512)


def test_a_schedule_that_is_longer_than_the_run_is_reported(finished, tmp_path):
    work = finished[0].parent/'data'   # which already has sessions
    r = command('simulate', '--out', tmp_path, '--work', work, *TINY, '--set', 'lr_decay_steps=1000')
    warning = 'The learning rate decays over more batches than the 4 of the run'
    assert r.exit_code == 0 and warning in r.stderr, r.output


def test_a_missing_folder(tmp_path):
    r = command('train', '--out', tmp_path, '--set', f'data.dataset_dir={tmp_path}/nowhere')
    advice = 'nowhere is not a folder; pass the folder with the t15.* sessions with --data'
    assert r.exit_code == 1 and advice in r.stderr, r.output
