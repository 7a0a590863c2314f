"""The small parts of a Zipformer agree with results of icefall's own modules, and meet the requirements of training.

The results are in `../shared/zipformer/scaling.npz`, beside the repository. Formulas and brute force are tested in the
notebooks.
"""
import copy
import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from stored_tensors import stored_bytes
from torch import nn

from b2t_kaggle.pytorch import scaling
from b2t_kaggle.pytorch.scaling import (
    ActivationDropoutAndLinear,
    Balancer,
    BiasNorm,
    Dropout3,
    PiecewiseLinear,
    ScaledLinear,
    ScaleGrad,
    ScheduledFloat,
    SwooshL,
    SwooshR,
    Whiten,
    load_training_state,
    set_batch_count,
    training_state,
)
from b2t_kaggle.pytorch.scaling.balancer import ABS_TO_RMS, proportion_to_mean
from b2t_kaggle.pytorch.scaling.whiten import whitening_metric

PATH = Path(__file__).resolve().parents[2]/'shared/zipformer/scaling.npz'
ARRAYS = dict(np.load(PATH)) if PATH.exists() else {}
CASES = json.loads(str(ARRAYS.pop('cases'))) if ARRAYS else {}
needs_figures = pytest.mark.skipif(not ARRAYS, reason='../shared/zipformer/scaling.npz is not beside the repository')

# Units that are compared here, and those that the encoder's tests compare
UNITS = {'swoosh', 'bias_norm', 'balancer', 'whiten', 'scheduled_float', 'softmax',
         'penalize_abs_values_gt', 'limit_param_value', 'convert_num_channels', 'dropout3', 'scale_grad',
         'activation_dropout_and_linear'}
OF_THE_ENCODER = {'downsample', 'bypass', 'pos_encoding', 'attention_weights', 'chunk_conv', 'feature_mask'}
OF_THE_FIRST_ZIPFORMER = {'double_swish'}  # Not part of the kit


def names(unit):
    "The cases of a unit."
    return sorted({name.removeprefix(unit + '.').rpartition('.')[0] for name in ARRAYS if name.startswith(unit + '.')})


def arrays(case):
    "The arrays of a case by the last part of their name."
    start = case + '.'
    found = {name.removeprefix(start): a for name, a in ARRAYS.items() if name.startswith(start)}
    return {name: torch.from_numpy(np.array(a)) for name, a in found.items() if '.' not in name}


def assert_near(found, want, largest=1e-5):
    "Compare relative to the largest value."
    assert found.shape == want.shape
    assert (found - want).abs().max() <= largest * want.abs().max()


def forward_backward(f, x, grad, *parameters):
    "The output, and the gradients of the input and the parameters."
    x = x.clone().requires_grad_()
    y = f(x)
    return y.detach(), *torch.autograd.grad(y, (x, *parameters), grad)


def edited(f, a):
    "The edited gradient, by a function that returns its input unchanged."
    y, d_x = forward_backward(f, a['x'], a['y_grad'])
    assert torch.equal(y, a['x'])
    return d_x


@pytest.fixture
def noise(monkeypatch):
    "A function that replaces PyTorch's next random numbers by given ones, and checks the requested shape."
    def install(numbers):
        def draw(shape, **kw):
            assert tuple(shape) == tuple(numbers.shape)
            return numbers
        monkeypatch.setattr(torch, 'rand', draw)
        monkeypatch.setattr(torch, 'rand_like', lambda x: draw(x.shape))
    return install


@pytest.fixture
def always(monkeypatch):
    "Random numbers are 0, so that everything with a probability is applied."
    monkeypatch.setattr(torch, 'rand', lambda *shape, **kw: torch.zeros(()))


@needs_figures
def test_every_figure_is_compared_somewhere():
    assert {name.split('.')[0] for name in ARRAYS} == UNITS | OF_THE_ENCODER | OF_THE_FIRST_ZIPFORMER


