"The trainer: the official optimisation, exact resumption after SIGKILL, and errors that say what is wrong."
import itertools
import math
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from copies import call, call_as_ranks, call_with
from killed import LIMIT, ask_before_each_step, kill_after_a_checkpoint, wait_for_checkpoint

from b2t_kaggle.config import preset, with_overrides
from b2t_kaggle.data.sessions import Trial, session_path, write_session
from b2t_kaggle.data.store import TrialStore
from b2t_kaggle.devices.torch import pick_torch
from b2t_kaggle.pipeline.frameworks import train as train_any
from b2t_kaggle.pytorch.checkpoint import load_file, load_model, save_atomic, to_official_state
from b2t_kaggle.pytorch.inference import infer
from b2t_kaggle.pytorch.parallel import SingleDevice
from b2t_kaggle.pytorch.trainer import Trainer, train
from b2t_kaggle.training.budget import Budget
from b2t_kaggle.training.checkpoints import CheckpointError
from b2t_kaggle.training.history import read_history
from b2t_kaggle.training.interface import StepResult
from b2t_kaggle.training.interface import Trainer as AnyTrainer
from b2t_kaggle.training.loop import raise_if_oom
from b2t_kaggle.training.recipe import TrainingError

SESSIONS = ['t15.2023.08.11', 't15.2023.08.13', 't15.2023.08.18']
FEATURES = 12


def write_toy(folder, sessions=SESSIONS, splits=None, short=False, seed=0):
    "Write sessions in which a label is a pattern that lasts ten bins."
    rng = np.random.default_rng(seed)
    patterns = np.random.default_rng(1).standard_normal((5, FEATURES)) * 2
    for s in sessions:
        for split, n in (splits or dict(train=12, val=4)).items():
            trials = []
            for i in range(n):
                ids = rng.integers(1, 5, rng.integers(2, 5))
                x = rng.standard_normal((10 * len(ids) + 10, 512)).astype('float32')
                x[5:-5, :FEATURES] += np.repeat(patterns[ids], 10, axis=0)
                if short and split == 'train' and i == 3: ids = np.ones(30, int)   # 30 equal labels do not fit
                trials.append(Trial(s, split, f'trial_{i:04d}', 1, i, x, ids, 'hello', False))
            write_session(session_path(folder, s, split), trials)


def open_stores(folder):
    return [
        TrialStore.build(folder, s, folder / f'{s}.arrow', progress=False, feature_subset=list(range(FEATURES)))
        for s in ('train', 'val')
    ]


@pytest.fixture(scope='module')
def stores(tmp_path_factory):
    folder = tmp_path_factory.mktemp('toy')
    write_toy(folder)
    return open_stores(folder)


SMALL = {
    'neural_dim': FEATURES,
    'feature_subset': list(range(FEATURES)),
    'n_units': 16,
    'n_layers': 2,
    'n_classes': 5,
    'data.batch_size': 6,
    'days_per_batch': 2,
    'num_training_batches': 60,
    'batches_per_val_step': 20,
    'batches_per_save': 7,
    'lr_warmup_steps': 5,
    'lr_warmup_steps_day': 5,
    'lr_max': 0.01,
    'lr_max_day': 0.01,
    'patch_size': 6,
    'patch_stride': 3,
    'rnn_dropout': 0.2,
    'input_dropout': 0.2,
}


def config(**kw): return with_overrides(preset('demo'), SMALL | kw)


def test_steps_of_a_refit_equal_those_of_a_run_on_both_splits(stores, tmp_path):
    "Compared with a store whose files hold the trials of both splits. A model trained on val is not evaluated on val."
    for s in SESSIONS:
        trials = [t for store in stores for t in map(store.__getitem__, range(len(store))) if t.session == s]
        together = []
        for i, t in enumerate(trials):
            x = np.zeros((len(t.features), 512), 'float32')
            x[:, :FEATURES] = t.features
            together.append(Trial(s, 'train', f'trial_{i:04d}', 1, i, x, t.class_ids, 'hello', False))
        write_session(session_path(tmp_path, s, 'train'), together)
    both = TrialStore.build(tmp_path, 'train', tmp_path/'both.arrow', progress=False,
                            feature_subset=list(range(FEATURES)))
    cpu = SingleDevice(pick_torch('cpu', 'float32'))
    refitted = Trainer(*stores, config(num_training_batches=12, refit=0.5), cpu)
    alone = Trainer(*stores, config(num_training_batches=12), cpu)
    for t in (refitted, alone): assert len(list(t.steps(6))) == 6
    for k, v in alone.model.state_dict().items(): assert torch.equal(refitted.model.state_dict()[k], v)
    union = Trainer(both, None, config(num_training_batches=12), cpu)
    union.model.load_state_dict(refitted.model.state_dict())
    union.optimizer.load_state_dict(refitted.optimizer.state_dict())
    union.step = 6
    for t in (union, refitted): assert len(list(t.steps(12))) == 6
    for k, v in union.model.state_dict().items(): assert torch.equal(refitted.model.state_dict()[k], v)
    assert not torch.equal(refitted.model.out.weight, alone.model.out.weight)
    assert refitted.validate() is None
    for name, save in (('best.pt', alone.save_best), ('refit.pt', refitted.save_refit)): save(tmp_path/name)
    for name in ('best.pt', 'refit.pt'): infer(tmp_path/name, both, tmp_path/'train_logits', 'cpu', progress=False)
    infer(tmp_path/'best.pt', stores[1], tmp_path/'val_logits', 'cpu', progress=False)
    with pytest.raises(CheckpointError, match='refit.pt: was trained on the trials of val from batch 6 on'):
        infer(tmp_path/'refit.pt', stores[1], tmp_path/'val_logits', 'cpu', progress=False)


