"The notebooks that hand batches to replicas hold with two of them, as with one: each in a process of its own, because devices are settled before TensorFlow starts."
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip('tensorflow', reason='needs TensorFlow: pip install b2t_kaggle[tf]')
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize('notebook', ['09_feed', '10_evaluate'])
def test_with_two_replicas(notebook):
    command = [Path(sys.executable).with_name('nbdev_test'), '--path', f'nbs/tensorflow/{notebook}.ipynb', '--n_workers', '0', '--do_print']
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {'REPLICAS': '2', 'PYTHONPATH': os.pathsep.join([str(ROOT), *filter(None, sys.path)])}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
