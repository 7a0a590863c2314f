"""ScaledAdam and Eden: icefall's numbers over 60 steps, the formulas in float64 parameter by parameter, and runs that
are exact after SIGKILL and an overflow. test_cr_ctc.py trains with them in parts and in two processes."""
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from test_trainer import config, kill_training, open_stores, write_toy

import b2t_kaggle.pytorch.optimizer.scaled_adam as scaled_adam
from b2t_kaggle.devices.torch import pick_torch
from b2t_kaggle.pytorch.checkpoint import load_file
from b2t_kaggle.pytorch.optimizer import Eden, Eden2, ScaledAdam
from b2t_kaggle.pytorch.parallel import SingleDevice
from b2t_kaggle.pytorch.trainer import Trainer, train
from b2t_kaggle.training.history import read_history
from b2t_kaggle.training.recipe import learning_rates

REFERENCE = Path(__file__).parents[2]/'shared'/'zipformer'/'optimizer.npz'
CASES = ['clip', 'noclip', 'defaults_constant_lr', 'limits', 'periods', 'groups']
DEFAULTS = dict(lr=.03, clipping_scale=None, betas=(.9, .98), scalar_lr_scale=.1, eps=1e-8, param_min_rms=1e-5,
                param_max_rms=3., scalar_max=10., size_update_period=4, clipping_update_period=100)


@pytest.fixture(scope='module')
def reference():
    if not REFERENCE.exists(): pytest.skip(f'{REFERENCE} is not here: icefall\'s figures come beside the repository')
    with np.load(REFERENCE) as f: return {k: f[k] for k in f.files}