def test_weights_after_some_steps_equal_the_official_recipes(stores):
    """Lists of day parameters, LambdaLR, AdamW with three groups, and clipping, reimplemented here, give the same
    weights to float32's precision."""
    cfg = config(
        precision='float32',
        rnn_dropout=0,
        input_dropout=0,
        white_noise_std=0,
        constant_offset_std=0,
        random_cut=0,
        smooth_data=False,
        weight_decay_day=0.01,
        grad_norm_clip_value=1.0,
        lr_max_day=0.02,
        lr_decay_steps=12,
        lr_decay_steps_day=10,
        lr_warmup_steps=3,
        epsilon=0.1,
    )
    t = Trainer(*stores, cfg, SingleDevice(pick_torch('cpu', 'float32')))
    c = cfg.train
    p = {k: v.clone().requires_grad_() for k, v in to_official_state(t.model.state_dict()).items()}
    bias = [v for k, v in p.items() if 'gru.bias' in k or 'out.bias' in k]
    day = [v for k, v in p.items() if k.startswith('day_')]
    other = [v for k, v in p.items() if not k.startswith('day_') and 'gru.bias' not in k and 'out.bias' not in k]
    opt = torch.optim.AdamW(
        [
            dict(params=bias, weight_decay=0),
            dict(params=day, lr=c.lr_max_day, weight_decay=c.weight_decay_day),
            dict(params=other),
        ],
        lr=c.lr_max,
        betas=(c.beta0, c.beta1),
        eps=c.epsilon,
        weight_decay=c.weight_decay,
    )

    def factor(i, low, decay, warmup):
        if i < warmup: return i / max(1, warmup)
        if i < decay:
            return max(low, low + (1 - low) * 0.5 * (1 + math.cos(math.pi * (i - warmup) / max(1, decay - warmup))))
        return low
    main = lambda i: factor(i, c.lr_min / c.lr_max, 12, 3)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        opt, [main, lambda i: factor(i, c.lr_min_day / c.lr_max_day, 10, 5), main]
    )
    gru = torch.nn.GRU(FEATURES * 6, 16, 2, batch_first=True)
    start = {k: v.detach().clone() for k, v in p.items()}
    for i in range(15):
        parts, batch_days = t.loader(i)
        b = parts[0].batch
        x = torch.from_numpy(b.features.copy())
        days = b.day.tolist()
        y = torch.stack([trial @ p[f'day_weights.{d}'] + p[f'day_biases.{d}'] for trial, d in zip(x, days)])
        y = F.softsign(y).unfold(1, 6, 3).transpose(2, 3).flatten(2)
        y, _ = torch.func.functional_call(
            gru,
            {k[4:]: v for k, v in p.items() if k.startswith('gru.')},
            (y, p['h0'].expand(2, len(x), 16).contiguous()),
        )
        log_probs = (y @ p['out.weight'].T + p['out.bias']).log_softmax(-1).transpose(0, 1)
        loss = F.ctc_loss(
            log_probs,
            torch.from_numpy(b.labels),
            torch.from_numpy((b.n_bins - 6) // 3 + 1),
            torch.from_numpy(b.n_labels),
            reduction='none',
        ).mean()
        opt.zero_grad(); loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(p.values(), 1.)
        opt.step(); schedule.step()
        taken = t.train_step(parts, batch_days)
        assert (
            abs(taken.losses.mean() - loss.item()) < 1e-3 * loss.item()
            and abs(taken.grad_norm - norm.item()) < 1e-2 * norm.item()
        )
    final = to_official_state(t.model.state_dict())
    for k, v in p.items():
        assert (final[k] - v).abs().max() < 2e-4, k
        assert (v - start[k]).abs().max() > 2e-3, f'{k} hardly moved, so that this proves nothing'


def train_in_a_copy(allowed, folder, out, n_threads, changes):
    torch.set_num_threads(n_threads)
    ask_before_each_step(Trainer, allowed)
    stores = [TrialStore.open(folder/f'{split}.arrow') for split in ('train', 'val')]
    train(*stores, config(**changes), out, progress=False)


def kill_training(stores, out, steps, delay=0., **changes):
    "Kill a training in another process, some seconds after its next checkpoint."
    arguments = stores[0].path.parent, out, torch.get_num_threads(), changes
    kill_after_a_checkpoint(train_in_a_copy, arguments, out/'last.pt', steps, delay)


def test_a_run_that_is_killed_again_and_again_ends_with_the_same_weights(stores, tmp_path):
    """The run is killed at the next checkpoint, or at a random moment in the steps after it; once with all trials on
    the device."""
    assert train(*stores, config(), tmp_path/'whole', progress=False)['step'] == 60
    rng = np.random.default_rng(0)
    seen = []
    for on_device in (False, True, False):
        kill_training(stores, tmp_path/'killed', steps=15, delay=rng.uniform(0, .15),
                      **{'data.on_device': on_device})
        seen.append(load_file(tmp_path/'killed'/'last.pt')['step'])
    assert 0 < seen[0] < seen[1] < seen[2] < 60, f'killed at checkpoints {seen}: nothing was interrupted'
    assert train(*stores, config(), tmp_path/'killed', progress=False)['step'] == 60
    for name in ('last.pt', 'best.pt'):
        a, b = (load_file(tmp_path/d/name) for d in ('whole', 'killed'))
        for k, v in a['model_state_dict'].items(): assert torch.equal(v, b['model_state_dict'][k]), (name, k)
        assert a['best' if name == 'last.pt' else 'val_per'] == b['best' if name == 'last.pt' else 'val_per']
    a, b = (read_history(tmp_path/d/'history.csv') for d in ('whole', 'killed'))
    assert a.drop(columns='seconds').equals(b.drop(columns='seconds'))


def test_a_changed_run_is_refused_by_name(stores, tmp_path, capsys):
    train(*stores, config(num_training_batches=7), tmp_path/'run', progress=False)
    for change, found in [
        ({'lr_max': 0.02}, 'train.lr_max was 0.01, is now 0.02'),
        ({'n_units': 8}, 'model.n_units was 16, is now 8'),
        ({'white_noise_std': 0.1}, 'augment.white_noise_std'),
    ]:
        with pytest.raises(TrainingError, match=found):
            train(*stores, config(**{'num_training_batches': 7} | change), tmp_path / 'run', progress=False)
    capsys.readouterr()
    other = (
        'bfloat16' if pick_torch('cpu').precision == 'float32' else 'float32'
    )  # For example on another accelerator
    longer = train(
        *stores,
        config(num_training_batches=9, time_budget=5.0, batches_per_save=2, precision=other),
        tmp_path / 'run',
        progress=False,
    )
    printed = ''.join(capsys.readouterr()) # The device is printed to standard error
    assert (
        longer['step'] == 9
        and f', {other}: ' in printed
        and 'continuing after 7 batches, which were computed on cpu' in printed
    )


def test_changed_data_is_refused(tmp_path):
    write_toy(tmp_path)
    train(*open_stores(tmp_path), config(num_training_batches=3), tmp_path/'run', progress=False)
    write_toy(tmp_path, seed=7)
    with pytest.raises(TrainingError, match='train trials was 36'):
        train(*open_stores(tmp_path), config(num_training_batches=3), tmp_path / 'run', progress=False)


def test_a_failing_disk_keeps_the_previous_checkpoint(stores, tmp_path, monkeypatch):
    train(*stores, config(num_training_batches=7), tmp_path, progress=False)
    real = torch.save
    calls = []
    def fails(value, f):
        calls.append(1); f.write(b'half'); raise OSError(28, 'No space left on device')
    monkeypatch.setattr(torch, 'save', fails)
    with pytest.raises(OSError): train(*stores, config(), tmp_path, progress=False)
    monkeypatch.setattr(torch, 'save', real)
    assert calls and load_file(tmp_path/'last.pt')['step'] == 7
    assert train(*stores, config(num_training_batches=10), tmp_path, progress=False)['step'] == 10


def test_trials_that_cannot_be_aligned_are_named_and_left_out(tmp_path):
    "A warning names them, and also reaches the terminal from the kernel of a stage."
    write_toy(tmp_path, short=True)
    with pytest.warns(UserWarning, match='3 trials with too few frames') as warned:
        result = train(*open_stores(tmp_path), config(num_training_batches=30), tmp_path/'run', progress=False)
    assert result['finished'] and f'{SESSIONS[0]} block 1 trial 3 (trial_0003)' in str(warned[0].message)


def test_a_loss_that_is_not_a_number_names_its_trials_and_keeps_the_weights(stores):
    t = Trainer(*stores, config(), SingleDevice(pick_torch('cpu')))
    t.train_step(*t.loader(0))
    before = {k: v.clone() for k, v in t.model.state_dict().items()}
    parts, days = t.loader(1)
    parts[0].x[2, 4, 0] = np.inf
    row = stores[0].index.iloc[parts[0].batch.trials[2]]
    with pytest.raises(
        TrainingError, match=rf'batch 1: .*{row.session} block {row.block} trial {row.trial} \({row.key}\)\. Look'
    ):
        t.train_step(parts, days)
    for k, v in t.model.state_dict().items(): assert torch.equal(v, before[k])


def test_early_stopping_and_time_budget(stores, tmp_path, monkeypatch):
    # Without learning, no validation improves after the first
    still = config(
        lr_max=1e-12,
        lr_max_day=1e-12,
        lr_min=0,
        lr_min_day=0,
        early_stopping=True,
        early_stopping_val_steps=2,
        batches_per_val_step=3,
    )
    result = train(*stores, still, tmp_path/'early', progress=False)
    assert (
        result['stopped'] == 'early stopping'
        and result['finished']
        and result['step'] == 9
        and result['best_step'] == 3
    )
    assert train(*stores, still, tmp_path/'early', progress=False)['step'] == 9
    seconds = itertools.count(step=.02) # A clock that advances whenever it is read
    monkeypatch.setattr(time, 'monotonic', lambda: next(seconds))
    began = time.monotonic()
    long = config(num_training_batches=10**6, time_budget=3 / 60)
    result = train(*stores, long, tmp_path/'budget', progress=False)
    assert time.monotonic() - began < 5 and not result['finished'] and 0 < result['step'] < 10**6
    more = train(*stores, long, tmp_path/'budget', progress=False)
    assert more['step'] > result['step'] and load_model(tmp_path/'budget'/'best.pt')


def test_frozen_parts_stay(stores, tmp_path):
    t = Trainer(*stores, config(input_trainable=False, rnn_trainable=False), SingleDevice(pick_torch('cpu')))
    before = {k: v.clone() for k, v in t.model.state_dict().items()}
    for i in range(3): t.train_step(*t.loader(i))
    changed = {k for k, v in t.model.state_dict().items() if not torch.equal(v, before[k])}
    assert changed == {'out.weight', 'out.bias', 'h0'}


def test_without_validation_trials_the_last_weights_count(stores, tmp_path):
    result = train(stores[0], None, config(num_training_batches=8), tmp_path, progress=False)
    assert result['val_per'] is None and result['best_step'] == 8
    model, _ = load_model(tmp_path)
    assert torch.equal(model.h0, load_file(tmp_path/'last.pt')['model_state_dict']['h0'])


def damaged(path, damage):
    data = path.read_bytes()
    n = len(data)//2
    if damage == 'gone': path.unlink()
    elif damage == 'a byte': path.write_bytes(data[:n] + bytes([data[n] ^ 4]) + data[n + 1:])
    else: path.write_bytes(dict(cut=data[:-1000], empty=b'', text=b'not a model', zeros=bytes(len(data)))[damage])


@pytest.mark.parametrize('damage', ['gone', 'cut', 'a byte', 'empty', 'text', 'zeros'])
@pytest.mark.parametrize('steps', [12, 20], ids=['finished', 'goes on'])
def test_a_lost_best_model_is_rebuilt(damage, steps, stores, tmp_path, capsys):
    "The same command ends with a readable model, which equals the lost one if the last model was the best."
    cfg = config(num_training_batches=12, batches_per_val_step=12)
    result = train(*stores, cfg, tmp_path, progress=False)
    best = tmp_path/'best.pt'
    before = load_file(best)
    damaged(best, damage)
    capsys.readouterr()
    again = train(*stores, config(num_training_batches=steps, batches_per_val_step=12), tmp_path, progress=False)
    said = capsys.readouterr().out
    assert 'best.pt is lost; it is rebuilt from last.pt: batch' in said
    assert said.count('rebuilt') == 1 and again['step'] == steps
    if steps == 12:
        assert again['val_per'] == result['val_per'] and again['best_step'] == 12
        assert torch.equal(load_file(best)['model_state_dict']['h0'], before['model_state_dict']['h0'])
    assert load_model(best) and load_file(tmp_path/'last.pt')['best']['step'] == again['best_step']
    train(*stores, config(num_training_batches=steps, batches_per_val_step=12), tmp_path, progress=False)
    assert 'rebuilt' not in capsys.readouterr().out


@pytest.mark.parametrize('steps', [12, 20], ids=['finished', 'goes on'])
@pytest.mark.parametrize('source', ['best.pt', 'last.pt'])
def test_another_model_in_place_of_the_best_one(source, steps, stores, tmp_path, capsys):
    "A complete model of another seed is never used as the best one; its metrics are not copied, and it is kept."
    cfg = config(num_training_batches=12, batches_per_val_step=6)
    train(*stores, cfg, tmp_path, progress=False)
    train(*stores, with_overrides(cfg, {'train.seed': 5}), tmp_path/'other', progress=False)
    foreign = (tmp_path/'other'/source).read_bytes()
    (tmp_path/'best.pt').write_bytes(foreign)
    capsys.readouterr()
    for again in 1, 0:
        result = train(*stores, with_overrides(cfg, {'num_training_batches': steps}), tmp_path, progress=False)
        assert capsys.readouterr().out.count('best.pt is another model, set aside as earlier-1-best.pt; it is') == again
    assert [p.read_bytes() for p in tmp_path.glob('earlier*')] == [foreign]
    best = load_file(tmp_path/'best.pt')
    assert [best[k] for k in ('step', 'val_per')] == [result[k] for k in ('best_step', 'val_per')]
    if steps == 12:
        last = load_file(tmp_path/'last.pt')['model_state_dict']
        assert all(torch.equal(w, last[k]) for k, w in best['model_state_dict'].items())


def test_models_without_the_state_of_their_training_are_kept(stores, tmp_path, capsys):
    "If `last.pt` is missing, the training starts again and says so; the models of the earlier training are kept."
    cfg = config(num_training_batches=10, batches_per_val_step=5, refit=.5)
    train(*stores, cfg, tmp_path, progress=False)
    before = [(tmp_path/name).read_bytes() for name in ('best.pt', 'refit.pt')]
    for i in 1, 2:
        (tmp_path/'last.pt').unlink()
        assert train(*stores, cfg, tmp_path, progress=False)['step'] == 10
        said = capsys.readouterr().out
        for name in 'best.pt', 'refit.pt': assert f'last.pt is gone; it is set aside as earlier-{i}-{name}' in said
    assert [(tmp_path/f'earlier-1-{name}').read_bytes() for name in ('best.pt', 'refit.pt')] == before
    assert load_model(tmp_path/'earlier-2-best.pt') and load_model(tmp_path/'best.pt')


@pytest.mark.parametrize('damage', ['gone', 'empty', 'text'])
def test_a_training_without_its_curves_continues(damage, stores, tmp_path, capsys):
    train(*stores, config(num_training_batches=3), tmp_path, progress=False)
    damaged(tmp_path/'history.csv', damage)
    for steps, rows in (3, []), (6, [6]):
        assert train(*stores, config(num_training_batches=steps), tmp_path, progress=False)['step'] == steps
        assert read_history(tmp_path/'history.csv').step.tolist() == rows
    printed = capsys.readouterr()
    assert printed.out.count('; the curves begin at batch 3') == 1 and printed.err.count('training on cpu (') == 3


def test_models_of_a_refit_that_are_lost(stores, tmp_path):
    "The refitted model has the last weights; the best one cannot be rebuilt from weights that were trained on val."
    cfg = config(num_training_batches=10, batches_per_val_step=5, refit=.5)
    train(*stores, cfg, tmp_path, progress=False)
    before = load_file(tmp_path/'refit.pt')
    damaged(tmp_path/'refit.pt', 'a byte')
    train(*stores, cfg, tmp_path, progress=False)
    after = load_file(tmp_path/'refit.pt')
    assert after['refit_from'] == before['refit_from'] == 5
    assert all(torch.equal(w, before['model_state_dict'][k]) for k, w in after['model_state_dict'].items())
    damaged(tmp_path/'best.pt', 'gone')
    with pytest.raises(TrainingError, match='best.pt is lost, and .*trained on val since batch 5 .*--force train'):
        train(*stores, cfg, tmp_path, progress=False)


def test_errors_about_a_damaged_state_name_a_remedy(stores, tmp_path):
    cfg = config(num_training_batches=3)
    train(*stores, cfg, tmp_path, progress=False)
    damaged(tmp_path/'last.pt', 'cut')
    with pytest.raises(CheckpointError, match='last.pt: damaged.*--force train.*init_checkpoint_path'):
        train(*stores, cfg, tmp_path, progress=False)


def test_starting_from_another_model_keeps_the_days_by_name(stores, tmp_path):
    train(*stores, config(num_training_batches=12), tmp_path/'first', progress=False)
    old, _ = load_model(tmp_path/'first')
    write_toy(tmp_path/'later', SESSIONS[1:] + ['t15.2023.09.01'])
    t = Trainer(
        *open_stores(tmp_path / 'later'),
        config(init_checkpoint_path=str(tmp_path / 'first' / 'best.pt')),
        SingleDevice(pick_torch('cpu')),
    )
    assert torch.equal(t.model.day_weights[:2], old.day_weights[1:]) and torch.equal(
        t.model.day_weights[2], torch.eye(FEATURES)
    )
    assert torch.equal(t.model.gru.weight_ih_l0, old.gru.weight_ih_l0)
    with pytest.raises(TrainingError, match='does not fit'):
        Trainer(
            *open_stores(tmp_path / 'later'),
            config(init_checkpoint_path=str(tmp_path / 'first' / 'best.pt'), n_units=8),
            SingleDevice(pick_torch('cpu')),
        )


def per_of(logits, store):
    "Phoneme error rate of the greedy paths through log-probabilities on disk."
    from rapidfuzz.distance import Levenshtein
    edits = 0
    for i in range(len(logits)):
        path = logits[i].argmax(-1)
        ids = [int(c) for j, c in enumerate(path) if c and (j == 0 or path[j - 1] != c)]
        edits += Levenshtein.distance(ids, store[i].class_ids.tolist())
    return edits / store.n_labels.sum()


def test_inference_agrees_with_validation(stores, tmp_path):
    "The PER of the log-probabilities on disk equals the PER that training reported for the same weights."
    result = train(*stores, config(num_training_batches=40, batches_per_val_step=40), tmp_path, progress=False)
    logits = infer(tmp_path/'best.pt', stores[1], tmp_path/'val.arrow', batch_size=5, progress=False)
    assert per_of(logits, stores[1]) == pytest.approx(result['val_per'])


def test_the_budget_uses_typical_steps_and_timed_validations(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, 'monotonic', lambda: now[0])
    def takes(seconds): now[0] += seconds
    b = Budget(minutes=10, val_batches=20)
    b.timed('step', takes, 100)                    # Compilation: if this were usual, a validation would need 2000 s
    assert not b.is_spent()
    for s in (1, 1, 1, 1, 30): b.timed('step', takes, s)  # A single step that compiles again is not usual either
    now[0] = 579 - 1e-6; assert not b.is_spent()   # 1 s for a step, 20 s for a validation
    now[0] = 579 + 1e-6; assert b.is_spent()
    b.timed('validate', takes, 3); now[0] = 596 - 1e-6; assert not b.is_spent()
    now[0] = 596 + 1e-6; assert b.is_spent()
    b.timed('save', takes, 2); now[0] = 594 - 1e-6; assert not b.is_spent()
    now[0] = 594 + 1e-6; assert b.is_spent()
    for _ in range(10): b.timed('step', takes, 4)  # Slower steps are noticed
    now[0] = 592; assert b.is_spent()
    assert not Budget(None, 1).is_spent()


def test_two_processes_take_the_same_steps_as_one(stores, tmp_path, monkeypatch):
    """With torchrun and DistributedDataParallel over gloo, the losses of the same global batches and the weights are
    equal, and one set of files is written. After the first training, forks of a process replace torchrun's processes,
    because they need not import anything."""
    from b2t_kaggle.pytorch import launch as launcher
    from b2t_kaggle.pytorch.launch import launch

    sure = dict(
        white_noise_std=0,
        constant_offset_std=0,
        random_cut=0,
        rnn_dropout=0,
        input_dropout=0,
        precision='float32',
        num_training_batches=20,
        batches_per_val_step=10,
    )
    one = train(*stores, config(**sure), tmp_path/'one', progress=False)
    two = launch(2, *stores, config(**sure), tmp_path/'two', progress=False)
    assert two['step'] == one['step'] == 20 and two['val_loss'] == pytest.approx(one['val_loss'], rel=1e-4)
    a, b = (read_history(tmp_path/d/'history.csv') for d in ('one', 'two'))
    assert b.loss.tolist() == pytest.approx(a.loss.tolist(), rel=1e-4) and b.grad_norm.tolist() == pytest.approx(
        a.grad_norm.tolist(), rel=1e-3
    )
    a, b = (load_file(tmp_path/d/'last.pt')['model_state_dict'] for d in ('one', 'two'))
    for k in a: assert torch.allclose(a[k], b[k], atol=1e-4), k
    monkeypatch.setattr(launcher, '_exit_status',
                        lambda command, env: (call_as_ranks(2, launcher.work, command[-1]), False))
    longer = dict(
        num_training_batches=30, lr_decay_steps=60, lr_decay_steps_day=60
    )  # In three parts, whose gradients are summed once
    one, two = (
        train(*stores, config(**sure | longer), tmp_path / 'one3', progress=False),
        launch(2, *stores, config(**sure | longer | dict(accumulate=3)), tmp_path / 'two3', progress=False),
    )
    assert two['step'] == 30 and two['val_loss'] == pytest.approx(one['val_loss'], rel=1e-3)
    # In float16, with a scale at which every gradient overflows, both processes keep the weights and agree on the scale
    last = tmp_path/'two'/'last.pt'
    saved = load_file(last)
    save_atomic(saved | dict(loss_scale=torch.amp.GradScaler('cpu', 2.**60).state_dict()), last)
    half = config(**sure | dict(num_training_batches=23, precision='float16'))
    again = launch(2, *stores, half, tmp_path/'two', progress=False)
    assert again['step'] == 23 and again['skipped'] == 3 and load_file(last)['loss_scale']['scale'] == 2.**57
    for k, v in load_file(last)['model_state_dict'].items(): assert torch.equal(v, saved['model_state_dict'][k]), k
    with pytest.raises(TrainingError, match='cannot be divided evenly among 2 devices'):
        launch(2, *stores, config(**{'data.batch_size': 5}), tmp_path/'five', progress=False)


def test_refusals_in_a_process_have_no_traceback(stores, tmp_path, capfd):
    from b2t_kaggle.pytorch.launch import launch
    with pytest.raises(TrainingError, match='train.replay = true is for XLA'):
        launch(1, *stores, config(**{'train.replay': True}), tmp_path, progress=False)
    assert 'Traceback' not in capfd.readouterr().err


def train_in_little_memory(folder, where, out):
    "Train in a separate process with 50 MB more memory than it has when it calls the function `where`."
    import resource

    from b2t_kaggle.pytorch import trainer

    def limited(f):
        def call(*args):
            used = int(Path('/proc/self/statm').read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + 50 * 2**20, resource.RLIM_INFINITY))
            return f(*args)
        return call

    holder, name = (trainer, 'build_model') if where == 'model' else (Trainer, where)
    setattr(holder, name, limited(getattr(holder, name)))
    large = config(n_units=1500, accumulate=2, batches_per_val_step=1, precision='float32')
    stores = [TrialStore.open(folder/f'{s}.arrow') for s in ('train', 'val')]
    try: train(*stores, large, out, progress=False)
    except TrainingError as e: (out/'printed').write_text(str(e))


