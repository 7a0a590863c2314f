"""Long checks of an accelerator, on the one that `B2T_DEVICE` names (`cuda`, `tpu`, …; `cpu` takes small models), or on
the GPU of this machine. Without either, none is collected.

    B2T_DEVICE=cuda ./kit test tests/device -n 1 -rP    # -rP also prints the figures"""
import os

import pytest

from b2t_kaggle.devices.machine import driver_gpus

DEVICE = os.environ.get('B2T_DEVICE') or ('cuda' if driver_gpus() else '')
collect_ignore_glob = [] if DEVICE else ['test_*.py']


@pytest.fixture
def bench(tmp_path):
    from b2t_kaggle.pytorch.selftest import Bench
    return Bench(DEVICE, tmp_path)
