"""Long checks of an accelerator: the device that `B2T_DEVICE` names (`cuda`, `tpu`, …; `cpu` uses small models), or
else the GPU of this machine. Without either, no check is collected.

    B2T_DEVICE=cuda ./kit test tests/device -n 1 -rP    # -rP also prints the measurements
"""
import os

import pytest

from b2t_kaggle.devices.machine import driver_gpus

DEVICE = os.environ.get('B2T_DEVICE') or ('cuda' if driver_gpus() else '')
collect_ignore_glob = [] if DEVICE else ['test_*.py']


@pytest.fixture
def bench(tmp_path):
    from b2t_kaggle.pytorch.selftest import Bench
    return Bench(DEVICE, tmp_path)