@pytest.mark.parametrize(
    'where, words',
    [
        (
            'train_step',
            [
                'batch 0 does not fit into the memory of ',
                'Lower data.batch_size, or raise train.accumulate',
            ],
        ),
        ('model', ['the model and its optimiser do not fit', 'model.n_units']),
    ],
)
def test_errors_about_memory_say_what_to_change(stores, tmp_path, where, words):
    "A real memory limit is exceeded by the gradients of the first step, or by the model."
    p = call(train_in_little_memory, stores[0].path.parent, where, tmp_path)
    p.join(300)
    assert p.exitcode == 0
    printed = (tmp_path/'printed').read_text()
    assert "can't allocate memory" in printed, printed
    for word in words: assert word in printed, printed


def test_a_validation_that_does_not_fit_names_its_own_setting(stores):
    t = Trainer(*stores, config(), SingleDevice(pick_torch('cpu')))
    def fill(): raise RuntimeError('XLA: RESOURCE_EXHAUSTED: out of HBM')
    t.metrics = fill
    with pytest.raises(RuntimeError) as full: t.validate()
    with pytest.raises(TrainingError, match='Lower data.eval_batch_size, now 64'):
        raise_if_oom(full.value, t.backend.device.name, t.cfg, t)
    raise_if_oom(RuntimeError('something else'), t.backend.device.name, t.cfg, t)   # Other errors are ignored


