"Checks of an accelerator on XLA's CPU backend with two devices."
import json
import sys
from pathlib import Path

import pytest

pytest.importorskip('torch_xla', reason='needs torch_xla: pip install b2t_kaggle[xla]')
TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), str(TESTS/'device')]
from train_toy import run_and_read


def print_findings(folder):
    "Print the findings of the smoke test and of some long checks."
    sys.path.insert(0, str(TESTS/'device'))
    from device_checks import CHECKS

    from b2t_kaggle.pytorch import selftest
    bench = selftest.Bench('xla', folder)
    checks = [selftest.ctc, selftest.encoder, selftest.resume]
    checks += [CHECKS[name] for name in ('encoder transformer', 'augmentation', 'processes')]
    for check in checks:
        for f in check(bench): print('>', json.dumps([f.what, f.figure, f.passed]))


def test_checks_pass_on_two_devices(tmp_path):
    findings = [json.loads(line[2:]) for line in run_and_read(2, tmp_path, print_findings, tmp_path).splitlines()
                if line.startswith('> ')]
    names = [what for what, _, _ in findings]
    assert [f for f in findings if not f[2]] == []
    assert {'loss', 'resumed: weights', 'bfloat16: gradients',
            'white noise: mean square', 'SPMD over 2 devices: weights'} <= set(names)
    assert not [what for what in names if 'float16' in what and 'bfloat16' not in what]
