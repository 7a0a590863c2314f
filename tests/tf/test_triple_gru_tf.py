"""The adversarial denoiser in TensorFlow agrees with the one in PyTorch: weights, outputs, gradients and their signs,
loss, program and bfloat16."""
import numpy as np
import pytest
import torch
from test_models_tf import (  # noqa: F401 (a fixture)
    SMALL,
    assert_parity,
    assert_trains,
    batch,
    bfloat16,
    program_sizes,
    random_torch,
)

from b2t_kaggle.config.encoders.triple_gru import TripleGRUConfig
from b2t_kaggle.pytorch.models import triple_gru as pt
from b2t_kaggle.tensorflow import layers
from b2t_kaggle.tensorflow.layers import keras, tf
from b2t_kaggle.tensorflow.models.triple_gru import NoisySpeechModel, TripleGRUDecoder, triple_loss

PATCHED = SMALL | dict(n_layers=2, patch_size=5, patch_stride=3)


def small_model(n_days, cls=TripleGRUDecoder, **sizes):
    "A model without dropout, unless the sizes say otherwise."
    return cls(TripleGRUConfig(**dict(rnn_dropout=0, input_dropout=0) | sizes), n_days)


@pytest.mark.parametrize('change, jit', [
    (dict(noise_units=3), True),
    (dict(noise_units=None, n_layers=3), False),
    (dict(patch_size=0, patch_stride=0, noise_units=4), False),
])
def test_parity_with_pytorch(change, jit):
    "All three outputs, and every gradient, including the reversed one of the adversary."
    sizes = PATCHED | change
    theirs = random_torch(small_model, cls=pt.TripleGRUDecoder, **sizes)
    assert_parity(theirs, small_model(**sizes), [23, 12, 18], jit, mode='full', grl_lambda=0.3)


def test_loss_equals_pytorchs():
    "Value and gradients, for trials of different length, one of them without frames."
    rng = np.random.default_rng(0)
    frames = np.array([6, 1, 4, 0])
    arrays = [rng.normal(size=(4, 6, n)).astype(np.float32) for n in (5, 5, 11)]
    weights = dict(noisy_weight=0.2, noise_weight=0.001)
    a = [torch.tensor(x, requires_grad=True) for x in arrays]
    theirs = pt.triple_loss(a, lambda logits: logits.square().sum((1, 2)), torch.tensor(frames), **weights)['loss']
    theirs.sum().backward()
    b = [tf.constant(x) for x in arrays]
    with tf.GradientTape() as tape:
        tape.watch(b)
        ours = triple_loss(b, lambda logits: tf.reduce_sum(logits**2, (1, 2)), tf.constant(frames), **weights)['loss']
    np.testing.assert_allclose(ours, theirs.detach(), rtol=1e-5)
    for x, y in zip(a, tape.gradient(ours, b)): np.testing.assert_allclose(y, x.grad, rtol=1e-5, atol=1e-9)


def test_training_arguments_equal_pytorchs():
    cfg = TripleGRUConfig(neural_dim=2, n_units=3, n_classes=4, noise_units=2).model_copy(update=dict(grl_lambda=0.7))
    theirs = pt.TripleGRUDecoder(cfg, 1)
    assert TripleGRUDecoder(cfg, 1).training_args(3, 100) == theirs.training_args(3, 100)


def test_inference_uses_only_the_clean_part(monkeypatch):
    model = small_model(**PATCHED, noise_units=3)
    x, day, _ = batch([20, 20])
    model.noise.out.kernel.assign(np.random.default_rng(0).normal(size=(3, 30)))
    clean, _, noise = model(x, day, mode='full')
    assert np.abs(noise).max() > 0.1
    def refuse(*_, **__): raise AssertionError('the adversary was asked')
    monkeypatch.setattr(NoisySpeechModel, 'call', refuse)
    np.testing.assert_array_equal(model(x, day), clean)


def test_the_three_models_drop_different_numbers(monkeypatch):
    sites = []
    model = small_model(**PATCHED | dict(n_layers=3), rnn_dropout=0.4, input_dropout=0.2, noise_units=3)
    x, day, _ = batch([20, 20])
    real = layers.dropout
    def recording(x, p, seeds, site):
        sites.append(site)
        return real(x, p, seeds, site)
    for module in ('models.encoder', 'recurrence'):
        monkeypatch.setattr(f'b2t_kaggle.tensorflow.{module}.dropout', recording)
    model(x, day, mode='full', training=True, seeds=tf.constant([[1, 2], [3, 4]]))
    assert len(sites) == len(set(sites)) == 1 + 1 + 2 + 1 and min(sites) >= 100


def test_program_does_not_grow_with_the_trial():
    model = small_model(**PATCHED, rnn_dropout=0.4, input_dropout=0.2, noise_units=3)
    short, long = program_sizes(model, mode='full', grl_lambda=tf.constant(0.5))
    assert short == long and short > 100


def test_bfloat16_trains(bfloat16):  # noqa: F811
    keras.utils.set_random_seed(0)
    # not reversed: both models learn
    assert_trains(small_model(**PATCHED | dict(n_layers=1), noise_units=4), mode='full', grl_lambda=-1.)