def test_a_run_may_continue_in_smaller_parts(stores, tmp_path):
    train(*stores, config(num_training_batches=7), tmp_path, progress=False)
    assert train(*stores, config(num_training_batches=9, accumulate=2), tmp_path, progress=False)['step'] == 9
    with pytest.raises(
        TrainingError, match='data.batch_size = 6 cannot be divided into train.accumulate = 4 equal parts'
    ):
        train(*stores, config(accumulate=4), tmp_path / 'other', progress=False)


def test_trials_on_the_device_give_the_same_weights(stores):
    """Weights are bitwise equal with a batch in two parts and trials of two stores; batches equal those made on the
    host."""
    def trainer(on_device):
        changes = {'data.on_device': on_device, 'accumulate': 2, 'num_training_batches': 8, 'refit': .5}
        return Trainer(*stores, config(**changes), SingleDevice(pick_torch('cpu', 'float32')))
    host, device = trainer(False), trainer(True)
    assert device.loader.on_device and not host.loader.on_device and trainer(False).loader.on_device is None
    for a, b in zip(host.loader(5)[0], device.loader(5)[0]): assert torch.equal(a.x, b.x.float())
    for t in (host, device):
        assert len(list(t.steps(8))) == 8
        assert t.trials_on_device == (t is device)
    for k, v in host.model.state_dict().items(): assert torch.equal(device.model.state_dict()[k], v), k


