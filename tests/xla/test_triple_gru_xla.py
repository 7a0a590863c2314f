"""TripleGRU on an XLA device: trains in bfloat16, equals the CPU in float32, computes nothing on the host, and is
compiled once for all λ."""

import pytest

torch_xla = pytest.importorskip('torch_xla', reason='needs torch_xla: pip install b2t_kaggle[xla]')
import torch
import torch_xla.debug.metrics as met

from b2t_kaggle.config.encoders.triple_gru import TripleGRUConfig
from b2t_kaggle.core.ctc import n_frames
from b2t_kaggle.pytorch.models.triple_gru import TripleGRUDecoder

pytestmark = pytest.mark.filterwarnings('error::DeprecationWarning')
N_STEPS, SIZE, STRIDE = 5, 6, 2


def build(noise_units=6, **kw):
    "A model without zero parts."
    torch.manual_seed(0)
    sizes = dict(neural_dim=8, n_units=12, n_classes=5, n_layers=2, patch_size=SIZE, patch_stride=STRIDE)
    dropouts = dict(rnn_dropout=0, input_dropout=0) | kw
    model = TripleGRUDecoder(TripleGRUConfig(**sizes, **dropouts, noise_units=noise_units), n_days=3)
    if noise_units: torch.nn.init.normal_(model.noise.out.weight, std=0.1)
    return model


def data():
    torch.manual_seed(1)
    n_bins = torch.tensor([30, 30, 17, 24])
    return torch.randn(4, 30, 8) * (torch.arange(30) < n_bins[:, None])[..., None], torch.tensor([2, 2, 0, 1]), n_bins


def read(logits, frames):
    """Replaces CTC, which has its own tests: negative log-likelihood of a fixed class in all frames of each trial, in
    float32."""
    there = torch.arange(logits.shape[1], device=logits.device) < frames[:, None]
    return -(logits.float().log_softmax(-1)[..., 3] * there).sum(1)


def run(device, dtype=None, n=N_STEPS, **kw):
    "Losses of some training steps with increasing λ, and the model."
    model = build(**kw).to(device).train()
    x, day, n_bins = (t.to(device) for t in data())
    frames = n_frames(n_bins, SIZE, STRIDE)
    losses = []
    opt = torch.optim.SGD(model.parameters(), lr=0.02)
    for step in range(n):
        with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=dtype is not None):
            out = model(x, day, n_bins=n_bins, mode='full', grl_lambda=step/n)
        loss = model.training_losses(out, lambda logits: read(logits, frames), frames)['loss']
        loss.mean().backward()
        opt.step(); opt.zero_grad()
        if torch.device(device).type == 'xla': torch_xla.sync()
        losses.append(loss.detach())
    return torch.stack(losses).cpu(), model


def fallbacks(): return [n for n in met.counter_names() if n.startswith('aten::')]


def compilations(): return (met.metric_data('CompileTime') or [0])[0]


@pytest.mark.parametrize('noise_units', [6, None])
def test_float32_training_equals_the_cpus(noise_units):
    met.clear_all()
    ours, model = run(torch_xla.device(), noise_units=noise_units)
    assert fallbacks() == []
    want, cpu = run('cpu', noise_units=noise_units)  # Packed, so that padding is not computed
    torch.testing.assert_close(ours, want, rtol=1e-4, atol=1e-4)
    for (name, p), q in zip(model.named_parameters(), cpu.parameters()):
        torch.testing.assert_close(p.detach().cpu(), q.detach(), rtol=1e-3, atol=1e-4, msg=name)
    assert want[-1].mean() < want[0].mean() - 1  # The training has changed the loss


@pytest.mark.parametrize('noise_units', [6, None])
def test_bfloat16_trains(noise_units):
    met.clear_all()
    ours, model = run(torch_xla.device(), torch.bfloat16, noise_units=noise_units)
    want, _ = run(torch_xla.device(), noise_units=noise_units)
    assert fallbacks() == []
    assert ours.dtype == torch.float32 and {p.dtype for p in model.parameters()} == {torch.float32}
    torch.testing.assert_close(ours, want, rtol=0.05, atol=0.1)
    assert not torch.equal(ours, want)  # It was computed in bfloat16
    model.eval()
    x, day, _ = data()
    with torch.autocast('xla', torch.bfloat16): logits = model(x.to('xla'), day.to('xla'))
    assert logits.shape == (4, n_frames(30, SIZE, STRIDE), 5) and logits.isfinite().all().item()


def test_one_compilation_for_all_strengths():
    "Training compiles nothing after its first step, although each step has another λ."
    device = torch_xla.device()
    model = build(rnn_dropout=0.2, input_dropout=0.1).to(device).train()
    x, day, _ = (t.to(device) for t in data())
    frames = torch.full((4,), n_frames(30, SIZE, STRIDE), device=device)
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    def step(strength):
        out = model(x, day, mode='full', grl_lambda=strength)
        model.training_losses(out, lambda logits: read(logits, frames), frames)['loss'].mean().backward()
        opt.step(); opt.zero_grad()
        torch_xla.sync()
        return compilations()
    on_device = [torch.tensor([s]).to(device)[0] for s in (0.1, 0.9)]
    torch_xla.sync()
    met.clear_all()
    counts = [
        step(s) for s in (0.3, 0.7, 0.0, 1.0, 0.2, torch.tensor(0.4), torch.tensor(0.0))
    ]  # XLA treats 0 and 1 as constants, and 0.2 also occurs in the loss
    assert counts == [1] * 7, counts
    counts = [step(s) for s in on_device]
    assert counts == [2, 2], counts  # A tensor on the device needs another graph, but only one
    assert fallbacks() == []
