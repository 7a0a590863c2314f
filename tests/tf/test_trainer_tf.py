"""The TensorFlow trainer: PyTorch's steps, the same on eight devices as on one, and exact resumption after SIGKILL."""
import json
import sys
from pathlib import Path

import numpy as np
import pytest

tf = pytest.importorskip('tensorflow', reason='needs TensorFlow: pip install b2t_kaggle[tf]')
torch = pytest.importorskip('torch')
sys.path.insert(0, str(Path(__file__).parents[1]))
import copies
from killed import ask_before_each_step, kill_after_a_checkpoint
from test_trainer import FEATURES, SESSIONS, config, damaged, open_stores, per_of, write_toy
from train_toy import start_copies, steps, write_steps

from b2t_kaggle.devices.tensorflow import configure_mixed_precision
from b2t_kaggle.devices.torch import pick_torch
from b2t_kaggle.pytorch import trainer as pt
from b2t_kaggle.pytorch.parallel import SingleDevice
from b2t_kaggle.tensorflow.checkpoint import load_last, load_model, read_metrics, save_best
from b2t_kaggle.tensorflow.feed import start
from b2t_kaggle.tensorflow.inference import infer
from b2t_kaggle.tensorflow.layers import keras
from b2t_kaggle.tensorflow.trainer import Trainer, train
from b2t_kaggle.training.checkpoint_paths import BEST, LAST
from b2t_kaggle.training.checkpoints import CheckpointError
from b2t_kaggle.training.history import read_history
from b2t_kaggle.training.loop import raise_if_oom
from b2t_kaggle.training.recipe import TrainingError

NOTHING_RANDOM = {'white_noise_std': 0, 'constant_offset_std': 0, 'random_cut': 0, 'rnn_dropout': 0, 'input_dropout': 0,
                  'precision': 'float32'}


# One layer compiles faster than two, with which steps are compared with those of PyTorch and of several devices
def cpu_config(**kw): return config(**{'accelerator': 'cpu', 'n_buckets': 1, 'n_layers': 1} | kw)


def new_trainer(stores, device_precision='auto', **kw):
    return Trainer(*stores, cpu_config(**kw), start('cpu', device_precision))


@pytest.fixture(scope='module')
def stores(tmp_path_factory):
    folder = tmp_path_factory.mktemp('toy')
    write_toy(folder)
    return open_stores(folder)


TRIPLE = {'model.name': 'triple_gru', 'noise_units': 8, 'n_layers': 2}


@pytest.mark.parametrize('model', [{'n_buckets': 2, 'n_layers': 2}, TRIPLE], ids=['gru', 'triple_gru'])
def test_the_steps_equal_those_of_pytorchs_trainer(stores, model):
    """Losses, norms, validation and all weights are equal after steps from the same weights, with two buckets,
    clipping, a large epsilon, and weight decay everywhere."""
    recipe = {'weight_decay': .02, 'weight_decay_day': .01, 'grad_norm_clip_value': 7.5, 'epsilon': .1,
              'lr_max_day': .02, 'lr_warmup_steps': 2}
    cfg = cpu_config(**NOTHING_RANDOM | model | recipe)
    theirs = pt.Trainer(*stores, cfg, SingleDevice(pick_torch('cpu', 'float32')))
    ours = Trainer(*stores, cfg, start('cpu', 'float32'))
    begin = {k: v.numpy().copy() for k, v in theirs.model.state_dict().items()}
    ours.model.from_state(begin)
    results = [theirs.train_step(*theirs.loader(i)) for i in range(6)]
    found = steps(ours, 6)
    np.testing.assert_allclose(found['losses'], [r.losses for r in results], rtol=1e-4)
    np.testing.assert_allclose(found['norms'], [r.grad_norm for r in results], rtol=1e-3)
    assert min(found['norms']) < 7.5 < max(found['norms']), 'clipping was never or always active'
    validation = theirs.validate()
    assert found['val']['val_loss'] == pytest.approx(validation['val_loss'], rel=1e-4)
    assert found['val']['sessions'] == validation['sessions']
    final = ours.model.to_state()
    for k, v in theirs.model.state_dict().items():
        tolerance = min(1e-4, .05 * abs(v.numpy() - begin[k]).max())
        assert abs(final[k] - v.numpy()).max() < tolerance, f'{k} is not where PyTorch moved it'
    assert len(set(found['lengths'])) == found['traces'] == cfg.data.n_buckets


