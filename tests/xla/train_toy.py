"""Train a toy on an XLA device and write the results as JSON, in a separate process because torch_xla starts only once.
test_training_xla.py calls it in forks of a process that has imported this module and started nothing."""

import json
import sys
import traceback
import warnings
from pathlib import Path

warnings.simplefilter('error', DeprecationWarning)
import torch
import torch_xla.debug.metrics as met  # Before anything computes on the CPU

sys.path.insert(0, str(Path(__file__).parents[1]))
import copies
import encoders
from test_trainer import config

from b2t_kaggle.data.batches import bucket_of, evaluation_batches
from b2t_kaggle.data.store import TrialStore
from b2t_kaggle.devices.torch import pick_torch
from b2t_kaggle.pytorch.checkpoint import load_file
from b2t_kaggle.pytorch.inference import infer
from b2t_kaggle.pytorch.models.encoder import Encoder
from b2t_kaggle.pytorch.parallel import start
from b2t_kaggle.pytorch.trainer import Trainer, train
from b2t_kaggle.training.trials import bucket_lengths


def on_devices(n): return dict(PJRT_DEVICE='CPU', CPU_NUM_DEVICES=str(n))


def run_and_read(n, folder, function, *arguments):
    "Output of a function in a copy with `n` XLA devices of the CPU backend; see `copies.run_and_read`."
    copies.start(['train_toy'])
    return copies.run_and_read(on_devices(n), folder, function, *arguments)


def compilations(): return met.metric_data('CompileTime')[0]


def steps(stores, cfg, n):
    "Losses and gradient norms of some steps, two validations, and the number of compilations after each step."
    t = Trainer(*stores, cfg, start(pick_torch(cfg.train.accelerator, cfg.train.precision)))
    met.clear_all()
    out = dict(losses=[], norms=[], compiled=[0], buckets=[], n=t.backend.n_devices)
    for i in range(n):
        parts, days = t.loader(t.step)
        taken = t.train_step(parts, days)
        out['compiled'].append(compilations())
        out['buckets'].append([p.x.shape[1] for p in parts])
        out['losses'].append(taken)
    before = compilations()
    validations = [t.validate() for _ in range(2)]
    buckets = bucket_lengths(t.store_val, cfg, True)
    # Losses with several terms are measured in batches of the training's size
    has_terms = type(t.result).training_losses is not Encoder.training_losses
    rows = cfg.data.batch_size//cfg.train.accumulate if has_terms else cfg.data.eval_batch_size
    batches = evaluation_batches(t.store_val.n_bins, rows)
    out['val_buckets'] = len({bucket_of(t.store_val.n_bins[i[i >= 0]].max(), buckets) for i in batches})
    out['val_compiled'] = compilations() - before
    out['val'] = [[v['val_loss'], v['val_per']] for v in validations]
    out['fallbacks'] = [c for c in met.counter_names() if c.startswith('aten::')]
    out['norms'], out['losses'] = [t.grad_norm for t in out['losses']], [float(t.losses.mean()) for t in out['losses']]
    return out


def steps_of_each(stores, configs):
    "Results of `steps` for each configuration, or its error."
    found = {}
    for name, cfg in configs.items():
        try: found[name] = steps(stores, cfg, 9)
        except Exception: found[name] = dict(error=traceback.format_exc())
    return found


def resumed(stores, overrides, out):
    """Steps of a replayed run, of its continuation, and of an uninterrupted run; and differences between their
    checkpoints."""
    parts = dict(num_training_batches=10, lr_decay_steps=15, lr_decay_steps_day=15)
    runs = [('replayed', {'replay': True} | parts), ('replayed', parts | {'replay': True, 'num_training_batches': 15}),
            ('whole', parts | {'num_training_batches': 15})]
    taken = [train(*stores, config(**overrides | changes), out/name, progress=False)['step'] for name, changes in runs]
    a, b = (load_file(out/name/'last.pt') for name in ('replayed', 'whole'))
    groups = 'model_state_dict', 'average_state_dict'
    return dict(steps=taken, different=[k for g in groups for k, v in a[g].items() if not torch.equal(v, b[g][k])])


def write_result(task, data, out, overrides):
    "Write the results to result.json."
    on_xla = {'accelerator': 'xla'}
    if task == 'encoders':
        configs = {name: encoders.config(name.removeprefix('replayed '), **on_xla | changes)
                   for name, changes in overrides.items()}
        result = steps_of_each(encoders.open_toy(data), configs)
    else: stores = [TrialStore.open(data/f'{s}.arrow') for s in ('train', 'val')]
    if task == 'steps':
        result = steps_of_each(stores, {name: config(**on_xla | changes) for name, changes in overrides.items()})
    if task == 'resume': result = resumed(stores, on_xla | overrides, out)
    if task == 'train':
        result = train(*stores, config(**on_xla | overrides), out, progress=False)
        result['compiled'] = compilations()
        logits = infer(out/'best.pt', stores[1], out/'val.arrow', accelerator='xla', progress=False)
        again = infer(
            out / 'best.pt', stores[0], out / 'train.arrow', accelerator='xla', progress=False
        )  # As in the stage for test, where torch_xla is already set up
        assert len(again) == len(stores[0])
        result['first_log_probs'] = logits[0][:3].tolist()
    (out/'result.json').write_text(json.dumps(result))
