"""GRU and transformer in TensorFlow agree with those in PyTorch (weights, logits and gradients), compiled with eager
execution, and our loop with Keras' own layers; bfloat16."""
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from b2t_kaggle.config.encoders.transformer import TransformerConfig
from b2t_kaggle.core.ctc import n_frames
from b2t_kaggle.pytorch.models import build_model as build_pytorch
from b2t_kaggle.pytorch.models import gru as pt
from b2t_kaggle.tensorflow import recurrence
from b2t_kaggle.tensorflow.layers import keras, tf
from b2t_kaggle.tensorflow.models import build_model
from b2t_kaggle.tensorflow.models.gru import GRUDecoder

SMALL = dict(neural_dim=6, n_units=8, n_days=4, n_classes=5)


def random_torch(build, seed=0, **sizes):
    "A PyTorch model without zero weights, in evaluation mode."
    torch.manual_seed(seed)
    model = build(**sizes).eval()
    for p in model.parameters(): torch.nn.init.normal_(p, std=p.shape[-1]**-0.5)
    return model


def batch(lengths, neural_dim=6, n_days=4, seed=0):
    "Features padded with zeros, as in training, with days and lengths."
    rng = np.random.default_rng(seed)
    n = np.array(lengths)
    inside = (np.arange(n.max()) < n[:, None])[..., None]
    x = rng.normal(size=(len(n), n.max(), neural_dim)).astype(np.float32) * inside
    return x, rng.integers(0, n_days, len(n)).astype(np.int32), n


def weighted(outs, frames, lib):
    "A loss without CTC: a weighted sum of the outputs inside each trial's own frames. `lib` is torch or tensorflow."
    loss = 0.
    for i, out in enumerate(outs):
        inside = (np.arange(out.shape[1]) < frames[:, None])[..., None]
        w = np.random.default_rng(i).normal(size=tuple(out.shape)).astype(np.float32) * inside
        loss = loss + (out * torch.tensor(w)).sum() if lib is torch else loss + tf.reduce_sum(out * w)
    return loss


def as_tuple(out): return out if isinstance(out, tuple) else (out,)


def torch_results(model, x, day, n_bins, **kw):
    "Outputs, and gradients by PyTorch's names."
    outs = as_tuple(model(torch.tensor(x), torch.tensor(day, dtype=torch.long), n_bins=torch.tensor(n_bins), **kw))
    model.zero_grad()
    weighted(outs, model.cfg.n_frames(n_bins), torch).backward()
    return [o.detach().numpy() for o in outs], {n: p.grad.numpy() for n, p in model.named_parameters()}


def tf_results(model, x, day, n_bins, jit=False, **kw):
    "Outputs, and gradients by our names."
    frames = model.cfg.n_frames(n_bins)
    variables = model.named_variables()
    def step(x, day):
        with tf.GradientTape() as tape:
            outs = as_tuple(model(x, day, n_bins=n_bins, **kw))
            loss = weighted(outs, frames, tf)
        return outs, tape.gradient(loss, list(variables.values()))
    outs, grads = (tf.function(step, jit_compile=True) if jit else step)(tf.constant(x), tf.constant(day))
    return [o.numpy() for o in outs], {n: g.numpy() for n, g in zip(variables, grads)}


def assert_same_results(ours, theirs, frames, tol=1e-4):
    "Outputs within each trial's frames to `tol`, gradients to `tol` of their largest number."
    for a, b in zip(ours[0], theirs[0], strict=True):
        assert a.dtype == np.float32 and a.shape == b.shape
        for x, y, n in zip(a, b, frames): np.testing.assert_allclose(x[:n], y[:n], rtol=0, atol=tol)
    assert ours[1].keys() == theirs[1].keys()
    for name, g in theirs[1].items():
        assert np.abs(g).max() > 0, name
        np.testing.assert_allclose(ours[1][name], g, rtol=0, atol=tol * np.abs(g).max(), err_msg=name)


def assert_parity(theirs, ours, lengths, jit=False, **kw):
    "Check TensorFlow's model with PyTorch's weights: logits, gradients, and the conversion back."
    state = {k: v.numpy() for k, v in theirs.state_dict().items()}
    ours.from_state(state)
    back = ours.to_state()
    assert back.keys() == state.keys()
    assert all(back[k].dtype == v.dtype and np.array_equal(back[k], v) for k, v in state.items())
    args = batch(lengths)
    outs, grads = tf_results(ours, *args, jit, **kw)
    assert_same_results((outs, ours.to_pytorch(grads)), torch_results(theirs, *args, **kw), ours.cfg.n_frames(args[2]))