@needs_figures
@pytest.mark.parametrize('letter, module', [('l', SwooshL), ('r', SwooshR)])
def test_swoosh(letter, module):
    a = arrays('swoosh')
    ones = torch.ones_like(a['x'])
    y, d_x = forward_backward(module(), a['x'], ones)
    small = a['x'].abs() < 100
    for found, want in ((y, a[letter]), (d_x, a[f'{letter}_grad']), (y, a[f'{letter}_linear_eval'])):
        assert_near(found, want)
        assert_near(found[small], want[small])


@needs_figures
@pytest.mark.parametrize('case', names('bias_norm'))
@pytest.mark.parametrize('keep_output', [False, True])
def test_bias_norm(case, keep_output, always):
    a = arrays(f'bias_norm.{case}')
    norm = BiasNorm(12, 1 if case == 'mid' else -1, store_output_for_backprop=keep_output)
    norm.load_state_dict(dict(bias=a['bias'], log_scale=a['log_scale']))
    y, *grads = forward_backward(norm, a['x'], a['y_grad'], norm.bias, norm.log_scale)
    assert_near(y, a['y'])
    for found, name in zip(grads, ('x_grad', 'bias_grad', 'log_scale_grad')): assert_near(found, a[name])
    negated = forward_backward(norm, a['x'], -a['y_grad'], norm.log_scale)[2]
    assert_near(negated, a['log_scale_grad_negated'])


@needs_figures
@pytest.mark.parametrize('case', [c for c in names('balancer') if c])
def test_balancer(case):
    a = arrays(f'balancer.{case}')
    setting, layout = case.split('.')
    settings = CASES['balancer'][setting]
    args = {k: settings[k] for k in ('min_positive', 'max_positive', 'min_abs', 'max_abs', 'grad_scale')}
    balancer = Balancer(24, -1 if layout == 'last' else 1, **args, prob=1.)
    assert_near(edited(balancer, a), a['x_grad'])
    change, expected = edited(balancer, a) - a['y_grad'], a['x_grad'] - a['y_grad']
    assert_near(change, expected, 2e-5)  # It is a small part of the gradient, which is rounded
    assert balancer.eval() and torch.equal(edited(balancer, a), edited(balancer.train(), a))


@needs_figures
def test_limits_of_balancer():
    a = arrays('balancer')
    means = torch.tensor([proportion_to_mean(p) for p in a['proportion'].tolist()])
    assert_near(means, a['proportion_to_mean'])
    assert_near(a['proportion'] * ABS_TO_RMS, a['abs_to_rms'])
    for s in CASES['balancer'].values():
        found = [proportion_to_mean(s[f'{end}_positive']) for end in ('min', 'max')]
        found += [s[f'{end}_abs'] * ABS_TO_RMS for end in ('min', 'max')]
        assert found == pytest.approx([s[k] for k in ('min_mean', 'max_mean', 'min_rms', 'max_rms')], rel=1e-12)


@needs_figures
@pytest.mark.parametrize('case', names('whiten'))
def test_whiten(case, always):
    a = arrays(f'whiten.{case}')
    s = CASES['whiten'][case]
    whiten = Whiten(s['num_groups'], s['whitening_limit'], (.025, .25), s['grad_scale'])
    assert whiten.prob == s['prob_before']
    assert_near(edited(whiten, a), a['x_grad'])
    assert_near(edited(whiten, a) - a['y_grad'], a['x_grad'] - a['y_grad'], 2e-5)
    assert whiten.prob == s['prob_after']
    assert_near(whitening_metric(a['x'], s['num_groups']), a['metric'])


def schedule(pairs, batches, **kw):
    s = ScheduledFloat(*pairs, **kw)
    s.batch_count = batches
    return s


