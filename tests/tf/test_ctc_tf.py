"CTC in TensorFlow agrees with PyTorch's in double precision, for arbitrary lengths and labels, compiled and eagerly."
import numpy as np
import pytest

tf = pytest.importorskip('tensorflow', reason='needs TensorFlow: pip install b2t_kaggle[tf]')
torch = pytest.importorskip('torch')
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from b2t_kaggle.tensorflow.ctc import ctc_loss

IMPOSSIBLE = -1e9  # replaces −∞ in PyTorch, whose gradient would be nan


@st.composite
def problems(draw, B, T, K, S):
    """Random logits, labels, frames, numbers of labels, and the blank. There are few classes, so that labels repeat;
    the padding is invalid; and some logits are −∞."""
    blank = draw(st.sampled_from([0, K - 1]))
    label = st.integers(0, K - 2).map(lambda k: k + (k >= blank))
    n_labels = draw(st.lists(st.integers(0, S), min_size=B, max_size=B))
    padding = st.integers(-1, K)
    labels = [draw(st.lists(label, min_size=n, max_size=n)) + draw(st.lists(padding, min_size=S - n, max_size=S - n))
              for n in n_labels]
    frames = draw(st.lists(st.integers(0, T), min_size=B, max_size=B))
    scale = draw(st.sampled_from([1., 10., 300.]))
    logits = scale * np.random.default_rng(draw(st.integers(0, 999))).standard_normal((B, T, K))
    for _ in range(draw(st.sampled_from([0, 0, 1, 5]))):
        i, t, k = draw(st.integers(0, B - 1)), draw(st.integers(0, T - 1)), draw(st.integers(0, K - 2))
        logits[i, t, k] = -np.inf  # never all classes
    labels = np.array(labels, 'int32').reshape(B, S)
    return logits, labels, np.array(frames, 'int32'), np.array(n_labels, 'int32'), blank


def theirs(logits, labels, frames, n_labels, blank):
    "PyTorch's losses and the gradient of their weighted sum."
    x = torch.tensor(np.maximum(logits, IMPOSSIBLE), dtype=torch.float64, requires_grad=True)
    args = (torch.tensor(v) for v in (labels, frames, n_labels))
    losses = F.ctc_loss(x.log_softmax(-1).transpose(0, 1), *args, blank=blank, reduction='none')
    grad, = torch.autograd.grad((losses * (1 + torch.arange(len(losses)))).sum(), x)
    impossible = losses.detach() > -IMPOSSIBLE / 2
    losses = losses.detach().masked_fill(impossible, torch.inf)
    return losses.numpy(), grad.masked_fill(impossible[:, None, None], 0).numpy()

def ours(logits, labels, frames, n_labels, blank):
    x = tf.convert_to_tensor(logits)
    with tf.GradientTape() as tape:
        tape.watch(x)
        losses = ctc_loss(x, labels, frames, n_labels, blank)
    return losses, tape.gradient(losses, x, output_gradients=tf.cast(1 + tf.range(len(losses)), losses.dtype))

compiled = tf.function(ours, jit_compile=True)


def assert_same(found, problem, tol=1e-9):
    for a, b in zip(found, theirs(*problem)): np.testing.assert_allclose(a, b, rtol=tol, atol=tol)
    beyond = np.arange(problem[0].shape[1]) >= problem[2][:, None]
    assert (found[1].numpy()[beyond] == 0).all()


@settings(max_examples=80)
@given(problems(B=3, T=11, K=4, S=5))
def test_compiled(problem): assert_same(compiled(*problem[:4], problem[4]), problem)


@settings(max_examples=25)
@given(st.data(), st.integers(1, 3), st.integers(1, 7), st.integers(2, 5), st.integers(0, 4))
def test_eagerly_in_any_shape(data, B, T, K, S):
    problem = data.draw(problems(B, T, K, S))
    assert_same(ours(*problem), problem)


@pytest.mark.parametrize('dtype, tol', [('float32', 1e-4), ('bfloat16', 2e-2)])
def test_long_trials(dtype, tol):
    "In 500 frames errors do not accumulate; the loss is float32, and the gradient has the type of the logits."
    rng = np.random.default_rng(0)
    x = tf.cast(3 * rng.standard_normal((2, 500, 41)), dtype)
    labels = rng.integers(1, 41, (2, 90)).astype('int32')
    frames, n_labels = np.array([500, 317], 'int32'), np.array([90, 41], 'int32')
    problem = tf.cast(x, tf.float64).numpy(), labels, frames, n_labels, 0
    losses, grad = compiled(x, *problem[1:])
    assert (losses.dtype, grad.dtype) == (tf.float32, x.dtype)
    want, want_grad = theirs(*problem)
    np.testing.assert_allclose(losses, want, rtol=1e-5)
    np.testing.assert_allclose(tf.cast(grad, tf.float64), want_grad, atol=tol)


def test_lengths_that_a_program_cannot_refuse():
    "More labels than columns never fit; more frames than rows count as all rows."
    x = np.random.default_rng(0).standard_normal((2, 6, 4))
    labels = np.array([[1, 2], [3, 0]], 'int32')
    usual, _ = compiled(x, labels, np.array([6, 6], 'int32'), np.array([2, 1], 'int32'), 0)
    losses, grad = compiled(x, labels, np.array([6, 9], 'int32'), np.array([3, 1], 'int32'), 0)
    assert losses[0] == np.inf and losses[1] == usual[1] and not grad[0].numpy().any()
