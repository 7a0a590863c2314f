"""Training on XLA: equal on one device and on eight, compiled once per length, nothing on the host, and a run that
moves between accelerators.

Computations on XLA are in separate processes (train_toy.py), because torch_xla starts only once and then fixes the
number of devices.
"""

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip('torch_xla', reason='needs torch_xla: pip install b2t_kaggle[xla]')
sys.path.insert(0, str(Path(__file__).parents[1]))
from test_trainer import config, open_stores, write_toy
from train_toy import run_and_read, write_result

from b2t_kaggle.data.store import TrialStore
from b2t_kaggle.devices.torch import pick_torch
from b2t_kaggle.pytorch.inference import infer
from b2t_kaggle.pytorch.parallel import SingleDevice
from b2t_kaggle.pytorch.trainer import Trainer, train

NOTHING_RANDOM = {
    'white_noise_std': 0,
    'constant_offset_std': 0,
    'random_cut': 0,
    'rnn_dropout': 0,
    'input_dropout': 0,
    'precision': 'float32',
}


@pytest.fixture(scope='module')
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp('toy')
    write_toy(folder)
    open_stores(folder)
    return folder


def xla(task, data, out, overrides, n=1):
    "Result of train_toy.py on `n` XLA devices of the CPU backend; a DeprecationWarning is an error."
    out.mkdir(exist_ok=True)
    printed = run_and_read(n, out, write_result, task, data, out, overrides)
    return json.loads((out/'result.json').read_text()) | {'printed': printed}


SIZES = {'data.batch_size': 8, 'n_buckets': 2}
BFLOAT16 = {'precision': 'bfloat16', 'n_buckets': 1}
TRIPLE = {'model.name': 'triple_gru', 'noise_units': 16}
SCALED_ADAM = {'optimizer': 'scaled_adam', 'lr_scheduler_type': 'eden', 'lr_max': .03, 'lr_max_day': .03, 'cr_ctc': .2,
               'time_masks': 2, 'ctc_reduction': 'label'}
REPLAYED = {'replay': True, 'data.on_device': True}
# Trainings by number of devices. Those with the same number share a process, because starting one takes as long as
# compiling two programs
RUNS = {
    1: {'gru': {}, 'on device': {'data.on_device': True}, 'replayed': REPLAYED, 'scaled_adam': SCALED_ADAM,
        'replayed scaled_adam': SCALED_ADAM | {'replay': True}, 'bfloat16 gru': BFLOAT16,
        'bfloat16 triple_gru': BFLOAT16 | TRIPLE},
    2: {'gru': NOTHING_RANDOM | {'weight_average': 'ema'}, 'parts': NOTHING_RANDOM | {'accumulate': 2},
        'parts on device': NOTHING_RANDOM | {'accumulate': 2, 'data.on_device': True},
        'scaled_adam': SCALED_ADAM},
    8: {'gru': {}, 'on device': {'data.on_device': True}, 'replayed': REPLAYED, 'refused': {'data.batch_size': 12}},
}


@pytest.fixture(scope='module')
def steps_on(data, tmp_path_factory):
    "A function that returns the steps of a run on `n` devices."
    found = {}
    def get(n, name):
        if n not in found:
            runs = {name: SIZES | changes for name, changes in RUNS[n].items()}
            found[n] = xla('steps', data, tmp_path_factory.mktemp(f'on_{n}'), runs, n)
        return found[n][name]
    return get


@pytest.fixture
def one(steps_on): return steps_on(1, 'gru')


def compiled_once(result):
    "Whether a step compiles only lengths that it sees for the first time."
    seen = set()
    expected = [0]
    for buckets in result['buckets']:
        seen |= set(buckets)
        expected.append(len(seen))
    return len(seen) > 1 and result['compiled'] == expected


def test_a_step_is_compiled_once_per_length_and_nothing_falls_back_to_the_host(one):
    assert compiled_once(one) and one['val_compiled'] == one['val_buckets'], one
    assert one['fallbacks'] == []
    assert one['losses'][-1] < 0.7 * one['losses'][0]


def test_eight_devices_take_the_same_steps_as_one(one, steps_on):
    "Noise, cuts and dropout are included. The test below compares two devices."
    eight = steps_on(8, 'gru')
    assert eight['n'] == 8 and one['n'] == 1
    for k in ('losses', 'norms'): assert eight[k] == pytest.approx(one[k], rel=1e-4), k
    assert eight['val'][0] == pytest.approx(one['val'][0], rel=1e-4)
    assert compiled_once(eight) and eight['val_compiled'] == eight['val_buckets'] and eight['fallbacks'] == []


@pytest.mark.parametrize('n, name', [(1, 'gru'), (8, 'gru'), (2, 'parts')])
def test_trials_on_the_device_change_nothing(n, name, steps_on):
    """Batches are gathered on the device, in the program of the step, or before it if a batch has parts; several
    devices each gather a share."""
    host, device = steps_on(n, name), steps_on(n, 'on device' if name == 'gru' else 'parts on device')
    for k in ('losses', 'norms', 'val'): assert device[k] == host[k], k
    assert device['fallbacks'] == [] and (name == 'parts' or compiled_once(device))


