"""Notebooks that distribute batches over replicas also pass with two replicas, each in a separate process, because
devices are fixed when TensorFlow starts."""
import os
import sys
from pathlib import Path

import pytest

pytest.importorskip('tensorflow', reason='needs TensorFlow: pip install b2t_kaggle[tf]')
sys.path.insert(0, str(Path(__file__).parents[1]))
import copies
from train_toy import start_copies

ROOT = Path(__file__).parents[2]


def run_notebook(path):
    "Run a notebook like nbdev_test."
    from nbdev.config import get_config
    from nbdev.test import test_nb as run
    os.chdir(ROOT)
    passed, _ = run(path, skip_flags=get_config().tst_flags.split(), basepath=ROOT)
    assert passed


@pytest.mark.parametrize('notebook', ['07_feed', '08_inference'])
def test_with_two_replicas(notebook, tmp_path):
    start_copies()
    copies.run_and_read({'REPLICAS': '2'}, tmp_path, run_notebook, ROOT/'nbs'/'tensorflow'/f'{notebook}.ipynb',
                        seconds=300)
