"A run with --framework tensorflow, through the command line and papermill, leaves what PyTorch's leaves, and goes on in the other framework."
import json
import sys
from pathlib import Path

import pytest

pytest.importorskip('tensorflow', reason='needs TensorFlow: pip install b2t_kaggle[tf]')
sys.path.insert(0, str(Path(__file__).parents[1]))
from test_pipeline import SMALL, b2t, sets

from b2t_kaggle.logits import LogitStore
from b2t_kaggle.training import read_history

TINY = sets(SMALL | {'data.n_buckets': 1})


def test_train_infer_and_the_way_to_pytorch(tmp_path):
    out, work = tmp_path/'mine', tmp_path/'data'
    options = ['--output-dir', out, '--work', work]
    r = b2t('train', '--framework', 'tensorflow', *options, '--batch-size', '8', '--num-batches', '4', '--disable_mixed_precision', *TINY)
    assert r.returncode == 0, r.stderr[-3000:]
    assert (out/'train'/'best.weights.h5').exists() and list((out/'train'/'tensorboard').glob('events.*'))
    assert read_history(out/'train'/'history.csv').step.iloc[-1] == 4
    r = b2t('infer', '--framework', 'tensorflow', *options)
    assert r.returncode == 0, r.stderr[-3000:]
    theirs = LogitStore.open(out/'logits'/'val.arrow')
    assert theirs.provenance['config']['data']['batch_size'] == 8 and len(theirs) == 4  # the first session has no val trials
    assert json.loads((out/'stages'/'infer.json').read_text())['metrics']['PER'] > 0

    r = b2t('convert', out, tmp_path/'best.pt')
    assert r.returncode == 0, r.stderr
    r = b2t('infer', '--output-dir', tmp_path/'other', '--work', work, '--checkpoint', tmp_path/'best.pt', '--disable-mixed-precision', *TINY)
    assert r.returncode == 0, r.stderr[-3000:]
    for a, b in zip(theirs, LogitStore.open(tmp_path/'other'/'logits'/'val.arrow'), strict=True): assert abs(a - b).max() < 1e-4


def test_a_schedule_that_is_longer_than_the_run_is_said(tmp_path):
    r = b2t('simulate', '--out', tmp_path, '--work', tmp_path/'data', *TINY, '--set', 'lr_decay_steps=1000')
    assert r.returncode == 0 and 'The learning rate falls over more batches than the 6 that are trained' in r.stderr, r.stderr


def test_a_folder_that_is_not_there(tmp_path):
    r = b2t('train', '--out', tmp_path, '--set', f'data.dataset_dir={tmp_path}/nowhere')
    assert r.returncode == 1 and 'nowhere is not a folder; name the one that holds the t15.* sessions, with --data' in r.stderr, r.stderr