def test_a_budget_that_ends_with_the_last_step_leaves_a_finished_run(stores, tmp_path):
    result = train(*stores, config(num_training_batches=1, time_budget=1e-6), tmp_path, progress=False)
    assert result['finished'] and result['stopped'] is None


_TINY_MAMBA = dict(head_dim=8, state_size=8, projection_units=16)


@pytest.mark.parametrize('name, size', [('best-t4', dict(n_heads=2, head_dim=8)), ('best-tpu', _TINY_MAMBA),
                                        ('mamba-t4', _TINY_MAMBA)])
def test_a_recipe_in_many_sessions_ends_with_the_weights_of_one(name, size, stores, tmp_path):
    "A tiny recipe with its masks, average, refit and parts of a batch. Each session has time only for its first step."
    same = ('neural_dim', 'feature_subset', 'n_classes', 'days_per_batch', 'lr_warmup_steps', 'lr_warmup_steps_day')
    changes = {key: SMALL[key] for key in same} | {f'model.{key}': value for key, value in size.items()} | {
        'n_units': 16, 'n_layers': 1, 'data.batch_size': 8, 'num_training_batches': 10, 'batches_per_val_step': 2,
        'augment.channel_mask_by': 'feature', 'accelerator': 'cpu'}
    cfg = with_overrides(preset(name), changes)
    assert train(*stores, cfg, tmp_path/'one', progress=False)['finished']
    short = with_overrides(cfg, {'time_budget': 1e-6})
    n_sessions = 1
    while not train(*stores, short, tmp_path/'many', progress=False)['finished']: n_sessions += 1
    assert n_sessions == 10
    names = ['best.pt', 'last.pt', *['refit.pt'][:bool(cfg.train.refit)]]
    for file in names:
        a, b = (load_file(tmp_path/d/file)['model_state_dict'] for d in ('one', 'many'))
        assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a), file
    states = [load_file(tmp_path/'one'/file)['model_state_dict'] for file in names]
    assert not cfg.train.refit or any(not torch.equal(states[0][k], states[2][k]) for k in states[0])


