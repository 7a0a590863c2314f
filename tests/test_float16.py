"Training in float16: close to float32 and exact after a stop; overflows, bad trials and a collapsed loss scale."
import math

import numpy as np
import pytest
import torch
from test_trainer import config, open_stores, write_toy

from b2t_kaggle.devices.torch import pick_torch
from b2t_kaggle.pytorch.checkpoint import load_file, save_atomic
from b2t_kaggle.pytorch.inference import ctc_losses, infer
from b2t_kaggle.pytorch.parallel import SingleDevice
from b2t_kaggle.pytorch.trainer import Trainer, train
from b2t_kaggle.training.history import read_history
from b2t_kaggle.training.recipe import TrainingError

STILL = dict(white_noise_std=0, constant_offset_std=0, random_cut=0, rnn_dropout=0, input_dropout=0)


@pytest.fixture(scope='module')
def stores(tmp_path_factory):
    folder = tmp_path_factory.mktemp('toy')
    write_toy(folder, splits=dict(train=4, val=2))
    return open_stores(folder)


def trainer(stores, precision='float16', scale=None, **kw):
    t = Trainer(*stores, config(precision=precision, **kw), SingleDevice(pick_torch('cpu', precision)))
    if scale: t.scaler.load_state_dict(t.scaler.state_dict() | dict(scale=scale))
    return t


def take(t, n): return [t.train_step(*t.loader(i)) for i in range(t.step, t.step + n)]


def everything(t):
    "Weights, moments and step counts."
    state = {f'{name}.{k}': v.clone() for name, s in t.optimizer.state_dict().items() for k, v in s.items()}
    return state | {k: v.clone() for k, v in t.model.state_dict().items()}


def test_training_follows_float32_and_learns_the_same(stores):
    "Losses of the first steps, and a toy that both overfit, evaluated on the training trials themselves."
    same = [stores[0], stores[0]]
    sizes = dict(n_units=48, n_layers=1, accumulate=2, num_training_batches=80)
    kw = STILL | sizes | dict(smooth_data=False, lr_max_day=.02, lr_max=.02)
    low = trainer(same, scale=2.**10, **kw)
    exact = trainer(same, 'float32', **kw)
    found, expected = (np.array([r.losses.mean() for r in take(t, 8)]) for t in (low, exact))
    assert 0 < abs(found - expected).max() and found == pytest.approx(expected, rel=.01)
    assert found[-1] < .6 * found[0]
    for t in (low, exact): take(t, 56)
    assert low.n_skipped == 0 and low.scaler.get_scale() == 2.**10
    for t in (low, exact): assert t.metrics()['val_per'] < .1


def test_gradients_of_wide_layers_follow_float32(stores):
    "From 256 units on, the recurrence is also computed in float16."
    grads = {}
    for precision in ('float16', 'float32'):
        scale = 2.**8 if precision == 'float16' else None
        t = trainer(stores, precision, scale, n_units=256, n_layers=1, **STILL)
        parts, days = t.loader(0)
        t.gradients(parts)
        if t.scaler: t.optimizer.unscale(days)
        grads[precision] = {k: p.grad.flatten() for k, p in t.model.named_parameters()}
    for k, exact in grads['float32'].items():
        assert torch.cosine_similarity(grads['float16'][k], exact, 0) > .999, k
        assert not torch.equal(grads['float16'][k], exact), f'{k} was computed in float32'


def test_the_loss_is_computed_in_float32():
    "Compared with float64, to more digits than float16 has."
    torch.manual_seed(0)
    logits = torch.randn(2, 40, 41).half() * 5
    labels = torch.randint(1, 41, (2, 9))
    args = labels, torch.tensor([40, 31]), torch.tensor([9, 5])
    with torch.autocast('cpu', torch.float16): found = ctc_losses(logits, *args)
    log_probs = logits.double().log_softmax(-1).transpose(0, 1)
    exact = torch.nn.functional.ctc_loss(log_probs, *args, reduction='none')
    assert found.dtype == torch.float32 and torch.allclose(found.double(), exact, rtol=1e-5)


def test_an_overflow_skips_one_step_and_halves_the_scale(stores):
    t = trainer(stores, scale=2.**60)
    before = everything(t)
    result, = take(t, 1)
    assert result.skipped and np.isfinite(result.losses).all() and t.step == 1
    for k, v in everything(t).items(): assert torch.equal(v, before[k]), k
    assert t.scaler.get_scale() == 2.**59
    t.scaler.load_state_dict(t.scaler.state_dict() | dict(scale=2.**10))
    result, = take(t, 1)
    assert not result.skipped and t.scaler.get_scale() == 2.**10
    assert (t.optimizer.state_dict()['out.weight']['step'] == 1).all()
    assert not torch.equal(t.model.out.weight, before['out.weight'])


