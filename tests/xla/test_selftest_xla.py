"The self-test of an accelerator on XLA's processor backend, with two devices."
import json
import sys
from pathlib import Path

import pytest

pytest.importorskip('torch_xla', reason='needs torch_xla: pip install b2t_kaggle[xla]')
sys.path.insert(0, str(Path(__file__).parents[1]))
from train_toy import hear


def tell_events(folder, names):
    "Print what happens in some checks."
    from b2t_kaggle.pytorch.selftest.bench import Bench
    from b2t_kaggle.pytorch.selftest.run import events
    for event in events(Bench('xla', folder), names): print('>', json.dumps(event))


def test_checks_pass_on_two_devices(tmp_path):
    names = ['ctc', 'augmentation', 'encoder transformer', 'float16', 'resume', 'processes', 'compile']
    said = hear(2, tmp_path, tell_events, tmp_path, names)
    told = [json.loads(line[2:]) for line in said.splitlines() if line.startswith('> ')]
    findings = [e for e in told if e['event'] == 'finding']
    assert [e for e in findings if not e['passed']] == []
    assert [e for e in told if 'error' in e] == []
    skipped = [e['check'] for e in told if 'skipped' in e]
    assert skipped == ['float16', 'compile']
    assert set(names) - set(skipped) == {e['check'] for e in findings}
    assert [e['what'] for e in findings if e['check'] == 'processes'] == ['SPMD over 2 devices: weights']
