"""The self-test of an accelerator: it passes on the processor, finds what is broken there on purpose, and goes on after
a check that raises, hangs or ends its process."""
import json
import sys
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner
from killed import LIMIT

from b2t_kaggle.cli.devices import devices
from b2t_kaggle.config import with_overrides
from b2t_kaggle.config.encoders.encoder import encoders_in
from b2t_kaggle.devices import processes
from b2t_kaggle.pytorch.models import build_model
from b2t_kaggle.pytorch.optimizer.adamw import RunOptimizer
from b2t_kaggle.pytorch.parallel import SingleDevice
from b2t_kaggle.pytorch.selftest import numerics, run, training
from b2t_kaggle.pytorch.selftest.bench import Bench, preset_names, sized


@pytest.fixture
def bench(tmp_path): return Bench('cpu', tmp_path)


def failing(check, bench):
    "The findings of a check that did not pass."
    return [f.what for f in check(bench) if not f.passed]


def test_every_encoder_is_preset_names():
    assert {sized(name, True).model.name for name in preset_names()} == set(encoders_in('pytorch'))


@pytest.mark.parametrize('name', ['processes', 'compile'])
def test_the_processor_passes(name, tmp_path, monkeypatch):
    "The other checks run in the notebooks."
    for limit in ('LIMIT', '_LONGEST', '_START'): monkeypatch.setattr(run, limit, LIMIT) # A busy machine is no failure
    file = tmp_path/'table.json'
    r = CliRunner().invoke(devices, ['--test', 'cpu', '--only', name, '--json', str(file)])
    assert r.exit_code == 0, r.output
    table = json.loads(file.read_text())
    assert [(row['check'], row['result']) for row in table['rows']] == [(name, 'pass')]
    assert table['device'].startswith('cpu (') and table['packages']['torch'] == torch.__version__
    assert '1 passed, 0 failed, 0 skipped' in r.output


def test_products_that_are_off_are_found(bench, monkeypatch):
    "A device whose linear layers are off by a thousandth, in both directions."
    linear = F.linear

    class Off(SingleDevice):
        @contextmanager
        def autocast(self):
            with monkeypatch.context() as m, super().autocast():
                m.setattr(F, 'linear', lambda *args: 1.001*linear(*args))
                yield

    check = numerics.encoder('transformer')
    assert failing(check, bench) == []
    monkeypatch.setattr(Bench, 'backend', lambda self, precision='auto': Off(training.pick_torch('cpu', precision)))
    assert set(failing(check, bench)) == {'float32: logits', 'float32: gradients'}


def test_a_loss_that_is_off_is_found(bench, monkeypatch):
    assert failing(numerics.ctc, bench) == []
    monkeypatch.setattr(numerics, 'ctc_losses', lambda *args: 1.01*run.numerics.F.ctc_loss(
        args[0].log_softmax(-1).transpose(0, 1), args[1], args[2], args[3], reduction='none'))
    assert failing(numerics.ctc, bench) == ['loss', 'gradients']


@pytest.mark.parametrize('std, found', [(.8, []), (.84, ['white noise: mean square'])])
def test_noise_of_another_strength_is_found(bench, monkeypatch, std, found):
    add_noise = numerics.add_noise
    def other(x, cfg, generator): return add_noise(x, cfg, generator)*(std/.8)
    monkeypatch.setattr(numerics, '_noises', lambda: iter([('white noise', dict(white_noise_std=.8), .64)]))
    monkeypatch.setattr(numerics, 'add_noise', other)
    assert failing(numerics.augmentation, bench) == found


def test_a_scale_that_does_not_fall_is_found(bench, monkeypatch):
    update = torch.amp.GradScaler.update
    monkeypatch.setattr(torch.amp.GradScaler, 'update', lambda self: update(self, self.get_scale()))
    assert 'an overflow: factor of the scale' in failing(training.float16, bench)


def test_an_optimiser_that_forgets_is_found(bench, monkeypatch):
    "The state of the optimiser is not read from the checkpoint."
    monkeypatch.setattr(RunOptimizer, 'load_state_dict', lambda self, state: None)
    assert failing(training.resume, bench) == ['killed and continued: weights']


BROKEN = '''
import os, time
from pathlib import Path
from b2t_kaggle.pytorch.selftest import run
from b2t_kaggle.pytorch.selftest.checks import check, within

@check('raises', 'another device')
def raises(bench):
    yield within('a difference', 1, .5)
    raise RuntimeError('the device is lost')

@check('dies', 'another driver')
def dies(bench):
    print('a last word', flush=True)
    os.kill(os.getpid(), 9)
    yield

@check('hangs', '')
def hangs(bench):
    Path(__file__).with_name('hangs').touch()
    time.sleep(1000)
    yield

@check('passes', '')
def passes(bench): yield within('a difference', 0, .5)

run.CHECKS = {c.name: c for c in (raises, dies, hangs, passes)}
'''