class Rank(AnyTrainer):
    "One of two processes in the view of `check_finite`; the report of the other one is given."
    def __init__(self, store, other): self.store, self.other = store, other
    def gather(self, value): return [value, self.other]


def test_two_machines_take_the_same_steps_as_one(stores, tmp_path, monkeypatch):
    """Two machines with one process each, as torchrun starts them, over loopback; this process is the first machine's.
    They continue a training of one process."""
    import json
    import socket
    from datetime import timedelta

    import torch.distributed as dist

    from b2t_kaggle.pytorch import launch as launcher

    sure = dict(white_noise_std=0, constant_offset_std=0, random_cut=0, rnn_dropout=0, input_dropout=0,
                precision='float32', batches_per_val_step=6, lr_decay_steps=12, lr_decay_steps_day=12)
    one = train(*stores, config(**sure, num_training_batches=12), tmp_path/'one', progress=False)
    train(*stores, config(**sure, num_training_batches=4), tmp_path/'two', progress=False)
    cfg = config(**sure, num_training_batches=12)
    (tmp_path/'machines').mkdir()
    job = tmp_path/'machines'/'job.json'
    job.write_text(json.dumps(dict(stores=[str(s.path) for s in stores], config=cfg.dump(), out=str(tmp_path/'two'),
                                   progress=False)))
    reserved = socket.socket() # Reserved until this test ends, so that no other process is given the port
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(('127.0.0.1', 0))
    port = reserved.getsockname()[1]
    machine = dict(MASTER_ADDR='127.0.0.1', MASTER_PORT=str(port), WORLD_SIZE='2', LOCAL_RANK='0', RANK='0')
    for k, v in machine.items(): monkeypatch.setenv(k, v)
    other = call_with(machine | dict(RANK='1'), launcher.work, str(job))
    try:
        dist.init_process_group('gloo', timeout=timedelta(seconds=300))
        two = train(*stores, cfg, tmp_path/'two', progress=False)
        other.join(LIMIT)
        assert other.exitcode == 0 and not (job.parent/'error').exists()
    finally:
        other.kill()
        reserved.close()
        if dist.is_initialized(): dist.destroy_process_group()
    assert two['step'] == one['step'] == 12
    a, b = (read_history(tmp_path/d/'history.csv').set_index('step') for d in ('one', 'two'))
    assert b.val_loss[12] == pytest.approx(a.val_loss[12], rel=1e-4)
    a, b = (load_file(tmp_path/d/'last.pt')['model_state_dict'] for d in ('one', 'two'))
    for k in a: assert torch.allclose(a[k], b[k], atol=1e-4), k