def test_a_compiler_sees_one_program_for_all_random_numbers(stores):
    "Seeds, cut, days and learning rates are tensors, so XLA also compiles only one program per length."
    t = new_trainer(stores)
    programs = set()
    for t.step in range(4):
        numbers = tf.nest.map_structure(tf.constant, t.numbers())
        share = {k: tf.constant(v) for k, v in t.loader.batch(t.step).items()}
        programs.add(t.compiled_gradients.experimental_get_compiler_ir(share, numbers)(stage='hlo'))
    assert len(programs) == 1


def test_eight_devices_take_the_same_steps_as_one(stores, tmp_path):
    "Noise, cuts and dropout are included; XLA compiles only the program for one device."
    sizes = {'data.batch_size': 16, 'n_layers': 2}
    start_copies()
    p = copies.call(write_steps, tmp_path/'eight.json', 8, stores[0].path.parent, cpu_config(**sizes))
    one = steps(new_trainer(stores, **sizes), 6)
    p.join(500)
    assert p.exitcode == 0
    eight = json.loads((tmp_path/'eight.json').read_text())
    assert (one['n'], eight['n'], eight['traces']) == (1, 8, 1)
    for k in ('losses', 'norms'): np.testing.assert_allclose(eight[k], one[k], rtol=1e-4, err_msg=k)
    assert eight['val']['val_loss'] == pytest.approx(one['val']['val_loss'], rel=1e-4)


def train_in_a_copy(allowed, folder, overrides, out):
    ask_before_each_step(Trainer, allowed)
    train(*open_stores(folder), cpu_config(**overrides), out, progress=False)


def killed_run(stores, out, overrides):
    "Kill a run some steps after its first checkpoint. Returns the saved step."
    start_copies()
    last = out/'last.weights.h5'
    arguments = stores[0].path.parent, overrides, out
    kill_after_a_checkpoint(train_in_a_copy, arguments, last, steps=30, delay=.1)
    return load_last(last)['run']['step']


def test_a_run_that_is_killed_ends_with_the_same_weights(stores, tmp_path, capsys):
    kw = {'num_training_batches': 40, 'batches_per_val_step': 20, 'batches_per_save': 1}
    at = killed_run(stores, tmp_path/'killed', kw)
    assert 0 < at < 40, f'killed at checkpoint {at}: nothing was interrupted'
    whole = train(*stores, cpu_config(**kw), tmp_path/'whole', progress=False)
    capsys.readouterr()
    killed = train(*stores, cpu_config(**kw), tmp_path/'killed', progress=False)
    assert f'continuing after {at} batches\n' in capsys.readouterr().out
    assert {k: v for k, v in killed.items() if k != 'seconds'} == {k: v for k, v in whole.items() if k != 'seconds'}
    for name in ('last.weights.h5', 'best.weights.h5'):
        a, b = (load_model(tmp_path/d/name)[0].named_variables() for d in ('whole', 'killed'))
        for k, v in a.items(): np.testing.assert_array_equal(v.numpy(), b[k].numpy(), err_msg=f'{name} {k}')
    a, b = (read_history(tmp_path/d/'history.csv') for d in ('whole', 'killed'))
    assert a.drop(columns='seconds').equals(b.drop(columns='seconds'))
    inference_agrees_with_validation(stores, tmp_path/'whole', whole)


def inference_agrees_with_validation(stores, folder, result):
    "The PER of the log-probabilities on disk equals the PER that training reported for the same weights."
    logits = infer(folder, stores[1], folder/'val.arrow', accelerator='cpu', batch_size=5, progress=False)
    assert per_of(logits, stores[1]) == pytest.approx(result['val_per'])


def losses_in(stores, precision):
    "Losses of twelve steps with micro-batches, and the trainer after them."
    kw = {'accumulate': 2, 'precision': precision, 'lr_warmup_steps': 1, 'lr_warmup_steps_day': 1}
    t = new_trainer(stores, precision, **kw)
    if t.scaler: t.scaler.load_state_dict(dict(scale=2.**10, n_good=0))  # the initial scale would skip some steps
    return t, np.array([r.losses for r in map(t.train_step, t.loader(0, 12))])


@pytest.fixture(scope='module')
def exact_losses(stores): return losses_in(stores, 'float32')[1]


