"""Training on XLA: the same on one device and on eight, compiled once per length, nothing on the host, and a run
that moves between accelerators.

Each run is a process of its own (train_toy.py): torch_xla starts once, and the number of devices is settled then."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip('torch_xla', reason='needs torch_xla: pip install b2t_kaggle[xla]')
sys.path.insert(0, str(Path(__file__).parents[1]))
from test_trainer import open_stores, write_toy

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


def xla(what, data, out, overrides, n=1):
    "What train_toy.py found, on `n` XLA devices of the processor; a DeprecationWarning ends it."
    out.mkdir(exist_ok=True)
    env = os.environ | {'PJRT_DEVICE': 'CPU', 'CPU_NUM_DEVICES': str(n), 'PYTHONPATH': os.pathsep.join(sys.path)}
    done = subprocess.run(
        [
            sys.executable,
            str(Path(__file__).with_name('train_toy.py')),
            what,
            str(data),
            str(out),
            json.dumps({'data.batch_size': 8, 'n_buckets': 2} | overrides),
        ],
        env=env,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((out/'result.json').read_text()) | {'said': done.stdout}


@pytest.fixture(scope='module')
def one(data, tmp_path_factory): return xla('steps', data, tmp_path_factory.mktemp('one'), {})


def compiled_once(result):
    "Whether a step compiles only what it sees for the first time."
    seen, expected = set(), [0]
    for buckets in result['buckets']:
        seen |= set(buckets)
        expected.append(len(seen))
    return len(seen) > 1 and result['compiled'] == expected


def test_a_step_is_compiled_once_per_length_and_nothing_falls_back_to_the_host(one):
    assert compiled_once(one) and one['val_compiled'] == one['val_buckets'], one
    assert one['fallbacks'] == []
    assert one['losses'][-1] < 0.7 * one['losses'][0]


def test_eight_devices_take_the_same_steps_as_one(one, data, tmp_path):
    "Noise, cuts and dropout included. Two devices do too, see the test below."
    eight = xla('steps', data, tmp_path, {}, n=8)
    assert eight['n'] == 8 and one['n'] == 1
    for k in ('losses', 'norms'): assert eight[k] == pytest.approx(one[k], rel=1e-4), k
    assert eight['val'][0] == pytest.approx(one['val'][0], rel=1e-4)
    assert compiled_once(eight) and eight['val_compiled'] == eight['val_buckets'] and eight['fallbacks'] == []


def test_two_devices_and_accumulated_gradients_take_the_same_steps_as_the_processor(data, tmp_path):
    """The CPU's own way to compute, two devices, and two devices with a batch in two parts. An average of the weights
    changes no step, and is part of its program."""
    two = xla('steps', data, tmp_path/'two', NOTHING_RANDOM | {'weight_average': 'ema'}, n=2)
    parts = xla('steps', data, tmp_path/'parts', NOTHING_RANDOM | {'accumulate': 2}, n=2)
    code = (
        'import json, sys; sys.path.insert(0, sys.argv[1])\n'
        'from test_trainer import *; from b2t_kaggle.pytorch.trainer import *\n'
        "cpu = SingleDevice(pick_torch('cpu', 'float32'))\n"
        't = Trainer(*open_stores(Path(sys.argv[2])), config(**json.loads(sys.argv[3])), cpu)\n'
        'taken = [t.train_step(*t.loader(i)) for i in range(9)]\n'
        'print(json.dumps([[float(x.losses.mean()) for x in taken], [x.grad_norm for x in taken]]))'
    )
    cpu = subprocess.run(
        [
            sys.executable,
            '-c',
            code,
            str(Path(__file__).parents[1]),
            str(data),
            json.dumps({'data.batch_size': 8} | NOTHING_RANDOM),
        ],
        env=os.environ | {'PYTHONPATH': os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    losses, norms = json.loads(cpu.stdout.splitlines()[-1])
    for result in (two, parts):
        assert result['losses'] == pytest.approx(losses, rel=1e-4) and result['norms'] == pytest.approx(norms, rel=1e-3)
    assert two['n'] == 2 and compiled_once(two) and two['val_compiled'] == two['val_buckets']
    seen = {b for step in parts['buckets'] for b in step}
    assert parts['compiled'][-1] == len(seen) + 2, (
        'a program per length, one for the update, one that sets the gradients to zero'
    )


@pytest.mark.parametrize('model', [{}, {'model.name': 'triple_gru', 'noise_units': 16}], ids=['gru', 'triple_gru'])
def test_bfloat16_trains(model, data, tmp_path):
    result = xla('steps', data, tmp_path, {'precision': 'bfloat16', 'n_buckets': 1} | model)
    assert result['losses'][-1] < 0.8 * result['losses'][0] and result['fallbacks'] == []
    assert result['compiled'] == [0] + [1] * 9


def test_a_run_moves_between_accelerators(data, tmp_path):
    "From the processor to XLA and back; what continues says so, and inference agrees."
    run = lambda n: (
        NOTHING_RANDOM
        | {
            'num_training_batches': n,
            'lr_decay_steps': 30,
            'lr_decay_steps_day': 30,
            'batches_per_val_step': 10,
            'batches_per_save': 10,
            'n_buckets': 1,
        }
    )
    code = (
        'import json, sys; sys.path.insert(0, sys.argv[1]); from test_trainer import *\n'
        "stores = [TrialStore.open(Path(sys.argv[2])/f'{s}.arrow') for s in ('train', 'val')]\n"
        "print(json.dumps(train(*stores, config(**json.loads(sys.argv[4])), Path(sys.argv[3]), progress=False)))\n"
        'run = Path(sys.argv[3])\n'
        "logits = infer(run/'best.pt', stores[1], run/'v.arrow', 'cpu', 'float32', progress=False)\n"
        'print(json.dumps(logits[0][:3].tolist()))'
    )

    def cpu(out, overrides):
        done = subprocess.run(
            [
                sys.executable,
                '-c',
                code,
                str(Path(__file__).parents[1]),
                str(data),
                str(out),
                json.dumps({'data.batch_size': 8, 'accelerator': 'cpu'} | overrides),
            ],
            env=os.environ | {'PYTHONPATH': os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-2]), json.loads(done.stdout.splitlines()[-1]), done.stdout
    whole, log_probs, _ = cpu(tmp_path/'whole', run(30))
    cpu(tmp_path/'moved', run(10))
    there = xla('train', data, tmp_path/'moved', run(20))
    assert (
        'continuing after 10 batches, which were computed on cpu' in there['said']
        and 'first step after' in there['said']
    )
    assert there['compiled'] == 2, 'a continued run compiles its steps and its validations, each once'
    back, moved, said = cpu(tmp_path/'moved', run(30))
    assert 'continuing after 20 batches, which were computed on xla' in said
    assert back['val_loss'] == pytest.approx(whole['val_loss'], rel=1e-3) and back['step'] == 30
    assert sum(moved, []) == pytest.approx(sum(log_probs, []), abs=2e-2)
    assert sum(there['first_log_probs'], []) != pytest.approx(sum(moved, []), abs=1e-6), (
        'the last ten batches changed nothing'
    )


def test_a_batch_that_eight_devices_cannot_share_is_refused(data, tmp_path):
    with pytest.raises(AssertionError, match='cannot be divided evenly among 8 devices; take a multiple of 8'):
        xla('steps', data, tmp_path, {'data.batch_size': 12}, n=8)
