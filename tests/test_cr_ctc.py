"CR-CTC and the reduction of the CTC loss: formulas in NumPy, equal views, and batches in parts and processes."
import json

import encoders
import numpy as np
import pytest
import torch
from copies import call_as_ranks
from test_trainer import config, open_stores, write_toy

from b2t_kaggle.config.encoders.encoder import encoders_in
from b2t_kaggle.data.store import TrialStore
from b2t_kaggle.devices.torch import pick_torch
from b2t_kaggle.pytorch.augment import Augment
from b2t_kaggle.pytorch.cr_ctc import consistency_losses
from b2t_kaggle.pytorch.parallel import SingleDevice, start
from b2t_kaggle.pytorch.trainer import Trainer
from b2t_kaggle.training.history import read_history

STILL = dict(white_noise_std=0, constant_offset_std=0, random_cut=0, rnn_dropout=0, input_dropout=0)


@pytest.fixture(scope='module')
def stores(tmp_path_factory):
    folder = tmp_path_factory.mktemp('toy')
    write_toy(folder)
    return open_stores(folder)


def trainer(stores, **kw):
    return Trainer(*stores, config(precision='float32', **kw), SingleDevice(pick_torch('cpu', 'float32')))


def softmax(z):
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def test_value_and_gradient_of_the_formula():
    """Computed in float64, frame by frame. The closed form of the gradient pulls a view's logits from its own posterior
    towards the other view's, by half of their difference."""
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 3, 7, 5)) * 3
    frames = np.array([7, 1, 4])
    p, q = softmax(a), softmax(b)
    expected = np.zeros(3)
    grad_a, grad_b = np.zeros_like(a), np.zeros_like(b)
    for i, n in enumerate(frames):
        for t in range(n):
            expected[i] += .5 * sum(p[i, t, k] * np.log(p[i, t, k] / q[i, t, k])
                                    + q[i, t, k] * np.log(q[i, t, k] / p[i, t, k]) for k in range(5))
            grad_a[i, t] = .5 * (p[i, t] - q[i, t])
            grad_b[i, t] = .5 * (q[i, t] - p[i, t])
    logits = torch.tensor(np.stack([a, b], 1).reshape(6, 7, 5), dtype=torch.float32, requires_grad=True)
    losses = consistency_losses(logits, torch.tensor(np.repeat(frames, 2)))
    np.testing.assert_allclose(losses.detach().numpy(), expected, rtol=1e-5)
    losses.sum().backward()
    found = logits.grad.numpy().reshape(3, 2, 7, 5)
    np.testing.assert_allclose(found[:, 0], grad_a, atol=1e-6)
    np.testing.assert_allclose(found[:, 1], grad_b, atol=1e-6)


def test_frames_after_the_end_have_no_effect():
    torch.manual_seed(0)
    logits = torch.randn(4, 9, 5)
    frames = torch.tensor([6, 6, 9, 9])
    before = consistency_losses(logits, frames)
    logits[:2, 6:] = 1e4 * torch.randn(2, 3, 5)
    logits.requires_grad_()
    after = consistency_losses(logits, frames)
    after.sum().backward()
    assert torch.equal(before, after.detach()) and (logits.grad[:2, 6:] == 0).all()


def test_equal_views_have_no_loss_and_no_gradient(stores):
    "Without randomness, a step equals one without CR-CTC, whatever its weight."
    results = []
    for weight in (0, 5.):
        t = trainer(stores, cr_ctc=weight, **STILL)
        parts, _ = t.loader(0)
        losses, = t.gradients(parts)
        results.append((losses, {k: p.grad for k, p in t.model.named_parameters()}))
    (plain, expected), (views, grads) = results
    assert (views['consistency'] == 0).all()
    torch.testing.assert_close(views['loss'], plain['loss'])
    for k, g in grads.items(): torch.testing.assert_close(g, expected[k], rtol=1e-4, atol=1e-6)