@pytest.mark.parametrize('n_layers, patch_size, patch_stride, jit', [
    (1, 0, 0, False), (3, 0, 0, False), (1, 14, 4, False), (3, 5, 3, True),
])
def test_parity_with_pytorch(n_layers, patch_size, patch_stride, jit):
    sizes = SMALL | dict(n_layers=n_layers, patch_size=patch_size, patch_stride=patch_stride)
    assert_parity(random_torch(pt.GRUDecoder, **sizes), GRUDecoder(**sizes), [30, 17, 23, 14], jit)


@pytest.mark.parametrize('fields', [{}, dict(causal=True), dict(day_layer=True)])
def test_transformers_parity_with_pytorch(fields):
    "Trials of different length, one with an incomplete last patch; contexts and distances shorter than the trials."
    cfg = TransformerConfig(neural_dim=6, n_classes=5, n_units=12, n_layers=2, n_heads=2, head_dim=5, patch_size=2,
                            left_context=4, left_context_min=4, **fields)
    cfg = cfg.model_copy(update=dict(position_buckets=8, max_distance=9))
    torch.manual_seed(0)
    theirs = build_pytorch(cfg, n_days=4).eval()
    for p in theirs.parameters(): torch.nn.init.normal_(p, std=0.3)
    assert_parity(theirs, build_model(cfg, n_days=4), [40, 17, 23, 14])


def test_official_weights():
    "The official weights, with a tensor per day and a prefix, converted to PyTorch's model and from there to this one."
    sizes = SMALL | dict(n_layers=2, patch_size=4, patch_stride=2)
    theirs, ours = random_torch(pt.GRUDecoder, **sizes), GRUDecoder(**sizes)
    official = {f'_orig_mod.{k}': v for k, v in theirs.state_dict().items() if not k.startswith('day_')}
    for name in ('day_weights', 'day_biases'):
        official |= {f'_orig_mod.{name}.{i}': v for i, v in enumerate(theirs.state_dict()[name])}
    ours.from_state({k: v.numpy() for k, v in pt.from_official_state(official).items()})
    x, day, _ = batch([20, 20])
    np.testing.assert_allclose(ours(x, day), theirs(torch.tensor(x), day).detach(), rtol=0, atol=1e-4)


@settings(max_examples=6)
@given(n_in=st.integers(1, 5), n_units=st.integers(1, 6), n_layers=st.integers(1, 3), B=st.integers(1, 3),
       T=st.integers(1, 9), seed=st.integers(0, 99))
def test_loop_equals_keras_layers(n_in, n_units, n_layers, B, T, seed):
    "States and all gradients, for any sizes."
    keras.utils.set_random_seed(seed)
    gru = recurrence.GRU(n_in, n_units, n_layers)
    x, h0, w = (tf.random.normal(shape) for shape in ((B, T, n_in), (B, n_units), (B, T, n_units)))
    def results():
        with tf.GradientTape() as tape:
            tape.watch([x, h0])
            y = gru(x, h0)
            loss = tf.reduce_sum(y * w)
        return y, *tape.gradient(loss, [x, h0, *gru.trainable_variables])
    ours = results()
    with pytest.MonkeyPatch.context() as m:
        # Keras' layers, which without a GPU compute the same as cuDNN
        m.setattr(recurrence, 'uses_cudnn', lambda: True)
        m.setattr(recurrence, 'gru_layer', None)
        theirs = results()
    for a, b in zip(ours, theirs, strict=True): np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_compiled_equals_eager():
    "Compiled and eager models are equal, also with dropout, which draws the same numbers."
    keras.utils.set_random_seed(0)
    model = GRUDecoder(**SMALL, rnn_dropout=0.4, input_dropout=0.2, n_layers=2, patch_size=5, patch_stride=3)
    args = batch([23, 14])
    kw = dict(training=True, seeds=tf.constant([[1, 2], [3, 4]]))
    compiled = tf_results(model, *args, jit=True, **kw)
    assert_same_results(compiled, tf_results(model, *args, **kw), n_frames(args[2], 5, 3))


def test_dropout_of_a_trial_does_not_depend_on_its_batch():
    model = GRUDecoder(**SMALL, rnn_dropout=0.4, input_dropout=0.2, n_layers=2)
    x, day, _ = batch([9, 9, 9])
    seeds = np.array([[1, 2], [3, 4], [1, 2]], np.int32)
    whole = model(x, day, training=True, seeds=seeds).numpy()
    for rows in ([0], [2, 1]):
        part = model(x[rows], day[rows], training=True, seeds=seeds[rows])
        np.testing.assert_allclose(part, whole[rows], rtol=0, atol=1e-6)
    same_x = model(x[[0, 0]], day[[0, 0]], training=True, seeds=seeds[:2]).numpy()
    assert np.abs(same_x[0] - same_x[1]).max() > 0.01


