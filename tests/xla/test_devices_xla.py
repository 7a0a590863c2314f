"Starting PyTorch/XLA: all devices are found, and compiled programs are cached on disk."
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip('torch_xla', reason='needs torch_xla: pip install b2t_kaggle[xla]')
sys.path.insert(0, str(Path(__file__).parents[1]))
from train_toy import on_devices, run_and_read


def python(code, tmp_path, n):
    "Output of code in a new process with `n` XLA devices."
    env = os.environ | on_devices(n) | dict(PYTHONPATH=os.pathsep.join(sys.path))
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, timeout=300,
                          cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def run_in(folder, code):
    os.chdir(folder)
    exec(code, {})


def python_in_a_copy(code, folder, n):
    "Output of code in a fork of a process that has imported PyTorch/XLA without starting it."
    return run_and_read(n, folder, run_in, folder, code)


COUNT = """
import warnings
warnings.simplefilter('error')
from b2t_kaggle.devices.torch import pick_torch
device = pick_torch('xla')
import numpy as np, torch, torch_xla, torch_xla.runtime as xr, torch_xla.distributed.spmd as xs
xr.use_spmd()
xr.initialize_cache('cache')
mesh = xs.Mesh(np.arange(device.n_devices), (device.n_devices,), ('data',))
x = torch.ones(16, 4).to(torch_xla.device())
xs.mark_sharding(x, mesh, ('data', None))
print(device.kind, device.n_devices, device.precision, (x * 2).sum().item())
"""
CACHE = """
from pathlib import Path
import torch
from b2t_kaggle.devices.torch import pick_torch
device = pick_torch('xla')
import torch_xla.runtime as xr
{}
from b2t_kaggle.pytorch.parallel import XLA
cores = XLA(device, Path('cache'))
import numpy as np
x = cores.result(cores.put(np.ones((4, 3), 'float32')) * 3)
cores.end_step()
from torch_xla.debug import metrics
print(x.sum().item(), cores.cache, metrics.metric_data('CompileTime')[0] > 0)
"""


def test_counting_leaves_spmd_and_the_cache_possible(tmp_path):
    assert python(COUNT, tmp_path, 8) == 'xla 8 float32 128.0\n'
    assert list((tmp_path/'cache').iterdir())


@pytest.fixture(scope='module')
def plain(tmp_path_factory):
    "A function that runs `CACHE` on `n` devices once, and returns its output and its folder."
    found = {}
    def get(n):
        if n not in found:
            folder = tmp_path_factory.mktemp('plain')
            found[n] = python_in_a_copy(CACHE.format(''), folder, n).splitlines(), folder
        return found[n]
    return get


@pytest.mark.parametrize('n', [1, 2])
def test_programs_are_cached_if_the_backend_can_read_them(plain, tmp_path, n):
    "`XLA` caches the programs of a TPU, but not those of the CPU backend, which writes them but cannot read them."
    (first,), folder = plain(n)
    assert first.split() == ['36.0', 'None', 'True']
    assert not (folder/'cache').exists()
    as_tpu = CACHE.format("xr.device_type = lambda: 'TPU'")
    assert python_in_a_copy(as_tpu, tmp_path, n).split() == ['36.0', 'cache', 'True']
    assert list((tmp_path/'cache').iterdir())
