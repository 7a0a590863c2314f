"The smoke test of an accelerator passes on the CPU, and detects deliberate faults."
import json
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner

from b2t_kaggle.cli.command import main
from b2t_kaggle.cli.devices import devices
from b2t_kaggle.pytorch import selftest
from b2t_kaggle.pytorch.optimizer.adamw import RunOptimizer
from b2t_kaggle.pytorch.parallel import SingleDevice
from b2t_kaggle.pytorch.selftest import Bench, within


@pytest.fixture
def bench(tmp_path): return Bench('cpu', tmp_path)


def failing(check, bench):
    "The findings of a check that did not pass."
    return [f.what for f in check(bench) if not f.passed]


def test_wrong_products_are_detected(bench, monkeypatch):
    "The linear layers of a device are wrong by a thousandth, forwards and backwards."
    linear = F.linear

    class Off(SingleDevice):
        @contextmanager
        def autocast(self):
            with monkeypatch.context() as m, super().autocast():
                m.setattr(F, 'linear', lambda *args: 1.001*linear(*args))
                yield

    monkeypatch.setattr(Bench, 'backend', lambda self, precision='auto': Off(selftest.pick_torch('cpu', precision)))
    assert set(failing(selftest.encoder, bench)) == {'float32: logits', 'float32: gradients'}


def test_a_wrong_loss_is_detected(bench, monkeypatch):
    assert failing(selftest.ctc, bench) == []
    monkeypatch.setattr(selftest, 'ctc_losses', lambda *args: 1.01*F.ctc_loss(
        args[0].log_softmax(-1).transpose(0, 1), args[1], args[2], args[3], reduction='none'))
    assert failing(selftest.ctc, bench) == ['loss', 'gradients']


def test_an_optimiser_that_loses_its_state_is_detected(bench, monkeypatch):
    "The optimiser's state is not read from the checkpoint."
    monkeypatch.setattr(RunOptimizer, 'load_state_dict', lambda self, state: None)
    assert failing(selftest.resume, bench) == ['resumed: weights']


def test_a_failing_check_does_not_stop_the_others(monkeypatch, tmp_path):
    def raises(bench):
        yield within('a difference', float('nan'), .5)
        raise RuntimeError('the device is lost\nfor ever')

    def passes(bench): yield within('a difference', 0, .5)

    monkeypatch.setattr(selftest, 'CHECKS', dict(raises=raises, passes=passes))
    r = CliRunner().invoke(devices, ['--test', 'cpu', '--json', str(tmp_path/'table.json')])
    table = json.loads((tmp_path/'table.json').read_text())
    assert table['device'].startswith('cpu (') and any(f'torch {torch.__version__}' in row for row in table['machine'])
    assert [(row['check'], row['what'], row['figure'], row['passed']) for row in table['rows']] == [
        ('raises', 'a difference', None, False), ('raises', 'RuntimeError: the device is lost', None, False),
        ('passes', 'a difference', 0, True)]
    assert r.exit_code == 1 and 'Error: failed: raises\n' in r.output


@pytest.mark.parametrize('arguments, words', [
    (['--json', 'x'], 'is for --test'),
    pytest.param(['--test', 'cuda'], 'accelerator cuda: PyTorch finds no CUDA device',
                 marks=pytest.mark.skipif(torch.cuda.is_available(), reason='there is a GPU'))])
def test_errors_of_the_command(arguments, words):
    r = CliRunner().invoke(main, ['devices', *arguments])
    assert r.exit_code and words in r.output
