"A toy dataset that every encoder can learn, and small configurations of all encoders, for tests of the whole registry."
from collections.abc import Callable
from pathlib import Path

import numpy as np

from b2t_kaggle.config import Config, preset, with_overrides
from b2t_kaggle.config.encoders.encoder import encoder_config
from b2t_kaggle.config.encoders.mamba import MambaConfig
from b2t_kaggle.data.sessions import Trial, session_path, write_session
from b2t_kaggle.data.store import TrialStore

SESSIONS = 't15.2023.08.11', 't15.2023.08.13'
FEATURES = list(range(16))
N_CLASSES = 5

# Fields that determine the size of an encoder; an encoder without any of them is tested with its defaults
SMALL = dict(n_units=32, n_layers=1, noise_units=8, patch_size=8, patch_stride=4, rnn_dropout=0, input_dropout=0,
             n_heads=2, head_dim=16, dropout=0, projection_units=32, state_size=8, chunk_size=8)
MambaConfig.projection_dropout = MambaConfig.output_dropout = 0
# Fields of a Zipformer. Everything random, or that depends on the whole batch, is off, so that parts of a batch add up
# to it
SMALL |= dict(downsampling_factor=[2], num_encoder_layers=[1], encoder_dim=[24], encoder_unmasked_dim=[24],
              feedforward_dim=[48], num_heads=[2], cnn_module_kernel=[7],
              left_context_frames=8, balancer=False, whiten=False, skips=False)
# Encoders that are also tested with other fields: name of the test, encoder, changed fields
VARIANTS: dict[str, tuple[str, dict]] = {
    'causal transformer': ('transformer', {'model.causal': True, 'model.left_context': 5, 'model.left_context_min': 3}),
    'bidirectional gru': ('gru', {'model.bidirectional': True}),
    'causal mamba': ('mamba', {'model.bidirectional': False}),
    'causal zipformer': ('zipformer', {'model.causal': True}),
}
NOTHING_RANDOM = dict(white_noise_std=0, constant_offset_std=0, random_cut=0, precision='float32')


def config(name: str, **changes) -> Config:
    "A small configuration of an encoder or a variant for the toy's trials and batches."
    name, variant = VARIANTS.get(name, (name, {}))
    fields = encoder_config(name).model_fields
    model = {f'model.{k}': v for k, v in SMALL.items() if k in fields}
    model |= {'model.name': name, 'model.neural_dim': len(FEATURES), 'model.n_classes': N_CLASSES}
    data = {'data.feature_subset': FEATURES, 'data.batch_size': 4, 'data.days_per_batch': 2, 'data.n_buckets': 2}
    train = dict(num_training_batches=100, batches_per_val_step=50, batches_per_save=20, lr_warmup_steps=5,
                 lr_max=.01, lr_max_day=.001, accelerator='cpu', smooth_data=False)
    return with_overrides(preset('demo'), model | variant | data | train | NOTHING_RANDOM | changes)


def write_toy(folder: Path, n_trials: int = 4) -> None:
    "Write two sessions in which each phoneme raises one feature for eight of its twelve bins."
    rng = np.random.default_rng(0)
    for session in SESSIONS:
        for split in ('train', 'val'):
            trials = []
            for i in range(n_trials):
                ids = rng.integers(1, N_CLASSES, 2 + i)
                x = 0.1 * rng.standard_normal((12 * len(ids) + 12, 512)).astype('float32')
                for k, label in enumerate(ids): x[12*k + 8:12*k + 16, 3 * label] += 3
                trials.append(Trial(session, split, f'trial_{i:04d}', 1, i, x, ids, 'hello', False))
            write_session(session_path(folder, session, split), trials)


def open_toy(folder: Path) -> list[TrialStore]:
    "Open the toy's packed trials: train, and train again as validation, because the tests check overfitting."
    path = folder/'train.arrow'
    if not path.exists(): TrialStore.build(folder, 'train', path, progress=False, feature_subset=FEATURES)
    return [TrialStore.open(path), TrialStore.open(path)]


# An encoder that still makes errors on the toy is trained again with more steps
STEPS = 100, 200, 400, 800
LEARNED_BY_100 = 'gru', 'mamba', 'transformer', 'triple_gru', 'zipformer', *VARIANTS


def train_until_right(train: Callable[..., dict], data: Path, out: Path, cfg: Config) -> tuple[Path, dict]:
    "Train on the toy with the fewest of `STEPS` that leave no error, or with the most; returns folder and result."
    for n in STEPS:
        result = train(*open_toy(data), with_steps(cfg, n), out/str(n), progress=False)
        if result['val_per'] == 0: break
    return out/str(n), result


def with_steps(cfg: Config, n: int) -> Config: return with_overrides(cfg, dict(num_training_batches=n))


FEW = dict(num_training_batches=6, batches_per_val_step=6)


def train_as_rank(folder: Path, out: Path, names: list[str]) -> None:
    "Train some encoders, one after another, as one process of a group."
    from torch import distributed

    from b2t_kaggle.pytorch.trainer import train
    distributed.init_process_group('gloo')  # A second group, for the second encoder, would wait for the first
    for name in names: train(*open_toy(folder), config(name, **FEW), out/name, progress=False)
    distributed.destroy_process_group()