def training_step(model, **kw):
    "The compiled program of a step: loss and gradients, with dropout."
    @tf.function(jit_compile=True)
    def step(x, day, seeds):
        with tf.GradientTape() as tape:
            outs = as_tuple(model(x, day, training=True, seeds=seeds, **kw))
            loss = sum(tf.reduce_mean(out**2) for out in outs)
        return loss, tape.gradient(loss, [v.value for v in model.named_variables().values()])
    return step


def program_sizes(model, **kw):
    "Lines of XLA's program for trials of 20 and 200 bins."
    step = training_step(model, **kw)
    def size(T):
        specs = tf.TensorSpec((2, T, 6)), tf.TensorSpec((2,), tf.int32), tf.TensorSpec((2, 2), tf.int32)
        return len(step.experimental_get_compiler_ir(*specs)('hlo').splitlines())
    return [size(T) for T in (20, 200)]


def test_program_does_not_grow_with_the_trial():
    model = GRUDecoder(**SMALL, rnn_dropout=0.4, input_dropout=0.2, n_layers=3, patch_size=5, patch_stride=3)
    short, long = program_sizes(model)
    assert short == long and short > 100


@pytest.fixture
def bfloat16():
    keras.config.set_dtype_policy('mixed_bfloat16')
    yield
    keras.config.set_dtype_policy('float32')


def assert_trains(model, **kw):
    "Adam learns a fixed target; logits and variables stay float32."
    x, day, _ = batch([20] * 4)
    optimizer = keras.optimizers.Adam(0.05)
    variables = model.trainable_variables
    assert {v.dtype for v in variables} == {'float32'}
    @tf.function(jit_compile=True)
    def step(x, day, target):
        with tf.GradientTape() as tape:
            outs = as_tuple(model(x, day, training=True, **kw))
            cross_entropy = tf.nn.sparse_softmax_cross_entropy_with_logits
            loss = sum(tf.reduce_mean(cross_entropy(target, logits)) for logits in outs[:2])
        return loss, outs, tape.gradient(loss, variables)
    target = np.random.default_rng(1).integers(0, 5, (4, model.cfg.n_frames(20)))
    losses = []
    for _ in range(25):
        loss, outs, grads = step(x, day, target)
        optimizer.apply_gradients(zip(grads, variables))
        losses.append(float(loss))
    assert all(o.dtype == tf.float32 for o in outs)
    assert losses[-1] < losses[0] / 2


def test_bfloat16_trains(bfloat16):
    keras.utils.set_random_seed(0)
    assert_trains(GRUDecoder(**SMALL, n_layers=1, patch_size=5, patch_stride=3))


def test_a_transformer_trains_in_bfloat16(bfloat16):
    keras.utils.set_random_seed(0)
    cfg = TransformerConfig(neural_dim=6, n_classes=5, n_units=12, n_layers=1, n_heads=2, head_dim=6, dropout=0,
                            input_dropout=0)
    assert_trains(build_model(cfg, n_days=4))


def test_bfloat16_gradients_are_near_those_of_float32(bfloat16):
    keras.utils.set_random_seed(0)
    sizes = SMALL | dict(n_units=32, n_layers=2, patch_size=5, patch_stride=3)
    args = batch([40, 31, 35])
    low = GRUDecoder(**sizes)
    keras.config.set_dtype_policy('float32')
    full = GRUDecoder(**sizes)
    full.set_weights(low.get_weights())
    (a,), grads = tf_results(low, *args)
    (b,), want = tf_results(full, *args)
    assert 0 < np.abs(a - b).max() < 0.03
    for name, g in want.items(): assert np.linalg.norm(grads[name] - g) < 0.03 * np.linalg.norm(g), name


def test_bad_input():
    model = GRUDecoder(**SMALL, rnn_dropout=0.4, n_layers=2, patch_size=5, patch_stride=3)
    x, day, _ = batch([20, 20])
    compiled = tf.function(model, jit_compile=True)
    expected = r'expected features \[B, T, 6\] with a known T and a whole number as the day of each trial; found '
    for f in (model, compiled):
        with pytest.raises(ValueError, match=rf'{expected}\(2, 20, 6\) and int32 \(1,\)'): f(x, day[:1])
        with pytest.raises(ValueError, match=f'{expected}.* float32'): f(x, day.astype(np.float32))
        with pytest.raises(ValueError, match='the batch has 4 bins, fewer than patch_size = 5'): f(x[:, :4], day)
        with pytest.raises(ValueError, match=rf'{expected}\(2, 20, 5\)'): f(x[..., 1:], day)
        with pytest.raises(ValueError, match=r'seeds is None, .*; give int32 \[B, 2\]'): f(x, day, training=True)
    with pytest.raises(ValueError, match='with a known T'):
        compiled.get_concrete_function(tf.TensorSpec([2, None, 6]), tf.TensorSpec([2], tf.int32))
