"""ScaledAdam on XLA: one program, nothing on the host, and the numbers of the CPU. Training with it, also on two
devices, is tested in test_training_xla."""
import pytest

torch_xla = pytest.importorskip('torch_xla', reason='needs torch_xla: pip install b2t_kaggle[xla]')
import torch
import torch_xla.debug.metrics as met

from b2t_kaggle.pytorch.optimizer import ScaledAdam


def test_sixty_steps_are_one_program_and_equal_the_cpus():
    "Two groups, one with rows that are selected by a mask; limits and clipping have an effect."
    torch.manual_seed(0)
    shapes = [(), (3, 4), (3, 4), (7,)]
    start = [torch.randn(s) for s in shapes]
    days = torch.randn(3, 5)
    grads = [[torch.randn(s) * (50 if n in (13, 47) else 1) for s in [*shapes, (3, 5)]] for n in range(60)]
    masks = (torch.rand(60, 3) > .4).float()

    def run(device):
        params = [torch.nn.Parameter(p.clone().to(device)) for p in [*start, days]]
        groups = [dict(params=params[:-1]), dict(params=params[-1:], has_rows=True)]
        adam = ScaledAdam(groups, clipping_scale=1., clipping_update_period=15, param_max_rms=1.2, scalar_max=1.2)
        for group in adam.param_groups:
            adam.stacks(group)
            adam.clipping(group)
        compiled = []
        for n in range(60):
            rates = torch.tensor([.05 / (n + 1), .03]).to(device).unbind()
            for p, g in zip(params, grads[n]): p.grad = g.to(device)
            for group, lr in zip(adam.param_groups, rates): group['lr'] = lr
            adam.param_groups[1]['rows'] = masks[n].to(device)
            adam.step()
            if device.type == 'xla': torch_xla.sync()
            compiled.append(met.metric_data('CompileTime')[0] if met.metric_data('CompileTime') else 0)
        return [p.detach().cpu() for p in params], compiled

    met.clear_all()
    found, compiled = run(torch_xla.device())
    assert not [c for c in met.counter_names() if c.startswith('aten::')]
    assert compiled[2:] == [compiled[1]] * 58, compiled # The first step also creates the state
    expected, _ = run(torch.device('cpu'))
    for a, b, p in zip(found, expected, [*start, days]):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-5) and not torch.allclose(b, p, atol=.01)