@pytest.mark.parametrize('precision', ['bfloat16', 'float16'])
def test_a_run_in_16_bits(stores, tmp_path, precision, exact_losses):
    """Steps are nearly those of float32, also with micro-batches, and log-probabilities are close to those computed in
    float32 from the same weights."""
    def log_probs(precision):
        path = tmp_path/f'{precision}.arrow'
        return np.concatenate([*infer(tmp_path, stores[1], path, 'cpu', precision, progress=False)])
    try:
        t, losses = losses_in(stores, precision)
        assert keras.config.dtype_policy().name == f'mixed_{precision}' and t.model.compute_dtype == precision
        assert {v.dtype for v in t.model.named_variables().values()} == {'float32'}
        validation = t.validate()
        t.best.update(validation, t.step)
        t.save_best(tmp_path/BEST[t.framework])
        if t.scaler: overflows_and_restores(t, tmp_path/'last.weights.h5')
        low = log_probs(precision)
        high = log_probs('float32')
    finally: configure_mixed_precision('float32')
    assert losses[-3:].mean() < .7 * losses[:3].mean()
    for found, exact in ((losses, exact_losses), (low, high)):
        assert found.dtype == exact.dtype and 0 < abs(found - exact).max() < .05 * abs(exact).max()
    assert abs(np.log(np.exp(low.astype(float)).sum(-1))).max() < 1e-5


def everything(t):
    "Weights, moments and numbers of steps."
    state = {f'{name}.{k}': v for name, s in t.optimizer.state_dict().items() for k, v in s.items()}
    return state | {k: v.numpy() for k, v in t.model.named_variables().items()}


def overflows_and_restores(t, path):
    "An overflow changes only the scale; a state saved shortly before the scale doubles continues exactly."
    def take(n):
        first = t.step
        results = [t.train_step(b) for b in t.loader(first, first + n)]
        return [r.skipped for r in results], everything(t)
    assert t.scaler.state_dict() == dict(scale=2.**10, n_good=12)
    before = everything(t)
    t.scaler.load_state_dict(dict(scale=2.**60, n_good=7))
    skipped, after = take(1)
    assert skipped == [True] and t.scaler.state_dict() == dict(scale=2.**59, n_good=0)
    for k, v in after.items(): np.testing.assert_array_equal(v, before[k], err_msg=k)
    t.scaler.load_state_dict(dict(scale=2.**9, n_good=1999))
    t.n_skipped = 1
    t.save_last(path)
    skipped, whole = take(2)
    assert skipped == [False, False] and t.scaler.state_dict() == dict(scale=2.**10, n_good=1)
    t.scaler.load_state_dict(dict(scale=4., n_good=0))
    t.n_skipped = 0
    t._load(path)
    assert t.n_skipped == 1 and t.scaler.state_dict() == dict(scale=2.**9, n_good=1999)
    _, again = take(2)
    for k, v in again.items(): np.testing.assert_array_equal(v, whole[k], err_msg=k)
    assert t.scaler.state_dict() == dict(scale=2.**10, n_good=1)


def test_without_tensorboard_no_step_is_taken(stores, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, 'tensorboard', None)
    with pytest.raises(TrainingError, match='cannot import tensorboard; pip install tensorboard, or set train'):
        train(*stores, cpu_config(), tmp_path, progress=False)
    assert not list(tmp_path.iterdir())


def test_a_time_budget_and_early_stopping(stores, tmp_path):
    "With a learning rate of zero no validation improves after the first; a run that the budget stopped continues."
    kw = dict(lr_max=1e-12, lr_max_day=1e-12, lr_min=0, lr_min_day=0, early_stopping=True, early_stopping_val_steps=2,
              batches_per_val_step=3)
    hurried = train(*stores, cpu_config(**kw, time_budget=1e-6), tmp_path, progress=False)
    assert hurried['stopped'] == 'time budget' and not hurried['finished'] and hurried['step'] == 1
    assert load_model(tmp_path)
    result = train(*stores, cpu_config(**kw), tmp_path, progress=False)
    assert result['stopped'] == 'early stopping' and result['finished']
    assert result['best_step'] == 1 and result['step'] == 6
    assert train(*stores, cpu_config(**kw), tmp_path, progress=False)['step'] == 6


