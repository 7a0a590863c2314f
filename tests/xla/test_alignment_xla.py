"Alignment losses on an XLA device equal those on the CPU, are compiled once, and compute nothing on the host."
import pytest

torch_xla = pytest.importorskip('torch_xla', reason='needs torch_xla: pip install b2t_kaggle[xla]')
import torch
import torch_xla.debug.metrics as met

from b2t_kaggle.pytorch.alignment import alignment_loss, info_nce, soft_dtw
from b2t_kaggle.pytorch.scaling.schedule import PiecewiseLinear

pytestmark = pytest.mark.filterwarnings('error::DeprecationWarning')

RISING = PiecewiseLinear((0, 1.), (10, 2.)) # Weight of soft-DTW


def problem(seed, N=9, M=12, B=3, D=8):
    "Frames, targets and their lengths; the first trial has one frame, the last is not padded."
    g = torch.Generator().manual_seed(seed)
    n = torch.randint(2, N + 1, (B,), generator=g)
    m = torch.randint(2, M + 1, (B,), generator=g)
    n[0], n[-1], m[-1] = 1, N, M
    return torch.randn(B, N, D, generator=g), n, torch.randn(B, M, D, generator=g), m


def all_losses(x, n, y, m, batches):
    "The sum of all losses."
    soft, stretched = (alignment_loss(x, n, y, m, by) for by in ('soft_dtw', 'interpolation'))
    contrast = info_nce(x, n, y, m, torch.arange(len(x)).to(x.device))
    return (RISING(batches)*soft + stretched + 0.2*contrast).sum()


def on(device, x, n, y, m, batches):
    "Value, and gradients of both sequences."
    leaves = [v.detach().to(device).requires_grad_() for v in (x, y)]
    lengths = [v.to(device) for v in (n, m)]
    count, = torch.tensor([float(batches)]).to(device).unbind() # A tensor [] would become a constant
    loss = all_losses(leaves[0], lengths[0], leaves[1], lengths[1], count)
    loss.backward()
    torch_xla.sync()
    return [v.detach().cpu() for v in (loss, *(leaf.grad for leaf in leaves))]


def exact(x, n, y, m, batches): return on('cpu', x.double(), n, y.double(), m, batches)


def assert_same(found, want):
    for a, b in zip(found, want, strict=True): torch.testing.assert_close(a.double(), b.double(), rtol=1e-4, atol=1e-5)


def fallbacks(): return [n for n in met.counter_names() if n.startswith('aten::')]


def test_same_as_on_the_cpu_and_compiled_once():
    "Batches of the same shape use the first batch's program, whatever their lengths and weights."
    device = torch_xla.device()
    met.clear_all()
    assert_same(on(device, *problem(0), 0), exact(*problem(0), 0))
    on(device, *problem(0), 1)
    met.clear_metrics()
    for seed in (1, 2): assert_same(on(device, *problem(seed), 5*seed), exact(*problem(seed), 5*seed))
    assert met.metric_data('CompileTime') is None
    assert fallbacks() == []


def test_one_loop_for_any_number_of_frames():
    "The compiled program has the same operations for short and long trials, including a single loop."
    def program(N):
        x, n, y, m = (v.to(torch_xla.device()) for v in problem(0, N=N))
        cost = torch.cdist(x, y, compute_mode='use_mm_for_euclid_dist').requires_grad_()
        soft_dtw(cost, n, m).sum().backward()
        return torch_xla._XLAC._get_xla_tensors_hlo([cost.grad])
    short, long = program(9), program(90)
    assert short.count(' while(') == long.count(' while(') == 1
    assert short.count('\n') == long.count('\n')