class Oracle:
    "The formulas in float64, one parameter after another, with lists, branches and counters on the host."
    def __init__(self, groups, settings):
        self.groups = groups # Lists of (parameter, gradients by step or None)
        self.set = DEFAULTS | settings
        self.n = 0
        self.m = [[np.zeros_like(p) for p in g] for g in groups]
        self.v = [[np.zeros_like(p) for p in g] for g in groups]
        self.w = [[0.] * len(g) for g in groups]
        self.overlaps = [[[] for _ in g] for g in groups]
        self.rms = [[self.size(p) for p in g] for g in groups]
        self.norms = [{} for _ in groups] # By slot
        self.limits = [math.inf for _ in groups]

    def size(self, p): return math.sqrt((p**2).mean()) if p.size > 1 else self.set['scalar_lr_scale']

    def clip(self, i, grads):
        scale = self.set['clipping_scale']
        period = self.set['clipping_update_period']
        n = self.n
        if scale is None or n == 0: return 1.
        norm = math.sqrt(sum(((g * r)**2).sum() for g, r in zip(grads, self.rms[i])))
        self.norms[i][n % period] = norm
        known = sorted(self.norms[i].values())
        median = known[min(len(known) - 1, len(known) // 4 * 2)]
        if n % period == 0: self.limits[i] = scale * median
        elif n in (10, 20, 40) and n < period: self.limits[i] = 2 * scale * median
        return min(1., self.limits[i] / (norm + 1e-20))

    def growth(self, i, j, p, g, lr):
        s = self.set
        period = self.set['size_update_period']
        _, beta = self.set['betas']
        self.overlaps[i][j].append((p * g).sum())
        if len(self.overlaps[i][j]) < period: return 0.
        sums = self.overlaps[i][j]
        self.overlaps[i][j] = []
        self.rms[i][j] = rms = self.size(p)
        self.w[i][j] = beta**period * self.w[i][j] + (1 - beta**period) * np.mean(np.square(sums))
        periods = (self.n + 1) // period
        c = -lr * s['scalar_lr_scale'] * math.sqrt(1 - beta**(period * periods)) * sum(sums)
        c = max(-.1, min(.1, c / (math.sqrt(self.w[i][j]) + s['eps'])))
        return min(0. if rms < s['param_min_rms'] else c, (s['param_max_rms'] - rms) / max(rms, 1e-300))

    def step(self, grads, rates):
        s = self.set
        beta1, beta2 = s['betas']
        factors = []
        for i, group in enumerate(self.groups):
            factors.append(self.clip(i, grads[i]))
            for j, p in enumerate(group):
                g = grads[i][j] * factors[-1]
                c = self.growth(i, j, p, g, rates[i]) if p.size > 1 else 0.
                self.v[i][j] = beta2 * self.v[i][j] + (1 - beta2) * g**2
                bias = 1 - beta2**(self.n + 1)
                root = np.sqrt(self.v[i][j] / (bias if bias < .99 else 1.))
                delta = -rates[i] * g / (root + s['eps'])
                delta *= s['scalar_lr_scale'] if p.size == 1 else max(self.rms[i][j], s['param_min_rms'])
                self.m[i][j] = beta1 * self.m[i][j] + (1 - beta1) * (delta + c * p)
                p += self.m[i][j]
                if p.size == 1: np.clip(p, -s['scalar_max'], s['scalar_max'], out=p)
        self.n += 1
        return factors


def record_factors(monkeypatch):
    "Record the factors by which `ScaledAdam` multiplies gradients, in a list that grows with every group and step."
    factors = []
    real = scaled_adam.clip_factor
    def clip_factor(*args):
        factors.append(real(*args))
        return factors[-1]
    monkeypatch.setattr(scaled_adam, 'clip_factor', clip_factor)
    return factors


@pytest.mark.parametrize('settings', [
    dict(clipping_scale=2.),
    dict(clipping_scale=1., clipping_update_period=15, size_update_period=3, betas=(.8, .9), eps=1e-5, lr=.1),
    dict(scalar_max=1.02, param_max_rms=1.1, param_min_rms=.3, lr=.3, scalar_lr_scale=.4),
])
def test_the_formulas_parameter_by_parameter_in_float64(settings, monkeypatch):
    "Two groups with separate learning rates, repeated shapes, a parameter without a gradient, spikes, and a zero."
    rng = np.random.default_rng(0)
    shapes = [[(), (3, 4), (3, 4), (7,)], [(1,), (3, 4), (7,), (2, 3, 5)]]
    groups = [[np.asarray(rng.standard_normal(s)) for s in g] for g in shapes]
    groups[1][2][:] = 0
    params = [[torch.nn.Parameter(torch.tensor(p)) for p in g] for g in groups]
    lr = settings.get('lr', .03)
    ours = ScaledAdam([dict(params=params[0], lr=lr), dict(params=params[1], lr=lr / 3)], **settings)
    oracle = Oracle(groups, settings)
    found = record_factors(monkeypatch)
    for n in range(60):
        spike = 50. if n in (12, 13, 33, 47) else 0. if n == 38 else 1.
        grads = [[spike * rng.standard_normal(s) for s in g] for g in shapes]
        grads[0][0] = -abs(grads[0][0]) # A scalar that grows
        grads[0][3] = np.zeros(7)
        for p, g in zip(sum(params, []), sum(grads, [])): p.grad = torch.tensor(g)
        params[0][3].grad = None
        factors = oracle.step(grads, [lr, lr / 3])
        ours.step()
        if settings.get('clipping_scale'):
            assert [f.item() for f in found[-2:]] == pytest.approx(factors, rel=1e-9), n
            if n == 12: assert max(factors) < .5
        for p, expected in zip(sum(params, []), sum(groups, [])):
            np.testing.assert_allclose(p.detach().numpy(), expected, rtol=1e-8, atol=1e-12, err_msg=f'step {n}')
    if 'scalar_max' in settings: assert params[0][0].item() == 1.02


@pytest.mark.parametrize('case', CASES)
def test_sixty_steps_equal_icefalls(case, reference, monkeypatch):
    "Parameters at seven steps, to 1e-5 of their largest element; all learning rates and clipping factors."
    setting = json.loads(str(reference['cases']))[case]
    names = [k.removeprefix('init.') for k in reference if k.startswith('init.')]
    params = {k: torch.nn.Parameter(torch.tensor(reference[f'init.{k}'])) for k in names}
    groups = [dict(named_params=[(k, params[k]) for k in g['names']], lr=g['lr']) for g in setting.get('groups', [])]
    optimizer = ScaledAdam(groups or params.items(), **setting['optimizer'])
    found = record_factors(monkeypatch)
    schedule = None
    if setting['schedule']:
        kind, arguments = setting['schedule']
        schedule = dict(Eden=Eden, Eden2=Eden2)[kind](optimizer, **arguments)
        schedule.step_epoch(0)
    deviations = []
    for n in range(1, 61):
        if schedule and n == 31: schedule.step_epoch(1)
        for k, p in params.items():
            if f'grad.{k}' in reference: p.grad = torch.tensor(reference[f'grad.{k}'][n - 1])
        if schedule: schedule.step_batch(n)
        rates = [g['lr'] for g in optimizer.param_groups]
        assert rates == pytest.approx(reference[f'{case}.lr'][n - 1].tolist(), rel=1e-6)
        optimizer.step()
        if setting['optimizer'].get('clipping_scale'):
            factors = [f.item() for f in found[-len(rates):]]
            assert factors == pytest.approx(reference[f'{case}.clip'][n - 1].tolist(), abs=6e-5), n # Four digits
        for k, p in params.items():
            expected = reference.get(f'{case}.step{n:02}.{k}')
            if expected is None: continue
            deviations.append(np.abs(p.detach().numpy() - expected).max() / np.abs(expected).max())
    print(f'{case}: {max(deviations):.1e}')
    assert len(deviations) == 7 * len(names) and max(deviations) < 1e-5


def test_tables_of_eden_equal_icefalls(reference):
    for name, table in json.loads(str(reference['tables'])).items():
        lr = table.pop('base_lr')
        kind = dict(Eden=Eden, Eden2=Eden2)[table.pop('cls')]
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=lr)
        schedule = kind(optimizer, **table)
        found = []
        for batch in reference['eden_batches']:
            for epoch in reference['eden_epochs'][:reference[name].shape[1]]:
                schedule.step_epoch(float(epoch))
                schedule.step_batch(float(batch))
                found.append(schedule.get_last_lr()[0])
        assert found == pytest.approx(reference[name].ravel().tolist(), rel=1e-6), name


def test_the_rates_of_a_run_equal_those_of_eden2():
    cfg = config(lr_scheduler_type='eden', lr_max=.045, lr_max_day=.01, lr_warmup_steps=20).train
    cfg = cfg.model_copy(update=dict(lr_eden_batches=100))
    groups = [dict(params=[torch.nn.Parameter(torch.zeros(2))], lr=lr) for lr in (.045, .01)]
    schedule = Eden2(torch.optim.SGD(groups), lr_batches=100, warmup_batches=20., warmup_start=0.)
    for step in (0, 3, 20, 100, 5000):
        schedule.step_batch(step)
        model, day = schedule.get_last_lr()
        assert learning_rates(step, cfg)['model'] == pytest.approx(model)
        if step > 20: assert learning_rates(step, cfg)['day'] == pytest.approx(day)


# Runs of the kit
RECIPE = dict(optimizer='scaled_adam', lr_scheduler_type='eden', lr_max=.03, lr_max_day=.03,
              cr_ctc=.2, time_masks=2)


@pytest.fixture(scope='module')
def stores(tmp_path_factory):
    folder = tmp_path_factory.mktemp('toy')
    write_toy(folder)
    return open_stores(folder)


def trainer(stores, precision='float32', **kw):
    cfg = config(**RECIPE | dict(precision=precision) | kw)
    return Trainer(*stores, cfg, SingleDevice(pick_torch('cpu', precision)))


def take(t, n): return [t.train_step(*t.loader(i)) for i in range(t.step, t.step + n)]


def assert_same_state(a, b):
    "Check that weights and optimiser of two checkpoints are bitwise equal."
    for k, v in a['model_state_dict'].items(): assert torch.equal(v, b['model_state_dict'][k]), k
    assert a['optimizer_state_dict'].keys() == b['optimizer_state_dict'].keys()
    for name, state in a['optimizer_state_dict'].items():
        for k, v in state.items(): assert torch.equal(v, b['optimizer_state_dict'][name][k]), (name, k)


def test_it_learns(stores):
    "A toy is overfitted, and evaluated on the training trials themselves."
    sizes = dict(n_units=48, n_layers=1, rnn_dropout=0, smooth_data=False, lr_max=.08)
    t = trainer([stores[0], stores[0]], **sizes)
    take(t, 60)
    per = t.metrics()['val_per']
    assert per < .25, per


def test_a_batch_without_a_day_leaves_its_row_and_state(stores):
    t = trainer(stores, days_per_batch=1)
    before = t.model.day_weights.detach().clone()
    seen = set()
    for i in range(4):
        parts, days = t.loader(i)
        seen |= set(days.tolist())
        t.train_step(parts, days)
    moved = (t.model.day_weights.detach() - before).abs().amax((1, 2))
    state = t.optimizer.state_dict()['day_weights']
    for day in range(3):
        assert (moved[day] > 0) == (day in seen) == (state['n_steps'][day] > 0), day
    assert state['n_steps'].sum() == 4


def test_clipping_ignores_the_trainers_setting(stores):
    "`grad_norm_clip_value` has no effect."
    weights = []
    for largest in (1e-6, 0):
        t = trainer(stores, grad_norm_clip_value=largest)
        take(t, 2)
        weights.append(t.model.out.weight.detach())
    assert torch.equal(*weights)


def test_an_overflow_in_float16_changes_nothing(stores):
    t = trainer(stores, 'float16')
    t.scaler.load_state_dict(t.scaler.state_dict() | dict(scale=2.**60))
    before = {name: {k: v.clone() for k, v in s.items()} for name, s in t.optimizer.state_dict().items()}
    weight = t.model.out.weight.detach().clone()
    result, = take(t, 1)
    assert result.skipped and torch.equal(t.model.out.weight, weight)
    for name, state in t.optimizer.state_dict().items():
        for k, v in state.items(): assert torch.equal(v, before[name][k]), (name, k)
    t.scaler.load_state_dict(t.scaler.state_dict() | dict(scale=2.**6))
    result, = take(t, 1)
    assert not result.skipped and not torch.equal(t.model.out.weight, weight)


def test_a_killed_run_ends_with_the_weights_of_one_that_was_not(stores, tmp_path):
    """SIGKILL after the first checkpoint: with ScaledAdam, Eden2, CR-CTC, masks, noise and dropout, weights are bitwise
    equal."""
    cfg = config(**RECIPE, precision='float32', num_training_batches=40)
    kill_training(stores, tmp_path/'cut', steps=20, **RECIPE, precision='float32', num_training_batches=40)
    step = load_file(tmp_path/'cut'/'last.pt')['step']
    for run in ('cut', 'whole'): train(*stores, cfg, tmp_path/run, progress=False)
    cut, whole = (load_file(tmp_path/run/'last.pt') for run in ('cut', 'whole'))
    assert 0 < step < 40 == whole['step']
    assert_same_state(cut, whole)
    tables = [read_history(tmp_path/run/'history.csv').drop(columns='seconds') for run in ('cut', 'whole')]
    assert tables[0].equals(tables[1]) and (tables[0].consistency > 0).all()