def change(logits, frames): return dict(change=logits.float().softmax(-1).diff(dim=1).square().sum((1, 2))/frames)
def louder(features): return 1.2*features


@pytest.mark.parametrize('precision', ['float32', 'bfloat16', 'float16'])
def test_a_custom_term_and_augmentation(stores, tmp_path, precision):
    """The term and the augmentation have an effect, the term has curves, also with two views, and a run continues only
    with the same functions."""
    few = dict(num_training_batches=4, batches_per_val_step=2, batches_per_save=2, precision=precision, cr_ctc=.2,
               processes=1)
    runs = dict(plain={}, term=dict(loss=change), both=dict(loss=change, augment=louder))
    for name, own in runs.items(): train_any(*stores, config(**few), tmp_path/name, progress=False, **own)
    plain, term, both = (read_history(tmp_path/name/'history.csv').iloc[-1] for name in runs)
    assert len({plain.loss, term.loss, both.loss}) == 3
    assert 0 < term.change < term.loss and term.val_loss > term.val_change > 0
    if precision != 'float32': return
    assert train_any(*stores, config(**few), tmp_path/'term', progress=False, loss=change)['finished']
    with pytest.raises(TrainingError, match='this run cannot continue, because plugin was .{12}, is now'):
        train_any(*stores, config(**few), tmp_path/'term', progress=False, loss=lambda logits: change(logits, 1))


