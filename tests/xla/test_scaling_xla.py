"The small parts of a Zipformer on XLA: one program for all steps, nothing on the host, and the gradients of a CPU."
import pytest

torch_xla = pytest.importorskip('torch_xla', reason='needs torch_xla: pip install b2t_kaggle[xla]')
import torch
import torch_xla.debug.metrics as met
from torch import nn

from b2t_kaggle.pytorch.scaling import (
    ActivationDropoutAndLinear,
    Balancer,
    BiasNorm,
    Dropout3,
    ScheduledFloat,
    SwooshR,
    Whiten,
    penalize_abs_values_gt,
    set_batch_count,
    training_state,
)
from b2t_kaggle.pytorch.scaling.schedule import bernoulli


class Penalty(nn.Module):
    "A penalty that applies to some calls, as for attention scores."
    def forward(self, x): return penalize_abs_values_gt(x, 25., 1e-4 * bernoulli(.5, x.device))


def parts(prob, whiten, dropout):
    "All random modules in sequence, with scheduled numbers in all places where a Zipformer has them."
    limit = ScheduledFloat((0, 1.), (20000, 1.2))
    share = ScheduledFloat((0, .25), (20000, .05))
    rate = ScheduledFloat((0, dropout), (20000, dropout / 2))
    return nn.Sequential(nn.Linear(6, 12), Balancer(12, -1, share, 1., 1., 1.5, prob=prob), SwooshR(),
                         Whiten(1, limit, whiten, .02), Penalty(),
                         ActivationDropoutAndLinear(12, 6, dropout_p=rate, dropout_shared_dim=0),
                         Dropout3(rate, 0), Whiten(2, 1.1, whiten, .02), BiasNorm(6))


def number(value, device):
    "A number as the trainer sends it; torch_xla treats a single 0 or 1 as a constant."
    return torch.tensor([value, 0.5]).to(device)[0]


def step(model, x, batch_count):
    "Gradients of a step; the seed is set before each step, as in the trainer."
    torch_xla.manual_seed(0)
    for p in model.parameters(): p.grad = None
    set_batch_count(model, batch_count)
    model(x).pow(4).sum().backward()
    torch_xla.sync()
    return [p.grad.cpu() for p in model.parameters()]


X = torch.randn(20, 3, 6, generator=torch.Generator().manual_seed(1))


def test_one_program_for_all_steps_and_nothing_on_the_host():
    device = torch_xla.device()
    model = parts(None, (.025, .25), .3).to(device)
    x = X.to(device)
    torch_xla.sync()  # As in the trainer; otherwise a parameter of 1 would be a constant of the first program
    step(model, x, number(0., device))
    met.clear_all()
    found = [step(model, x, number(float(i), device)) for i in (100, 5000, 20000)]
    assert (met.metric_data('CompileTime') or [0])[0] == 0
    assert [name for name in met.counter_names() if name.startswith('aten::')] == []
    assert all(torch.isfinite(g).all() for grads in found for g in grads)
    assert {round(float(v), 6) for v in training_state(model).values()} <= {.025, .25}


@pytest.mark.parametrize('batch_count', [0., 5000., 30000.])
def test_gradients_equal_the_cpus(batch_count):
    "All parts are applied and nothing is dropped, so random numbers do not matter; BiasNorm is within its limits."
    torch.manual_seed(0)
    model = parts(1., (1., 1.), 0.)
    del model[4]  # The penalty
    want = step(model, X, batch_count)
    found = step(model.to(torch_xla.device()), X.to(torch_xla.device()), number(batch_count, torch_xla.device()))
    for a, b in zip(found, want): assert (a - b).abs().max() <= 1e-4 * b.abs().max()


def test_the_state_of_whiten_stays_on_the_device():
    device = torch_xla.device()
    x = torch.randn(50, 6, generator=torch.Generator().manual_seed(0)).to(device)
    for limit, expected in ((1., .25), (6., .025)):
        whiten = Whiten(1, limit, (.025, .25), .01)
        for i in range(40):  # It is applied in a quarter of the calls
            torch_xla.manual_seed(i)
            z = (x * 1.).requires_grad_()
            whiten(z).sum().backward()
            torch_xla.sync()
        assert isinstance(whiten.state._value, torch.Tensor) and whiten.prob == pytest.approx(expected)
