"The chunked form of a state space model agrees with the recurrence that defines it, in double precision."
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from b2t_kaggle.pytorch.ssd import causal_conv, segment_sums, ssd

S, H, P, N = 2, 2, 3, 4


def recurrence(x, log_decay, b, c, state):
    "h = e^a h + b xᵀ, y = cᵀ h, frame by frame."
    ys = []
    for t in range(x.shape[1]):
        state = log_decay[:, t].exp()[:, None, :, None] * state + b[:, t, :, None, None] * x[:, t, None]
        ys.append((c[:, t, :, None, None] * state).sum(1))
    return torch.stack(ys, 1), state


def inputs(T, seed, kinds):
    "Frames that each decay weakly, moderately, strongly or completely; double precision."
    g = torch.Generator().manual_seed(seed)
    def normal(*shape): return torch.randn(shape, generator=g, dtype=torch.float64)
    strength = 10. ** torch.tensor([-6., -1, 1, 4], dtype=torch.float64)[kinds]
    kind = torch.randint(len(kinds), (S, T, H), generator=g)
    log_decay = -strength[kind] * torch.rand((S, T, H), generator=g, dtype=torch.float64)
    return [normal(S, T, H, P), log_decay, normal(S, T, N), normal(S, T, N), normal(S, N, H, P)]


@settings(max_examples=25)
@given(
    T=st.integers(1, 50),
    chunk_size=st.integers(1, 60),
    seed=st.integers(0, 2**31),
    kinds=st.lists(st.integers(0, 3), min_size=1, max_size=4, unique=True),
)
def test_any_length_chunk_and_decay(T, chunk_size, seed, kinds):
    "Outputs, last state and all gradients are compared; float32 agrees to 1e-4 of the largest value."
    exact = [v.requires_grad_() for v in inputs(T, seed, kinds)]
    rounded = [v.detach().float().requires_grad_() for v in exact]
    want = recurrence(*exact)
    found = ssd(*rounded[:4], chunk_size, rounded[4])
    for v, w in zip(found, want): torch.testing.assert_close(v.double(), w, rtol=0, atol=1e-4 * w.abs().max().item())
    gradients = [torch.autograd.grad(y.sum() + h.sum(), at) for (y, h), at in ((found, rounded), (want, exact))]
    for v, w in zip(*gradients):
        assert v.isfinite().all()
        # If all states are forgotten at once, the gradient of a decay is the rounding error of terms of size 1
        torch.testing.assert_close(v.double(), w, rtol=0, atol=1e-4 * max(w.abs().max().item(), 1e-2))


def test_double_precision_is_kept():
    exact = inputs(50, 0, [0, 1, 2, 3])
    for v, w in zip(ssd(*exact[:4], 16, exact[4]), recurrence(*exact)): torch.testing.assert_close(v, w)


@pytest.mark.parametrize('chunk_size', [1, 7, 64])
def test_no_frame_reads_a_later_one(chunk_size):
    x, a, b, c, state = inputs(20, 0, [0, 1])
    y, _ = ssd(x, a, b, c, chunk_size, state)
    for v in (x, b, c): v[:, 12:] = 1e6
    a[:, 12:] = -50
    assert torch.equal(ssd(x, a, b, c, chunk_size, state)[0][:, :12], y[:, :12])


def test_decays_that_underflow():
    "No overflow, and no 0 · ∞."
    x, _, b, c, state = inputs(9, 0, [0])
    a = torch.full((S, 9, H), -1e30, dtype=torch.float64, requires_grad=True)
    y, last = ssd(x, a, b, c, 4, state)
    torch.testing.assert_close(y, (b * c).sum(-1)[..., None, None] * x)
    gradient, = torch.autograd.grad(y.sum() + last.sum(), a)
    assert gradient.isfinite().all()
    assert segment_sums(a).exp().isfinite().all()


def test_the_same_program_for_any_number_of_chunks():
    "The number of compiled operations does not grow with the number of frames."
    def n_operations(T):
        args = [v.float() for v in inputs(T, 0, [1])]
        graph = torch.fx.experimental.proxy_tensor.make_fx(lambda *v: ssd(*v[:4], 4, v[4]))(*args)
        return len(graph.graph.nodes)

    assert n_operations(400) == n_operations(20)


def test_a_convolution_kept_in_16_bits():
    "Sums are in float32, so the result is the exact one, rounded once."
    g = torch.Generator().manual_seed(0)
    x = torch.randn((1, 2, 13, 5), generator=g).bfloat16()
    weight, bias = torch.randn((4, 1, 1, 1, 5), generator=g), torch.randn((1, 1, 1, 5), generator=g)
    y = causal_conv(x, weight, bias)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, causal_conv(x.float(), weight, bias).bfloat16())
