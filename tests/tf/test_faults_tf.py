"""Damaged and hostile weights files of TensorFlow, as in tests/faults."""
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

pytest.importorskip('tensorflow', reason='needs TensorFlow: pip install b2t_kaggle[tf]')
sys.path.insert(0, str(Path(__file__).parent.parent/'faults'))
from campaign import in_a_process, report, start, try_kind  # noqa: E402
from cases import HOSTILE, SECRET, TF_KINDS, make_tf_kinds  # noqa: E402


@pytest.mark.parametrize('name', TF_KINDS)
def test_hostile_and_damaged_files(tmp_path, name, request):
    start()
    secret = tmp_path/'secret'
    secret.write_text(SECRET)
    with h5py.File(secret.with_suffix('.h5'), 'w') as f: f['codes'] = np.array([ord(c) for c in SECRET], 'i4')
    make_tf_kinds(tmp_path/'kinds')
    n = request.config.getoption('--faults')
    found = in_a_process(try_kind, tmp_path/'case', tmp_path/'kinds', name, n, secret)
    assert not report(found), report(found)
    assert len(found) == 1 + n + len(HOSTILE[name])
