"Layers on an XLA device: the GRU equals PyTorch's, augmentation is one program, and the model equals the CPU's."
import sys
from pathlib import Path

import pytest

torch_xla = pytest.importorskip('torch_xla', reason='needs torch_xla: pip install b2t_kaggle[xla]')
import torch
import torch_xla.debug.metrics as met

sys.path.insert(0, str(Path(__file__).parents[1]))
from encoders import config

from b2t_kaggle.config import AugmentConfig
from b2t_kaggle.pytorch.augment import Augment
from b2t_kaggle.pytorch.models import build_model
from b2t_kaggle.pytorch.models.gru import GRUDecoder
from b2t_kaggle.pytorch.recurrence import GRU

pytestmark = pytest.mark.filterwarnings('error::DeprecationWarning')

def compilations(): return met.metric_data('CompileTime')[0]

def fallbacks(): return [c for c in met.counter_names() if c.startswith('aten::')]


@pytest.mark.parametrize('bidirectional', [False, True])
def test_a_gru_equals_pytorchs_in_value_and_gradient(bidirectional):
    torch.manual_seed(0)
    theirs = torch.nn.GRU._orig(16, 8, num_layers=2, bidirectional=bidirectional)
    ours = GRU(16, 8, num_layers=2, bidirectional=bidirectional)
    n = 1 + bidirectional
    ours.load_state_dict(theirs.state_dict())
    x, h0, w = torch.randn(30, 3, 16), torch.randn(2 * n, 3, 8), torch.randn(30, 3, 8 * n)
    def run(module, device):
        a, b = x.to(device).requires_grad_(), h0.to(device).requires_grad_()
        y, h = module.to(device)(a, b)
        grads = torch.autograd.grad(((y * w.to(device)).sum() + (h * h).sum()), [a, b, *module.parameters()])
        torch_xla.sync()
        return [t.detach().cpu() for t in (y, h, *grads)]
    met.clear_all()
    on_xla = run(ours, torch_xla.device())
    assert not fallbacks()
    for a, b in zip(on_xla, run(theirs, 'cpu'), strict=True):
        assert torch.allclose(a, b, atol=1e-5 * max(1, b.abs().max().item()))


def test_dropout_between_layers_is_dropout():
    torch.manual_seed(0)
    module = GRU(4, 64, num_layers=2, dropout=0.5)
    x = torch.randn(50, 4, 4)
    device = torch_xla.device()
    run = lambda: module.to(device)(x.to(device))[0].detach().cpu()
    module.eval(); exact = run()
    assert torch.allclose(exact, run())
    module.train(); a, b = run(), run()
    assert not torch.allclose(a, b) and not torch.allclose(a, exact)


def test_the_program_contains_one_step_of_the_loop():
    def program(T):
        module = GRU(8, 4, num_layers=1).to(torch_xla.device())
        module(torch.randn(T, 2, 8).to(torch_xla.device()))[0].sum().backward()
        return torch_xla._XLAC._get_xla_tensors_hlo([p.grad for p in module.parameters()])
    short, long = program(20), program(200)
    assert short.count(' while(') == long.count(' while(') == 2   # Forwards and backwards
    assert len(long.splitlines()) == len(short.splitlines())


def test_the_model_equals_the_cpus():
    torch.manual_seed(0)
    model = GRUDecoder(6, 8, 3, 5, n_layers=2, patch_size=5, patch_stride=2).eval()
    for p in (model.day_weights, model.day_biases): torch.nn.init.normal_(p)
    x = torch.randn(3, 21, 6)
    day = torch.tensor([2, 0, 0])
    want = model(x, day).detach()
    met.clear_all()
    got = model.to(torch_xla.device())(x.to(torch_xla.device()), day.to(torch_xla.device()))
    torch_xla.sync()
    assert not fallbacks() and torch.allclose(got.detach().cpu(), want, atol=1e-5)