@pytest.fixture
def broken(tmp_path, monkeypatch):
    "Checks that break in every way, in this process and in those that it starts."
    (tmp_path/'broken_checks.py').write_text(BROKEN)
    monkeypatch.syspath_prepend(tmp_path)
    before = run.CHECKS
    import broken_checks
    assert run.CHECKS is not before
    monkeypatch.setattr(run, 'own_python', lambda code: processes.own_python(f'import broken_checks; {code}'))
    yield broken_checks
    run.CHECKS = before
    del sys.modules['broken_checks']


def test_no_check_stops_the_others(broken, monkeypatch, tmp_path):
    class Timer(threading.Timer):
        "The time of a check is over as soon as it hangs."
        def run(self):
            while self.interval != run._LONGEST or not (tmp_path/'hangs').exists():
                if self.finished.wait(.01): return
            (tmp_path/'hangs').unlink()
            self.function(*self.args)

    monkeypatch.setattr(run, 'threading', SimpleNamespace(Timer=Timer))
    r = CliRunner().invoke(devices, ['--test', 'cpu', '--json', str(tmp_path/'table.json')])
    rows = json.loads((tmp_path/'table.json').read_text())['rows']
    assert [(row['check'], row['result']) for row in rows] == [
        ('raises', 'fail'), ('raises', 'fail'), ('dies', 'fail'), ('hangs', 'fail'), ('passes', 'pass')]
    assert 'the device is lost' in rows[1]['what']
    assert 'status -9: ' in rows[2]['what'] and 'a last word' in rows[2]['what']
    assert rows[3]['what'].startswith('nothing came for 150 s')
    assert r.exit_code == 1 and r.output.count('try: another device') == 2
    assert '1 passed, 4 failed (raises, dies, hangs), 0 skipped' in r.output


@pytest.mark.skipif(torch.cuda.is_available(), reason='there is a GPU')
def test_a_device_that_is_lost_leaves_the_findings(broken, monkeypatch):
    "The process after one that died finds no device."
    before = iter(['', 'sys.argv[1] = "cuda"; '])
    monkeypatch.setattr(run, 'own_python', lambda code: processes.own_python(
        f'import sys, broken_checks; {next(before)}{code}'))
    report = run.run('cpu', 'dies,passes')
    assert [(row['check'], row['result']) for row in report.rows] == [('dies', 'fail'), ('passes', 'skipped')]
    assert 'PyTorch finds no CUDA device' in report.rows[1]['what']


def test_no_check_begins_after_the_limit(broken, monkeypatch, capsys):
    monkeypatch.setattr(run, 'LIMIT', 0)
    report = run.run('cpu', 'passes')
    assert [row['result'] for row in report.rows] == ['skipped'] and not report.failed
    assert 'give --only "passes"' in capsys.readouterr().out


@pytest.mark.parametrize('arguments, words', [
    (['--test', 'cpu', '--only', 'ctcc'], "check 'ctcc' does not exist"), (['--only', 'ctc'], 'are for --test'),
    (['--test', 'cpu', '--from', __file__], '--from is for a table'),
    pytest.param(['--test', 'cuda', '--only', 'ctc'], 'accelerator cuda: PyTorch finds no CUDA device',
                 marks=pytest.mark.skipif(torch.cuda.is_available(), reason='there is a GPU'))])
def test_what_cannot_be_tested_is_said(arguments, words):
    r = CliRunner().invoke(devices, arguments)
    assert r.exit_code and words in r.output


@pytest.mark.parametrize('name', preset_names())
def test_nothing_draws_at_random_where_numbers_are_compared(name):
    "Three layers and trials of 500 bins: depths, contexts and skips are only drawn in such."
    cfg = sized(name, True, still=True)
    if 'n_layers' in type(cfg.model).model_fields: cfg = with_overrides(cfg, {'model.n_layers': 3})
    torch.manual_seed(0)
    model = build_model(cfg.model, 2).train()
    x = torch.randn(2, 500, 512)
    def forward(seed):
        torch.manual_seed(seed)
        out = model(x, torch.tensor([0, 1]), n_bins=torch.tensor([500, 400]), **model.training_args(0, 100))
        return out if isinstance(out, torch.Tensor) else model.training_logits(out)
    assert torch.equal(forward(1), forward(2))