@needs_figures
@pytest.mark.parametrize('as_tensor', [False, True])
def test_scheduled_float(as_tensor):
    a = arrays('scheduled_float')
    pairs = CASES['scheduled_float']['pairs']
    dropout, skip, rising = (PiecewiseLinear(*pairs[name]) for name in ('dropout', 'skip', 'rising'))
    found = {name: PiecewiseLinear(*p) for name, p in pairs.items()}
    found |= dict(dropout_plus_quarter=dropout + .25, dropout_plus_skip=dropout + skip, dropout_times_3=dropout * 3,
                  skip_max_rising=skip.max(rising), dropout_max_const=dropout.max(.2), skip_min_rising=skip.min(rising))
    assert found.keys() | {'batch_count'} == a.keys()
    for name, f in found.items():
        if as_tensor: values = f(a['batch_count'])
        else: values = torch.tensor([float(schedule([*f.pairs], b)) for b in a['batch_count'].tolist()])
        torch.testing.assert_close(values, a[name], rtol=1e-6, atol=1e-7, msg=name)
    want = CASES['scheduled_float']['skip_max_rising_pairs']
    assert np.array(skip.max(rising).pairs) == pytest.approx(np.array(want), rel=1e-12)


@needs_figures
def test_defaults_of_scheduled_float():
    want = CASES['scheduled_float']
    dropout = ScheduledFloat(*want['pairs']['dropout'], default=.77)
    assert float(dropout) == want['default_without_batch_count']
    dropout.batch_count = 100.
    assert float(dropout) == pytest.approx(want['training'])
    assert float(dropout.eval()) == want['eval_mode']


@needs_figures
def test_softmax():
    a = arrays('softmax')
    y, d_x = forward_backward(lambda x: scaling.softmax(x, -1), a['x'], a['y_grad'])
    assert_near(y, a['y'])
    assert_near(d_x, a['x_grad'])


@needs_figures
@pytest.mark.parametrize('unit, f', [
    ('penalize_abs_values_gt', lambda x: scaling.penalize_abs_values_gt(x, 25., 1e-4)),
    ('limit_param_value', lambda x: scaling.limit_param_value(x, -1.5, 1., prob=1.)),
    ('scale_grad', ScaleGrad(.2))])
def test_changes_of_gradients(unit, f):
    a = arrays(unit)
    assert_near(edited(f, a), a['x_grad'])


@needs_figures
@pytest.mark.parametrize('n', [4, 7, 10])
def test_convert_num_channels(n):
    a = arrays('convert_num_channels')
    assert torch.equal(scaling.convert_num_channels(a['x'], n), a[f'to{n}'])


@needs_figures
def test_dropout3(noise):
    a = arrays('dropout3')
    noise(a['noise'])
    y, d_x = forward_backward(Dropout3(.3, shared_dim=0), a['x'], a['y_grad'])
    assert_near(y, a['y'])
    assert_near(d_x, a['x_grad'])


def split_case(case):
    "Activation, whether there is a bias, dropout rate, and the dimension that shares the mask."
    activation, bias, rest = case.split('.', 2)
    p, shared = rest.removeprefix('p').split('.shared_')
    return activation, bias == 'bias', float(p), None if shared == 'None' else int(shared)


@needs_figures
@pytest.mark.parametrize('case', names('activation_dropout_and_linear'))
def test_activation_dropout_and_linear(case, noise):
    a = arrays(f'activation_dropout_and_linear.{case}')
    activation, bias, p, shared = split_case(case)
    layer = ActivationDropoutAndLinear(10, 6, bias, activation, p, shared)
    layer.load_state_dict({k: a[k] for k in ('weight', 'bias') if k in a})
    if 'noise' in a: noise(a['noise'])
    y, d_x, *grads = forward_backward(layer, a['x'], a['y_grad'], *layer.parameters())
    assert_near(y, a['y'])
    assert_near(d_x, a['x_grad'])
    for (name, _), found in zip(layer.named_parameters(), grads): assert_near(found, a[f'{name}_grad'])
    assert_near(layer.eval()(a['x']).detach(), a['y_eval'])


# Requirements of training