@pytest.mark.parametrize('n, name, replayed', [(1, 'gru', 'replayed'), (8, 'gru', 'replayed'),
                                               (1, 'scaled_adam', 'replayed scaled_adam')])
def test_a_replayed_step_equals_the_recorded_one(n, name, replayed, steps_on):
    "Losses, norms and a validation of the final weights are bitwise equal."
    one, other = steps_on(n, name), steps_on(n, replayed)
    for k in ('losses', 'norms', 'val'): assert other[k] == one[k], k
    assert other['fallbacks'] == []


def test_a_replayed_run_continues_from_its_checkpoint(data, tmp_path):
    "Programs are recorded again; an uninterrupted run that records every step ends with the same weights."
    lengths = {'batches_per_val_step': 10, 'batches_per_save': 5, 'num_training_batches': 15, 'weight_average': 'ema'}
    found = xla('resume', data, tmp_path/'runs', SIZES | lengths)
    assert found['steps'] == [10, 15, 15] and found['different'] == []


def test_two_devices_and_accumulated_gradients_take_the_same_steps_as_the_processor(steps_on, data):
    """The CPU's own implementation, two devices, and two devices with a batch in two parts. An average of the weights
    changes no step, and is part of the step's program."""
    two = steps_on(2, 'gru')
    parts = steps_on(2, 'parts')
    cfg = config(**{'data.batch_size': 8} | NOTHING_RANDOM)
    cpu = Trainer(*open_stores(data), cfg, SingleDevice(pick_torch('cpu', 'float32')))
    taken = [cpu.train_step(*cpu.loader(i)) for i in range(9)]
    losses = [float(t.losses.mean()) for t in taken]
    norms = [t.grad_norm for t in taken]
    for result in (two, parts):
        assert result['losses'] == pytest.approx(losses, rel=1e-4) and result['norms'] == pytest.approx(norms, rel=1e-3)
    assert two['n'] == 2 and compiled_once(two) and two['val_compiled'] == two['val_buckets']
    seen = {b for step in parts['buckets'] for b in step}
    assert parts['compiled'][-1] == len(seen) + 2, (
        'a program per length, one for the update, one that sets the gradients to zero'
    )


def test_a_step_of_scaled_adam_is_one_program_per_length_on_one_device_and_the_same_on_two(steps_on):
    "CR-CTC is on, with noise, masks and dropout in both views."
    one, two = steps_on(1, 'scaled_adam'), steps_on(2, 'scaled_adam')
    assert compiled_once(one) and one['fallbacks'] == [], one
    assert two['n'] == 2 and compiled_once(two) and two['fallbacks'] == []
    for k in ('losses', 'norms'): assert two[k] == pytest.approx(one[k], rel=1e-3), k


@pytest.mark.parametrize('model', ['gru', 'triple_gru'])
def test_bfloat16_trains(model, steps_on):
    result = steps_on(1, f'bfloat16 {model}')
    assert result['losses'][-1] < 0.8 * result['losses'][0] and result['fallbacks'] == []
    assert result['compiled'] == [0] + [1] * 9


def test_a_run_moves_between_accelerators(data, tmp_path, capsys):
    "A run moves from the CPU to XLA and back; a continued run reports the change, and inference agrees."
    lengths = {'lr_decay_steps': 30, 'lr_decay_steps_day': 30, 'batches_per_val_step': 10, 'batches_per_save': 10}
    def run(n): return SIZES | NOTHING_RANDOM | lengths | {'num_training_batches': n, 'n_buckets': 1}

    def cpu(out, overrides):
        "Result, log-probabilities of a trial, and printed output."
        stores = [TrialStore.open(data/f'{s}.arrow') for s in ('train', 'val')]
        result = train(*stores, config(**{'accelerator': 'cpu'} | overrides), out, progress=False)
        logits = infer(out/'best.pt', stores[1], out/'v.arrow', 'cpu', 'float32', progress=False)
        return result, logits[0][:3].tolist(), capsys.readouterr().out
    whole, log_probs, _ = cpu(tmp_path/'whole', run(30))
    cpu(tmp_path/'moved', run(10))
    there = xla('train', data, tmp_path/'moved', run(20))
    assert (
        'continuing after 10 batches, which were computed on cpu' in there['printed']
        and 'first step after' in there['printed']
    )
    assert there['compiled'] == 2, 'a continued run compiles its steps and its validations, each once'
    back, moved, printed = cpu(tmp_path/'moved', run(30))
    assert 'continuing after 20 batches, which were computed on xla' in printed
    assert back['val_loss'] == pytest.approx(whole['val_loss'], rel=1e-3) and back['step'] == 30
    assert sum(moved, []) == pytest.approx(sum(log_probs, []), abs=2e-2)
    assert sum(there['first_log_probs'], []) != pytest.approx(sum(moved, []), abs=1e-6), (
        'the last ten batches changed nothing'
    )


def test_a_batch_that_eight_devices_cannot_share_is_refused(steps_on):
    refusal = 'cannot be divided evenly among 8 devices; take a multiple of 8'
    assert refusal in steps_on(8, 'refused')['error']