def test_a_run_in_two_parts_equals_an_uninterrupted_one(stores, tmp_path, capsys):
    """Two parts of a run equal an uninterrupted run, including the scale and the skipped steps; the first scale is too
    large."""
    kw = dict(precision='float16', batches_per_val_step=6, lr_decay_steps=60, lr_decay_steps_day=60)
    once = train(*stores, config(num_training_batches=9, **kw), tmp_path/'once', progress=False)
    train(*stores, config(num_training_batches=2, **kw), tmp_path/'parts', progress=False)
    parts = train(*stores, config(num_training_batches=9, **kw), tmp_path/'parts', progress=False)
    a, b = (load_file(tmp_path/run/'last.pt') for run in ('once', 'parts'))
    n = once['skipped']
    assert 0 < n < 5 and parts['skipped'] == n
    assert a['loss_scale']['scale'] == 2.**(16 - n) and a['loss_scale']['_growth_tracker'] > 0
    assert a['loss_scale'] == b['loss_scale']
    for k, v in a['model_state_dict'].items(): assert torch.equal(v, b['model_state_dict'][k]), k
    for name, state in a['optimizer_state_dict'].items():
        for k, v in state.items(): assert torch.equal(v, b['optimizer_state_dict'][name][k]), (name, k)
    history = read_history(tmp_path/'once'/'history.csv')
    assert history.skipped.sum() == n and np.isfinite(history.grad_norm).any()
    summary = f'float16: {n} of 9 steps were skipped because a gradient overflowed; the loss is scaled by '
    assert capsys.readouterr().out.count(summary) == 2


def test_a_checkpoint_without_a_scale_continues(stores, tmp_path):
    "Checkpoints without a scale are older than float16, or have another precision."
    kw = dict(batches_per_val_step=100)
    train(*stores, config(num_training_batches=2, precision='float32', **kw), tmp_path, progress=False)
    saved = load_file(tmp_path/'last.pt')
    del saved['n_skipped']
    assert 'loss_scale' not in saved
    save_atomic(saved, tmp_path/'last.pt')
    result = train(*stores, config(num_training_batches=5, precision='float16', **kw), tmp_path, progress=False)
    assert result['step'] == 5 and 'loss_scale' in load_file(tmp_path/'last.pt')
    back = train(*stores, config(num_training_batches=6, precision='float32', **kw), tmp_path, progress=False)
    assert back['step'] == 6 and 'skipped' not in back


@pytest.mark.parametrize('value', [math.inf, math.nan])
def test_a_bad_trial_is_not_an_overflow(stores, value):
    t = trainer(stores, scale=2.**10)
    before = everything(t)
    parts, days = t.loader(0)
    parts[0].x[2, 4, 0] = value
    row = stores[0].index.iloc[parts[0].batch.trials[2]]
    where = rf'batch 0: the loss is nan; trials: {row.session} block {row.block} trial {row.trial} \({row.key}\)\. Look'
    with pytest.raises(TrainingError, match=where + '.*train.precision=float32'): t.train_step(parts, days)
    for k, v in everything(t).items(): assert torch.equal(v, before[k]), k


def test_a_scale_that_does_not_help_ends_the_run(stores, tmp_path, monkeypatch):
    "Gradients are infinite at any scale, which falls from 2^16 below 1 after 17 halvings."
    add_gradients = Trainer.add_gradients
    def spoilt(t, *args):
        losses = add_gradients(t, *args)
        t.model.out.bias.grad[0] = math.inf
        return losses
    monkeypatch.setattr(Trainer, 'add_gradients', spoilt)
    message = ('batch 16: gradients overflow in float16, even with a loss scale of 0.5; 17 of 17 steps were skipped. '
               'Set train.precision=float32')
    with pytest.raises(TrainingError, match=message):
        train(*stores, config(precision='float16'), tmp_path, progress=False)
    assert load_file(tmp_path/'last.pt')['n_skipped'] == 14


def test_a_device_that_runs_ahead_skips_by_itself(stores, tmp_path, monkeypatch):
    "If the host checks only every tenth step, weights, scale and history are the same."
    kw = dict(precision='float16', num_training_batches=12, batches_per_val_step=100, batches_per_save=100)
    class Accelerator(SingleDevice):
        def __init__(self, *args):
            super().__init__(*args)
            self.sync_every = 10
    train(*stores, config(**kw), tmp_path/'each', progress=False)
    monkeypatch.setattr('b2t_kaggle.pytorch.trainer.start', lambda device: Accelerator(device))
    train(*stores, config(**kw), tmp_path/'tenth', progress=False)
    a, b = (load_file(tmp_path/run/'last.pt') for run in ('each', 'tenth'))
    assert a['loss_scale'] == b['loss_scale'] and a['n_skipped'] == b['n_skipped'] > 0
    for k, v in a['model_state_dict'].items(): assert torch.equal(v, b['model_state_dict'][k]), k
    a, b = (read_history(tmp_path/d/'history.csv').drop(columns='seconds') for d in ('each', 'tenth'))
    assert a.equals(b)


def test_inference_in_float16(stores, tmp_path):
    t = trainer(stores, 'float32')
    t.save_best(tmp_path/'best.pt')
    low, exact = (infer(tmp_path/'best.pt', stores[1], tmp_path/f'{p}.arrow', 'cpu', p, progress=False)
                  for p in ('float16', 'float32'))
    for a, b in zip(low, exact):
        assert a.dtype == b.dtype == np.float32 and 0 < abs(a - b).max() < .02
        assert abs(np.log(np.exp(a.astype(float)).sum(1))).max() < 1e-5 # A softmax in float16 would differ by 1e-3