def layer(prob=None):
    "All random modules in sequence."
    parts = [nn.Linear(6, 12), Balancer(12, -1, min_abs=1., max_abs=1.5, prob=prob), SwooshR(),
             Whiten(1, 1., (.025, .25), .02), ActivationDropoutAndLinear(12, 6, dropout_p=.1, dropout_shared_dim=0),
             Dropout3(ScheduledFloat((0, .3), (100, .1)), 0), Whiten(2, 2.3, (.025, .25), .02), BiasNorm(6)]
    return nn.Sequential(*parts)


def inputs(seed):
    "Channels of different scale, so that the second Whiten sometimes exceeds its limit."
    g = torch.Generator().manual_seed(seed)
    return torch.randn(20, 3, 6, generator=g) * torch.rand(6, generator=g).square()


def gradients(model, seed):
    torch.manual_seed(seed)
    model.zero_grad()
    model(inputs(seed)).pow(4).sum().backward()
    return [p.grad.clone() for p in model.parameters()]


def equal(a, b): return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.fixture
def model():
    torch.manual_seed(0)
    model = layer()
    set_batch_count(model, 10.)
    return model


def test_all_random_numbers_follow_from_pytorchs_seed(model):
    found = []
    for other in (1, 2):
        random.seed(other)
        np.random.seed(other)
        for m in model.modules():
            if isinstance(m, Whiten): m.prob = .25
        found.append([gradients(model, seed) for seed in range(20)])
    assert all(equal(a, b) for a, b in zip(*found))
    assert not equal(found[0][0], found[0][1])


def test_a_resumed_run_needs_the_hidden_state_and_is_exact_with_it(model):
    for seed in range(60): gradients(model, seed)
    state = training_state(model)
    assert set(state) == {'3', '6'} and .025 in [float(v) for v in state.values()]
    weights = model.state_dict()
    assert [name for name in weights if name.split('.')[0] in state] == []
    want = [gradients(model, seed) for seed in range(60, 120)]
    def resumed(state):
        other = layer()
        other.load_state_dict(weights)
        set_batch_count(other, 10.)
        if state: load_training_state(other, state)
        return [gradients(other, seed) for seed in range(60, 120)]
    assert all(equal(a, b) for a, b in zip(resumed(state), want))
    assert not all(equal(a, b) for a, b in zip(resumed(None), want))


def test_copies_do_not_share_their_state(model):
    other = copy.deepcopy(model)
    other[3].prob = .025
    set_batch_count(other, 7.)
    assert model[3].prob == .25 and model[1].prob.batch_count == 10.
    assert equal(gradients(copy.deepcopy(model), 3), gradients(model, 3))


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_autocast(dtype, always):
    """Statistics are in float32: for values whose squares exceed float16, gradients equal those of float32 up to
    rounding."""
    torch.manual_seed(0)
    parts = nn.Sequential(Balancer(12, -1, max_abs=100., prob=1.), Whiten(2, 1.1, (.5, 1.), .02),
                          ActivationDropoutAndLinear(12, 6), BiasNorm(6))
    x = (torch.randn(40, 12) @ torch.randn(12, 12) * 300).to(dtype)
    grad = torch.randn(40, 6)
    exact = forward_backward(parts, x.float(), grad, *parts.parameters())
    with torch.autocast('cpu', dtype):
        z = x.clone().requires_grad_()
        y = parts(z)
    found = y.detach(), *torch.autograd.grad(y, (z, *parts.parameters()), grad.to(y.dtype))
    for a, b in zip(found, exact): assert_near(a.float(), b, .03)


def test_memory_of_activations():
    "Swoosh stores one number per input for its backward pass, also in 16 bits."
    for dtype, size in ((torch.float32, 4), (torch.bfloat16, 2)):
        x = torch.randn(30, 10, dtype=dtype, requires_grad=True)
        assert stored_bytes(SwooshL(), x) == 300 * size


def test_names_of_the_package():
    assert set(scaling.__all__) >= {'Balancer', 'Whiten', 'BiasNorm', 'ScheduledFloat', 'SwooshL', 'SwooshR'}
    assert all(hasattr(scaling, name) for name in scaling.__all__)
    assert isinstance(ScaledLinear(3, 2), nn.Linear)
