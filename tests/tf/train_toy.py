"""Train a toy model, also on several logical CPUs. Their number is fixed when TensorFlow starts, so each training runs
in a fork of a process that has imported TensorFlow but not started it."""
import json
import sys
from pathlib import Path

import tensorflow as tf

sys.path.insert(0, str(Path(__file__).parents[1]))
import copies
import encoders
from test_trainer import open_stores

from b2t_kaggle.tensorflow.feed import start
from b2t_kaggle.tensorflow.trainer import Trainer


def start_copies():
    "Start the process to fork; its imports start no device, and so no thread of TensorFlow."
    copies.start(['b2t_kaggle.tensorflow.trainer'])


def steps(t, n):
    "Losses, gradient norms and lengths of a few steps, and a validation."
    results, lengths = [], []
    for batch in t.loader(t.step, t.step + n):
        results.append(t.train_step(batch))
        lengths.append(t.backend.shares(batch['x'])[0].shape[1])
    return dict(losses=[r.losses.tolist() for r in results], norms=[r.grad_norm for r in results], lengths=lengths,
                n=t.backend.n_devices, traces=t.program.f.experimental_get_tracing_count(), val=t.validate())


def first_steps(name, folder, **changes):
    "Mean losses and gradient norms of an encoder's first steps on the toy of `encoders`, and the number of devices."
    # Compiling for a second length takes as long as all steps; test_trainer_tf does it
    cfg = encoders.config(name, framework='tensorflow', **{'data.n_buckets': 1} | changes)
    trainer = Trainer(*encoders.open_toy(folder), cfg, start('cpu', 'float32'))
    results = list(trainer.steps(3))
    return dict(losses=[float(r.losses.mean()) for r in results], norms=[float(r.grad_norm) for r in results],
                n=trainer.backend.n_devices)


def write_steps(path, n, folder, cfg):
    "Write results of `steps` on so many devices, for a toy that `test_trainer` wrote, as JSON."
    split_processor(n)
    path.write_text(json.dumps(steps(Trainer(*open_stores(folder), cfg, start('cpu')), 6)))


def write_first_steps(path, n, *arguments):
    "Write results of `first_steps` on so many devices, as JSON."
    split_processor(n)
    path.write_text(json.dumps(first_steps(*arguments)))


def split_processor(n):
    cpu, = tf.config.list_physical_devices('CPU')
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * n)