def test_views_differ_in_noise_masks_and_dropout_and_not_in_their_cut(stores):
    t = trainer(stores, cr_ctc=.2, random_cut=4, time_masks=3, time_mask_max=.2)
    (part,), _ = t.loader(0)
    rows = part.two_views()
    x, n_bins = t.augment.apply(rows.x, rows.n_bins, 3, torch.Generator().manual_seed(0))
    a, b = x[::2], x[1::2]
    assert torch.equal(n_bins[::2], n_bins[1::2]) and torch.equal(n_bins[::2], part.n_bins - 3)
    for i, n in enumerate(n_bins[::2]): assert not torch.equal(a[i, :n], b[i, :n])
    masked = (x == 0).all(-1)
    assert not torch.equal(masked[::2], masked[1::2])
    still = trainer(stores, cr_ctc=.2, **STILL | dict(input_dropout=.3))
    losses, = still.gradients(still.loader(0)[0])
    assert (losses['consistency'] > 0).all()


def test_the_loss_is_the_mean_of_both_and_their_consistency(stores):
    "The sum of the parts, for each reduction."
    for reduction in ('trial', 'label'):
        t = trainer(stores, cr_ctc=.3, ctc_reduction=reduction)
        t.model.eval() # Without dropout, the same noise gives the same logits
        (part,), _ = t.loader(0)
        seen = []
        real = t.augment.apply
        t.augment.apply = lambda *args: seen.append(real(*args)) or seen[-1]
        losses, = t.gradients([part])
        x, n_bins = seen[0]
        frames = t.cfg.model.n_frames(n_bins)
        rows = part.two_views()
        logits = t.model(x, rows.day, n_bins=n_bins).detach()
        ctc = torch.nn.functional.ctc_loss(logits.log_softmax(-1).transpose(0, 1), rows.labels, frames, rows.n_labels,
                                           reduction='none')
        unit = part.n_labels if reduction == 'label' else 1
        consistency = consistency_losses(logits, frames) / unit
        torch.testing.assert_close(losses['consistency'], consistency, rtol=1e-4, atol=1e-5)
        expected = (ctc[::2] + ctc[1::2]) / 2 / unit + .3 * consistency
        torch.testing.assert_close(losses['loss'], expected, rtol=1e-4, atol=1e-5)


def test_a_loss_per_label_equals_pytorchs_mean(stores):
    t = trainer(stores, ctc_reduction='label', **STILL)
    (part,), _ = t.loader(0)
    losses, = t.gradients([part])
    t.model.eval()
    x = t.augment.eval(part.x)
    log_probs = t.model(x, part.day, n_bins=part.n_bins).log_softmax(-1).transpose(0, 1)
    frames = t.cfg.model.n_frames(part.n_bins)
    expected = torch.nn.functional.ctc_loss(log_probs, part.labels, frames, part.n_labels)
    torch.testing.assert_close(losses['loss'].mean(), expected.detach(), rtol=1e-4, atol=1e-5)
    validation = t.validate()
    per_trial = trainer(stores, **STILL).validate()
    assert validation['val_per'] == per_trial['val_per'] and validation['val_loss'] < .5 * per_trial['val_loss']


def test_an_encoder_with_its_own_losses(stores):
    """The clean logits of the TripleGRU are compared; an encoder that does not name its clean logits is refused in one
    line."""
    sizes = {'model.name': 'triple_gru', 'noise_units': 8}
    losses, = (t := trainer(stores, cr_ctc=.2, **sizes)).gradients(t.loader(0)[0])
    assert (losses['consistency'] > 0).all() and torch.isfinite(losses['loss']).all()
    t.model.training_logits = lambda out: super(type(t.model), t.model).training_logits(out)
    with pytest.raises(RuntimeError, match='model.name = triple_gru: .* does not define training_logits'):
        t.gradients(t.loader(0)[0])