def test_a_lost_best_model_is_rebuilt(stores, tmp_path, capsys):
    cfg = cpu_config(num_training_batches=4, batches_per_val_step=4)
    result = train(*stores, cfg, tmp_path, progress=False)
    best = tmp_path/BEST['tensorflow']
    before = load_model(best)[0].named_variables()
    for name in 'gone', 'a byte':
        damaged(best, name)
        again = train(*stores, cfg, tmp_path, progress=False)
        assert 'it is rebuilt from last.weights.h5: batch 4' in capsys.readouterr().out
        assert again['val_per'] == result['val_per']
        after = load_model(best)[0].named_variables()
        assert all(np.array_equal(v.numpy(), before[k].numpy()) for k, v in after.items())


def test_another_model_in_place_of_the_best_one(stores, tmp_path, capsys):
    "Another step's weights with the best model's metrics, and a complete best model without its state."
    cfg = cpu_config(num_training_batches=4, batches_per_val_step=2, lr_max=1e-12, lr_max_day=1e-12, lr_min=0,
                     lr_min_day=0) # Nothing improves after the first validation
    best, last = (tmp_path/name['tensorflow'] for name in (BEST, LAST))
    assert train(*stores, cfg, tmp_path, progress=False)['best_step'] == 2
    foreign = last.read_bytes()
    best.write_bytes(foreign)
    assert train(*stores, cfg, tmp_path, progress=False)['best_step'] == 4
    assert f'{best} is another model, set aside as earlier-1-{best.name}; it is rebuilt' in capsys.readouterr().out
    assert (tmp_path/f'earlier-1-{best.name}').read_bytes() == foreign and read_metrics(best)['step'] == 4
    whole = best.read_bytes()
    last.unlink()
    train(*stores, cfg, tmp_path, progress=False)
    assert f'{last.name} is gone; it is set aside as earlier-2-{best.name}' in capsys.readouterr().out
    assert (tmp_path/f'earlier-2-{best.name}').read_bytes() == whole


def test_the_optimiser_does_not_have_frozen_parts(stores):
    t = new_trainer(stores, input_trainable=False, rnn_trainable=False)
    assert set(t.optimizer.variables) == {'out.weight', 'out.bias', 'h0'}


def test_starting_from_another_model_keeps_the_days_by_name(stores, tmp_path):
    first = new_trainer(stores, **{'train.seed': 5})
    for v in first.model.named_variables().values(): v.assign(np.random.default_rng(0).standard_normal(v.shape))
    save_best(tmp_path/'best.weights.h5', first.model, first.cfg, {})
    write_toy(tmp_path/'later', SESSIONS[1:] + ['t15.2023.09.01'], dict(train=2, val=1))
    later = open_stores(tmp_path/'later')
    init = {'init_checkpoint_path': str(tmp_path/'best.weights.h5')}
    new = new_trainer(later, **init).model.named_variables()
    old = first.model.named_variables()
    np.testing.assert_array_equal(new['day_weights'][:2], old['day_weights'][1:])
    np.testing.assert_array_equal(new['day_weights'][2], np.eye(FEATURES))
    np.testing.assert_array_equal(new['gru.kernel_l0'], old['gru.kernel_l0'])
    with pytest.raises(TrainingError, match='does not fit the model of this run: .*gru.kernel_l0 has shape'):
        new_trainer(later, **init, n_units=8)
    pt.Trainer(*stores, cpu_config(), SingleDevice(pick_torch('cpu'))).save_best(tmp_path/'best.pt')
    with pytest.raises(CheckpointError, match='b2t convert'):
        new_trainer(later, init_checkpoint_path=str(tmp_path/'best.pt'))


def test_a_full_memory_is_explained(stores):
    "The message is made from TensorFlow's own error."
    t = new_trainer(stores, accumulate=2)
    device = t.backend.device.name
    t.metrics = lambda: tf.ones([2**44])
    with pytest.raises(tf.errors.ResourceExhaustedError) as full: t.metrics()
    advice = r'batch 0 does not fit .* Lower data.batch_size, or raise train.accumulate'
    with pytest.raises(TrainingError, match=advice): raise_if_oom(full.value, device, t.cfg, t)
    with pytest.raises(tf.errors.ResourceExhaustedError) as full: t.validate()
    with pytest.raises(TrainingError, match='Lower data.eval_batch_size, now 64'):
        raise_if_oom(full.value, device, t.cfg, t)
    raise_if_oom(RuntimeError('something else'), device, t.cfg, t)   # does not raise
