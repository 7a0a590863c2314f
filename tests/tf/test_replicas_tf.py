"""The notebooks that hand batches to replicas hold with two of them, as with one: each in a process of its own, because
devices are settled before TensorFlow starts."""
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip('tensorflow', reason='needs TensorFlow: pip install b2t_kaggle[tf]')
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize('notebook', ['07_feed', '08_evaluate'])
def test_with_two_replicas(notebook):
    path = f'nbs/tensorflow/{notebook}.ipynb'
    command = [Path(sys.executable).with_name('nbdev_test'), '--path', path, '--n_workers', '0', '--do_print']
    env = os.environ | {'REPLICAS': '2', 'PYTHONPATH': os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