@pytest.mark.parametrize('name', encoders_in('pytorch'))
def test_every_encoder_learns_from_two_views(name, tmp_path_factory):
    "In one step with ScaledAdam, each trial has a loss of both views, and the last layer changes."
    folder = tmp_path_factory.mktemp(name)
    encoders.write_toy(folder, n_trials=2)
    cfg = encoders.config(name, cr_ctc=.2, white_noise_std=.5, optimizer='scaled_adam', lr_warmup_steps=0)
    t = Trainer(*encoders.open_toy(folder), cfg, SingleDevice(pick_torch('cpu', 'float32')))
    before = [p.detach().clone() for p in t.model.parameters()]
    taken = t.train_step(*t.loader(0))
    assert taken.losses.shape == taken.terms['consistency'].shape == (4,)
    assert np.isfinite(taken.losses).all() and (taken.terms['consistency'] > 0).all()
    assert not torch.equal(list(t.model.parameters())[-1], before[-1])


class ScaledViews(Augment):
    "Views that differ by numbers that depend only on the content of the row, wherever it is computed."
    def apply(self, x, n_bins, cut, generator):
        sign = torch.tensor([1., -1.]).repeat(len(x) // 2).view(-1, 1, 1)
        return self.eval(x * (1 + .3 * sign)), n_bins


def losses_and_weights(stores, backend, **kw):
    """Losses of twelve steps of ScaledAdam with the views of `ScaledViews`, of which the last two are clipped, and the
    weights."""
    recipe = dict(precision='float32', cr_ctc=.2, optimizer='scaled_adam', lr_scheduler_type='step', lr_max=.03)
    t = Trainer(*stores, config(**recipe | STILL | kw), backend)
    t.augment = ScaledViews(t.cfg.augment, 0)
    results = [t.train_step(*t.loader(i)) for i in range(12)]
    means = [[float(np.mean(x)) for x in (r.losses, r.terms['consistency'])] for r in results]
    return np.array(means), {k: v.flatten().tolist() for k, v in t.model.state_dict().items()}


def test_a_batch_in_parts_equals_the_whole_batch(stores):
    cpu = SingleDevice(pick_torch('cpu', 'float32'))
    whole, parts = (losses_and_weights(stores, cpu, accumulate=n) for n in (1, 3))
    assert whole[0][:, 1].min() > 1e-3, 'the views agree, so that this proves nothing'
    np.testing.assert_allclose(parts[0], whole[0], rtol=1e-3)
    for k, v in whole[1].items(): np.testing.assert_allclose(parts[1][k], v, atol=1e-4)


def train_one_of_two(folder, out):
    stores = [TrialStore.open(folder/f'{split}.arrow') for split in ('train', 'val')]
    backend = start(pick_torch('cpu', 'float32'))
    means, weights = losses_and_weights(stores, backend)
    means = np.mean(backend.gather(means), 0).tolist()
    if backend.is_main_process: out.write_text(json.dumps([means, weights]))
    backend.close()


def test_two_processes_take_the_steps_of_one(stores, tmp_path):
    assert call_as_ranks(2, train_one_of_two, stores[0].path.parent, tmp_path/'result.json') == 0
    means, weights = json.loads((tmp_path/'result.json').read_text())
    one = losses_and_weights(stores, SingleDevice(pick_torch('cpu', 'float32')))
    np.testing.assert_allclose(means, one[0], rtol=1e-3)
    for k, v in one[1].items(): np.testing.assert_allclose(weights[k], v, atol=1e-4)


def test_its_curve_is_in_the_history(stores, tmp_path):
    from b2t_kaggle.pytorch.trainer import train
    kw = dict(num_training_batches=20, batches_per_val_step=20, precision='float32')
    train(*stores, config(cr_ctc=.2, **kw), tmp_path/'with', progress=False)
    train(*stores, config(**kw), tmp_path/'without', progress=False)
    with_it, without = (read_history(tmp_path/run/'history.csv') for run in ('with', 'without'))
    assert (with_it.consistency > 0).all() and 'consistency' not in without