def test_only_the_process_with_the_bad_trial_reports_it(stores):
    step = lambda norm: StepResult(3, np.array([0, 1]), {}, lambda: dict(loss=np.ones(2), grad_norm=norm))
    with pytest.raises(TrainingError, match='^the bad one$'):
        Rank(stores[0], ('the bad one', True)).check_finite(step(math.nan))
    Rank(stores[0], None).check_finite(step(1.))


def test_results_are_read_every_tenth_step_and_a_bad_one_still_stops_the_run(stores, tmp_path, monkeypatch):
    """As on an accelerator, the history has the same rows, and a loss that is not a number is detected a few steps
    later, before anything is saved."""
    whole = train(*stores, config(num_training_batches=25, batches_per_save=100), tmp_path/'each', progress=False)
    class Accelerator(SingleDevice):
        def __init__(self, *args): super().__init__(*args); self.sync_every = 10
    monkeypatch.setattr('b2t_kaggle.pytorch.trainer.start', lambda device: Accelerator(device))
    tenth = train(*stores, config(num_training_batches=25, batches_per_save=100), tmp_path/'tenth', progress=False)
    a, b = (read_history(tmp_path/d/'history.csv').drop(columns='seconds') for d in ('each', 'tenth'))
    assert a.equals(b) and whole['val_loss'] == tenth['val_loss']
    add_gradients = Trainer.add_gradients
    def spoilt(t, p, *args):
        if t.step == 13: p.x[1, 3, 0] = math.inf
        return add_gradients(t, p, *args)
    monkeypatch.setattr(Trainer, 'add_gradients', spoilt)
    with pytest.raises(TrainingError, match='batch 13: the loss is'):
        train(*stores, config(batches_per_save=1000, batches_per_val_step=10), tmp_path / 'bad', progress=False)
    assert load_file(tmp_path/'bad'/'last.pt')['step'] == 10


def train_without_end(folder, out):
    """Train in two processes, in a separate process group like a command of a terminal, and write their output to a
    file."""
    from b2t_kaggle.pytorch.launch import launch
    os.setpgid(0, 0)
    with (out/'printed').open('w') as printed:
        for stream in (1, 2): os.dup2(printed.fileno(), stream)
    try: launch(2, *open_stores(folder), config(num_training_batches=10**6), out, progress=False)
    except KeyboardInterrupt as e: print(e, flush=True)


def test_two_processes_are_interrupted_without_a_traceback(stores, tmp_path):
    """The processes save, and the process that started them reports after which batch; torchrun and the workers print
    nothing."""
    p = call(train_without_end, stores[0].path.parent, tmp_path)
    wait_for_checkpoint(p, tmp_path/'last.pt')
    os.killpg(p.pid, signal.SIGINT)
    p.join(LIMIT)
    printed = (tmp_path/'printed').read_text()
    assert p.exitcode == 0 and 'Traceback' not in printed, printed
    assert f'{load_file(tmp_path/"last.pt")["step"]:,} of 1,000,000 batches are saved' in printed


def test_processes_end_with_their_parent(stores, tmp_path):
    "The parent and torchrun are killed, so only the system can end the workers."
    import psutil

    parent = call(train_without_end, stores[0].path.parent, tmp_path)
    wait_for_checkpoint(parent, tmp_path/'last.pt')
    family = psutil.Process(parent.pid).children(recursive=True)
    torchrun = next(p for p in family if any('torch.distributed.run' in a for a in p.cmdline()))
    workers = [p for p in torchrun.children() if any(a.endswith('worker.py') for a in p.cmdline())]
    assert len(workers) == 2
    torchrun.kill(); parent.kill(); parent.join()
    _, alive = psutil.wait_procs(workers, timeout=LIMIT)
    assert not alive
