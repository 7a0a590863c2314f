"""Write `zipformer_reference.npz`: weights, inputs and results of tiny Zipformers.

With this file, the Zipformer is tested in checkouts without icefall's numbers. Run this script only with code for which
`tests/test_zipformer.py` and `tests/test_scaling.py` pass beside `../shared/zipformer`, because then the results are
those of icefall.
"""
from pathlib import Path

import numpy as np
import torch
from torch.nn import Sequential

from b2t_kaggle.pytorch.models.zipformer import Conv2dSubsampling, Zipformer2
from b2t_kaggle.pytorch.scaling import Balancer, BiasNorm, SwooshR, Whiten

PATH = Path(__file__).with_suffix('.npz')
SIZES = dict(downsampling_factor=(1, 2), encoder_dim=(8, 12), num_encoder_layers=(1, 2), encoder_unmasked_dim=8,
             query_head_dim=4, pos_head_dim=2, value_head_dim=3, num_heads=2, feedforward_dim=16,
             cnn_module_kernel=(5, 3), pos_dim=8, dropout=0.)
MODELS = {
    'front end': (lambda: Conv2dSubsampling(9, 8, 2, 3, 4, dropout=0.), (3, 25, 9)),
    'encoder': (lambda: Zipformer2(**SIZES), (14, 3, 8)),
    'causal': (lambda: Zipformer2(**SIZES, causal=True, chunk_size=(4,), left_context_frames=(8,)), (14, 3, 8)),
    'parts': (lambda: Sequential(BiasNorm(8), Balancer(8, -1, .3, .6, .5, 1., grad_scale=.5, prob=1.), SwooshR(),
                                 Whiten(2, 1.05, (1., 1.), .5)), (40, 8)),
}
LENGTHS = torch.tensor([14, 9, 5])


def results(model, x):
    """Output, and gradients of its weighted sum: the input's gradient, and the norm and a projection of each
    parameter's."""
    x = x.requires_grad_()
    if isinstance(model, Sequential): y = model(x)
    else:
        for m in model.modules():
            if isinstance(m, Balancer | Whiten): m.grad_scale = 0. # No random changes of gradients
        y, _ = model(x, LENGTHS if isinstance(model, Zipformer2) else LENGTHS + 11)
    def ramp(v): return torch.linspace(-1, 1, v.numel()).view_as(v)
    d_x, *gradients = torch.autograd.grad((ramp(y)*y).sum(), [x, *model.parameters()], allow_unused=True)
    pairs = [torch.stack([g.norm(), (ramp(g)*g).sum()]) for g in gradients if g is not None]
    return dict(output=y.detach(), input=d_x, parameters=torch.stack(pairs))


def main():
    arrays = {}
    for name, (make, shape) in MODELS.items():
        torch.manual_seed(0)
        model = make().eval()
        for p in model.parameters(): torch.nn.init.normal_(p, std=0.3)
        x = torch.randn(shape)
        weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
        arrays |= {f'{name}/weights': weights, f'{name}/input': x}
        arrays |= {f'{name}/result/{k}': v for k, v in results(model, x.clone()).items()}
    np.savez_compressed(PATH, **{k: v.numpy() for k, v in arrays.items()})


if __name__ == '__main__': main()
