"CTC loss and gradient equal PyTorch's in double precision, for arbitrary shapes, lengths and labels."

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from b2t_kaggle.pytorch.ctc import alignment, ctc_loss


def lp(T, B, K, seed=0):
    return torch.randn(T, B, K, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@st.composite
def problems(draw):
    """Draw log_probs, targets, input and target lengths, and blank.

    With few classes, labels repeat. Padding must not be read, and some log-probabilities are −∞.
    """
    T = draw(st.integers(1, 12))
    B = draw(st.integers(1, 4))
    K = draw(st.integers(2, 5))
    S = draw(st.integers(0, 5))
    blank = draw(st.integers(0, K - 1))
    labels = st.integers(0, K - 2).map(lambda k: k + (k >= blank))
    n_labels = draw(st.lists(st.integers(0, S), min_size=B, max_size=B))
    padding = st.integers(-1, K)
    targets = [draw(st.lists(labels, min_size=n, max_size=n)) + draw(st.lists(padding, min_size=S - n, max_size=S - n))
               for n in n_labels]
    frames = draw(st.lists(st.integers(0, T), min_size=B, max_size=B))
    scale = draw(st.sampled_from([1., 10.]))
    log_probs = scale * lp(T, B, K, seed=draw(st.integers(0, 999)))
    if draw(st.booleans()): log_probs = log_probs.log_softmax(-1)
    for _ in range(draw(st.sampled_from([0, 0, 1, 5]))):
        log_probs[draw(st.integers(0, T - 1)), draw(st.integers(0, B - 1)), draw(st.integers(0, K - 1))] = -torch.inf
    targets = torch.tensor(targets, dtype=torch.long).view(B, S)
    return log_probs, targets, torch.tensor(frames), torch.tensor(n_labels), blank


def both(log_probs, *args, **kw):
    "Our and PyTorch's loss and gradient; without reduction, each trial has a different weight."
    found = []
    for f in (ctc_loss, F.ctc_loss):
        x = log_probs.detach().clone().requires_grad_()
        loss = f(x, *args, **kw)
        weights = (torch.arange(loss.numel()) + 1).view(loss.shape)
        found.append((loss.detach(), torch.autograd.grad((loss * weights).sum(), x)[0]))
    return found


def assert_same(log_probs, targets, frames, n_labels, blank, tol=1e-9, **kw):
    (loss, grad), (want, want_grad) = both(log_probs, targets, frames, n_labels, blank, **kw)
    torch.testing.assert_close(loss, want, rtol=tol, atol=tol)
    # For a log-probability of −∞, PyTorch's gradient is nan, ours the limit, unless the alignment is impossible
    possible = F.ctc_loss(log_probs, targets, frames, n_labels, blank, reduction='none').isfinite()
    limit = log_probs.isneginf() & possible[:, None]
    torch.testing.assert_close(grad, want_grad.masked_fill(limit, 0), rtol=tol, atol=tol, equal_nan=True)
    beyond = torch.arange(len(log_probs))[:, None] >= frames
    assert (grad[beyond] == 0).all()


@settings(max_examples=400, deadline=None)
@given(problems(), st.sampled_from(['none', 'mean', 'sum']), st.booleans())
def test_value_and_gradient(problem, reduction, zero_infinity):
    assert_same(*problem, reduction=reduction, zero_infinity=zero_infinity)


@pytest.mark.parametrize('targets, frames, n_labels', [
    ([[1, 1, 1]], [5], [3]),            # the repeats just fit
    ([[1, 1, 1]], [4], [3]),            # the repeats just do not fit
    ([[1, 2, 1]], [3], [3]),
    ([[0, 0, 0]], [6], [0]),            # no labels
    ([[1]], [1], [1]),                  # one frame
    ([[1]], [1], [0]),
    ([[1]], [0], [1]),                  # no frames
    ([[1]], [0], [0]),
    ([[1, 2], [2, 2], [1, 0]], [6, 0, 2], [2, 2, 1]),
    ([[]], [4], [0]),                   # targets without columns
])
@pytest.mark.parametrize('zero_infinity', [False, True])
@pytest.mark.parametrize('reduction', ['none', 'mean', 'sum'])
def test_edges(targets, frames, n_labels, zero_infinity, reduction):
    targets = torch.tensor(targets, dtype=torch.long)
    assert_same(lp(6, len(targets), 3), targets, torch.tensor(frames), torch.tensor(n_labels), 0,
                reduction=reduction, zero_infinity=zero_infinity)


def test_without_any_alignment():
    nothing = torch.full((4, 2, 3), -torch.inf, dtype=torch.float64)
    args = torch.tensor([[1], [1]]), torch.tensor([4, 4]), torch.tensor([1, 0])
    assert_same(nothing, *args, 0, reduction='none')
    (loss, grad), _ = both(nothing, *args, zero_infinity=True)
    assert loss == 0 and (grad == 0).all()


def test_official_size():
    torch.manual_seed(0)
    log_probs = torch.randn(133, 4, 41).log_softmax(-1)
    n_labels = torch.tensor([60, 3, 25, 0])
    targets = torch.randint(1, 41, (4, 60))
    frames = torch.tensor([133, 133, 70, 12])
    assert_same(log_probs.double(), targets, frames, n_labels, 0, reduction='none')
    (loss, grad), _ = both(log_probs, targets, frames, n_labels, reduction='none')
    _, (want, want_grad) = both(log_probs.double(), targets, frames, n_labels, reduction='none')
    torch.testing.assert_close(loss.double(), want, rtol=1e-6, atol=0)
    torch.testing.assert_close(grad.double(), want_grad, rtol=0, atol=5e-5)
    assert loss.dtype == grad.dtype == torch.float32


def test_a_certain_model_has_no_loss():
    "Alternatives of probability e^−1000 in each of a thousand frames are representable only as logarithms."
    targets = torch.tensor([[1, 2, 1, 2]])
    log_probs = torch.full((1000, 1, 3), -1000.)
    log_probs[:, :, 0] = 0
    for t, k in zip((100, 400, 401, 999), targets[0]):
        log_probs[t, 0] = torch.tensor([-1000., -1000, -1000]).index_fill(0, k, 0.)
    (loss, grad), (want, want_grad) = both(log_probs, targets, torch.tensor([1000]), torch.tensor([4]))
    torch.testing.assert_close(loss, want)
    torch.testing.assert_close(grad, want_grad)
    assert loss.abs() < 1e-6


@settings(max_examples=50, deadline=None)
@given(problems())
def test_posteriors(problem):
    "In each frame of a trial, the probabilities of all states sum to one, unless there is no path."
    log_probs, targets, frames, n_labels, blank = problem
    states = torch.full((len(targets), 2 * targets.shape[1] + 1), blank)
    states[:, 1::2] = targets.where(torch.arange(targets.shape[1]) < n_labels[:, None], blank)
    nll, posterior = alignment(log_probs, states, frames, n_labels)
    possible = nll.isfinite()
    inside = torch.arange(len(log_probs))[:, None] < frames
    torch.testing.assert_close(posterior.sum(-1)[:, possible], inside[:, possible].double(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize('n_labels', [[3, 1, 0], [3, 0, 3], [0, 0, 0]])
def test_derivative(n_labels):
    targets = torch.tensor([[1, 1, 2], [2, 0, 0], [1, 2, 1]])
    def losses(x): return ctc_loss(x.log_softmax(-1), targets, [6, 4, 5], n_labels, reduction='none')
    assert torch.autograd.gradcheck(losses, lp(6, 3, 4).requires_grad_())


def test_no_second_derivative():
    x = lp(4, 1, 3).requires_grad_()
    grad, = torch.autograd.grad(ctc_loss(x, torch.tensor([[1]]), [4], [1])**2, x, create_graph=True)
    with pytest.raises(RuntimeError, match='once_differentiable'): grad.sum().backward()


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_low_precision(dtype):
    x = lp(30, 2, 5).log_softmax(-1).to(dtype).requires_grad_()
    args = torch.tensor([[1, 2, 2], [3, 1, 0]]), torch.tensor([30, 20]), torch.tensor([3, 2])
    loss = ctc_loss(x, *args)
    loss.backward()
    _, (want, want_grad) = both(x.float(), *args)
    assert loss.dtype == torch.float32 and x.grad.dtype == dtype
    torch.testing.assert_close(loss.detach(), want, rtol=1e-5, atol=0)
    torch.testing.assert_close(x.grad, want_grad.to(dtype))


def test_autocast_changes_nothing():
    x = lp(30, 2, 5).float()
    args = (torch.tensor([[1, 2, 2], [3, 1, 0]]), [30, 20], [3, 2])
    grads = []
    for on in (False, True):
        leaf = x.clone().requires_grad_()
        with torch.autocast('cpu', torch.bfloat16, enabled=on): ctc_loss(leaf, *args).backward()
        grads.append(leaf.grad)
    assert torch.equal(*grads)


@settings(max_examples=50, deadline=None)
@given(problems())
def test_equivalent_arguments(problem):
    "Padded or concatenated targets, int32 or int64, lengths as tensors, lists or tuples."
    log_probs, targets, frames, n_labels, blank = problem
    want = ctc_loss(log_probs, targets, frames, n_labels, blank, reduction='none')
    flat = torch.cat([row[:n] for row, n in zip(targets, n_labels)])
    for t in (targets, targets.int(), flat):
        for lengths in ((frames.int(), n_labels.int()), (frames.tolist(), n_labels.tolist()),
                        (tuple(frames.tolist()), n_labels)):
            # Not bitwise: in one of many runs a last digit differed
            found = ctc_loss(log_probs, t, *lengths, blank, reduction='none')
            torch.testing.assert_close(found, want, rtol=1e-13, atol=1e-13)


def test_without_gradient():
    x = lp(5, 1, 3)
    args = (torch.tensor([[1, 2]]), [5], [2])
    assert not ctc_loss(x, *args).requires_grad
    with torch.no_grad(): assert torch.equal(ctc_loss(x.requires_grad_(), *args), ctc_loss(x, *args).detach())


GOOD = dict(log_probs=torch.zeros(6, 2, 4), targets=torch.tensor([[1, 2, 3], [3, 0, 0]]),
            input_lengths=[6, 5], target_lengths=[3, 1])

@pytest.mark.parametrize('change, message', [
    (dict(log_probs=torch.zeros(6, 4)), r'log_probs must be floating point \[T, B, K\].*found \[6, 4\]'),
    (dict(log_probs=torch.zeros(6, 2, 4, dtype=torch.long)), 'log_probs must be floating point.*torch.int64'),
    (dict(log_probs=torch.zeros(0, 2, 4)), 'at least one frame'),
    (dict(log_probs=torch.zeros(6, 0, 4)), 'at least one frame, trial'),
    (dict(blank=4), 'blank must be one of the 4 classes.*found 4'),
    (dict(blank=-1), 'blank must be one of the 4 classes.*found -1'),
    (dict(reduction='average'), "reduction must be .*found 'average'"),
    (dict(targets=torch.tensor([[1, 2, 3]])), r'targets must be integers, padded \[2, S\].*found \[1, 3\]'),
    (dict(targets=torch.tensor(1)), r'targets must be integers.*found \[\]'),
    (dict(targets=torch.zeros(2, 3)), 'targets must be integers.*torch.float32'),
    (dict(targets=torch.tensor([[1, 2, 4], [3, 0, 0]])), r'targets must be among the 4 classes.*found \[1, 2, 4, 3\]'),
    (dict(targets=torch.tensor([[1, -1, 3], [3, 0, 0]])), r'targets must be among the 4.*found \[1, -1, 3, 3\]'),
    (dict(target_lengths=[3, 2]), r'not the blank, 0; found \[1, 2, 3, 3, 0\]'),
    (dict(target_lengths=[4, 1]), r'target_lengths must lie between 0 and 3; found \[4, 1\]'),
    (dict(target_lengths=[3, -1]), r'target_lengths must lie between 0 and 3; found \[3, -1\]'),
    (dict(target_lengths=[3]), r'target_lengths must be one integer for each of the 2 trials.*found \[1\]'),
    (dict(target_lengths=3), r'target_lengths must be one integer for each of the 2 trials.*found \[\]'),
    (dict(input_lengths=[6, 7]), r'input_lengths must lie between 0 and 6; found \[6, 7\]'),
    (dict(input_lengths=torch.tensor([6., 5.])), 'input_lengths must be one integer.*torch.float32'),
    (dict(targets=torch.tensor([1, 2, 3, 3, 1])), 'need target_lengths on the host that add up'),
    (dict(targets=torch.tensor([1, 2, 3, 3]), target_lengths=torch.zeros(2, dtype=torch.long, device='meta')),
     'need target_lengths on the host'),
])
def test_bad_input(change, message):
    ctc_loss(**GOOD)
    with pytest.raises(ValueError, match=message) as e: ctc_loss(**GOOD | change)
    assert '\n' not in str(e.value)
