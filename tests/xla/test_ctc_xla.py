"CTC on an XLA device equals CTC on the CPU, is compiled once, and computes nothing on the host."
import pytest

torch_xla = pytest.importorskip('torch_xla', reason='needs torch_xla: pip install b2t_kaggle[xla]')
import torch
import torch.nn.functional as F
import torch_xla.debug.metrics as met

from b2t_kaggle.pytorch.ctc import ctc_loss

pytestmark = pytest.mark.filterwarnings('error::DeprecationWarning')


def problem(seed, T=30, B=5, K=7, S=6):
    "Trials of different lengths, one whose repeated labels do not fit, one without labels, and padding of −1."
    g = torch.Generator().manual_seed(seed)
    n_labels = torch.randint(min(S, 1), S + 1, (B,), generator=g)
    frames = torch.randint(T // 2, T + 1, (B,), generator=g)
    targets = torch.randint(1, K, (B, S), generator=g).where(torch.arange(S) < n_labels[:, None], -1)
    n_labels[0] = 0
    frames[-1] = n_labels[-1] = S
    targets[-1] = 3
    return torch.randn(T, B, K, generator=g).log_softmax(-1), targets, frames, n_labels


def on(device, f, log_probs, *args, **kw):
    "Loss and gradient; without reduction, the gradient of the mean."
    x = log_probs.detach().to(device).requires_grad_()
    loss = f(x, *args, **kw)
    loss.mean().backward()
    torch_xla.sync()
    return loss.detach().cpu(), x.grad.cpu()


def exact(log_probs, *args, **kw): return on('cpu', F.ctc_loss, log_probs.double(), *args, **kw)


def assert_same(found, want):
    torch.testing.assert_close(found[0].double(), want[0], rtol=1e-5, atol=0)
    torch.testing.assert_close(found[1].double(), want[1], rtol=0, atol=2e-6, equal_nan=True)


def fallbacks(): return [n for n in met.counter_names() if n.startswith('aten::')]


@pytest.mark.parametrize('reduction, zero_infinity', [('mean', True), ('sum', True), ('none', False)])
def test_same_as_pytorch(reduction, zero_infinity):
    met.clear_all()
    log_probs, *args = problem(0)
    kw = dict(reduction=reduction, zero_infinity=zero_infinity)
    assert_same(on(torch_xla.device(), ctc_loss, log_probs, *args, **kw), exact(log_probs, *args, **kw))
    assert fallbacks() == []


@pytest.mark.parametrize('shape', [dict(T=1, B=1, S=1), dict(T=9, B=2, S=0), dict(T=40, B=2, K=41, S=20)])
def test_shapes(shape):
    log_probs, *args = problem(1, **shape)
    found = on(torch_xla.device(), ctc_loss, log_probs, *args, zero_infinity=True)
    assert_same(found, exact(log_probs, *args, zero_infinity=True))


def test_masked_class():
    log_probs, *args = problem(2)
    log_probs[:, :, 6] = -torch.inf
    args[0][args[0] == 6] = 5
    loss, grad = on(torch_xla.device(), ctc_loss, log_probs, *args, zero_infinity=True)
    want, want_grad = exact(log_probs, *args, zero_infinity=True)
    assert_same((loss, grad), (want, want_grad.nan_to_num()))


def test_lengths_and_blank_in_any_form():
    "Lengths on the device, on the host or as lists, concatenated targets, and the last class as the blank."
    log_probs, targets, frames, n_labels = problem(3)
    targets = targets - 1  # Classes 0 … 5, so that 6 can be the blank
    flat = torch.cat([row[:n] for row, n in zip(targets, n_labels)])
    want = exact(log_probs, targets, frames, n_labels, 6, zero_infinity=True)
    device = torch_xla.device()
    for args in ((targets.to(device), frames.to(device), n_labels.to(device)),
                 (targets.int(), frames.tolist(), n_labels.tolist()), (flat, frames, n_labels)):
        assert_same(on(device, ctc_loss, log_probs, *args, 6, zero_infinity=True), want)


def test_bfloat16_under_autocast():
    log_probs, *args = problem(4)
    half = log_probs.bfloat16()
    with torch.autocast('xla', torch.bfloat16):
        loss, grad = on(torch_xla.device(), ctc_loss, half, *args, zero_infinity=True)
    want, want_grad = exact(half, *args, zero_infinity=True)
    assert [loss.dtype, grad.dtype] == [torch.float32, torch.bfloat16]
    torch.testing.assert_close(loss.double(), want, rtol=1e-5, atol=0)
    torch.testing.assert_close(grad, want_grad.bfloat16(), rtol=0.01, atol=1e-6)


def test_compiled_once():
    "New data of the same shape use the first program, whatever their lengths."
    device = torch_xla.device()
    on(device, ctc_loss, *problem(5), zero_infinity=True)
    met.clear_all()
    on(device, ctc_loss, *problem(5), zero_infinity=True)
    for seed in range(6, 10):
        log_probs, *args = problem(seed)
        found = on(device, ctc_loss, log_probs, *args, zero_infinity=True)
        assert_same(found, exact(log_probs, *args, zero_infinity=True))
    assert met.metric_data('CompileTime') is None
    assert met.counter_value('CachedCompile') >= 5
    assert fallbacks() == []


def test_one_loop_for_any_number_of_frames():
    "The compiled program has the same operations for 20 and 200 frames, including a single loop."
    def program(T):
        log_probs, *args = problem(0, T=T)
        x = log_probs.to(torch_xla.device()).requires_grad_()
        ctc_loss(x, *args).backward()
        return torch_xla._XLAC._get_xla_tensors_hlo([x.grad])
    short, long = program(20), program(200)
    assert short.count(' while(') == long.count(' while(') == 1
    assert short.count('\n') == long.count('\n')