def test_augmentation_is_one_program_for_all_random_numbers():
    device = torch_xla.device()
    cfg = AugmentConfig(white_noise_std=0.5, constant_offset_std=0.3, time_masks=2, time_mask_max=0.2,
                        static_gain_std=0.01, random_walk_std=0.01, channel_masks=.3)
    aug = Augment(cfg, 0)
    x = torch.zeros(4, 300, 8)
    n_bins = torch.tensor([300, 300, 200, 100])
    def run(cut, seed, aug=aug):
        torch_xla.manual_seed(seed)
        numbers = torch.tensor([float(cut)]).to(device).unbind()
        y, n = aug.apply(x.to(device), n_bins.to(device), numbers[0].long(), None)
        torch_xla.sync()
        return y.cpu(), n.cpu()
    met.clear_all()
    a, n = run(0, 1)
    before = compilations()
    (again, _), (b, fewer) = run(0, 1), run(2, 2)
    assert torch.equal(a, again) and not torch.equal(a, b)
    assert n.tolist() == n_bins.tolist() and fewer.tolist() == [298, 298, 198, 98]
    assert compilations() == before and not fallbacks()
    silent = torch.stack([(a[0, i:i + 70] == 0).all(0) for i in range(0, 300, 70)])
    assert 0 < silent.float().mean() < .7 and torch.equal(silent[:, :4], silent[:, 4:])
    inside = a[0][a[0] != 0]
    assert 0.2 < inside.std() < 0.7 and (a == 0).all(-1).any(1).any(), 'noise is smoothed, masks are zero'


def test_augmentation_without_randomness_equals_the_cpus():
    device = torch_xla.device()
    cfg = AugmentConfig(white_noise_std=0, constant_offset_std=0)
    x = torch.randn(2, 60, 4)
    n_bins = torch.tensor([60, 40])
    for cut in (0, 1, 2):
        want, _ = Augment(cfg, 0).apply(x, n_bins, cut, None)
        on_device = torch.tensor([float(cut)]).to(device).unbind()[0].long()
        got, _ = Augment(cfg, 0).apply(x.to(device), n_bins.to(device), on_device, None)
        assert torch.allclose(got.cpu(), want, atol=1e-6)


@pytest.mark.parametrize('name', ['gru', 'transformer', 'mamba'])
def test_participants_are_one_program_for_all_batches(name):
    "Values and gradients equal those of a CPU; t12 has five of the sixteen features."
    cfg = config(name).model.model_copy(update=dict(participants={'t15': 16, 't12': 5}))
    sessions = ['t15.2023.08.11', 't15.2023.08.13', 't12.2022.04.28']
    torch.manual_seed(0)
    model = build_model(cfg, 3, sessions).eval()
    for p in model.parameters(): torch.nn.init.normal_(p, std=.2)
    x, n_bins = torch.randn(3, 40, 16), torch.tensor([40, 40, 24])
    def run(days, device):
        model.to(device).zero_grad()
        y = model(x.to(device), torch.tensor(days).to(device), n_bins=n_bins.to(device))
        inside = torch.arange(y.shape[1]) < cfg.n_frames(n_bins)[:, None]
        y = y * inside[..., None].to(device)
        y.square().sum().backward()
        if device != 'cpu': torch_xla.sync()
        return [y.detach().cpu(), model.participant_weights.grad.cpu(), model.participant_biases.grad.cpu()]
    mixes = [0, 2, 1], [2, 2, 0]
    expected = [run(days, 'cpu') for days in mixes]
    met.clear_all()
    found = [run(mixes[0], torch_xla.device())]
    before = compilations()
    found.append(run(mixes[1], torch_xla.device()))
    assert compilations() == before and not fallbacks()
    for theirs, ours in zip(expected, found):
        for a, b in zip(theirs, ours):
            torch.testing.assert_close(b, a, rtol=1e-3, atol=1e-3*max(1, a.abs().max().item()))
        of_t12 = ours[1][1].abs() # Missing features have no effect
        assert of_t12[5:].max() == 0 and of_t12[:5].max() > 0
