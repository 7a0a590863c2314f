"""Pretraining: objectives beside plain NumPy, the bins that it sees, weights that start a training, exact resume, and
its place in a run."""
import json
import os
import shutil
from unittest.mock import patch

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from encoders import FEATURES
from encoders import config as small_config
from kaggle_session import RECORDINGS
from killed import ask_before_each_step, kill_behind_a_checkpoint
from test_participants import BOTH, folders  # noqa: F401
from test_pipeline import SMALL, execute_here, stages_here

from b2t_kaggle.cli.command import main
from b2t_kaggle.config import Config, with_overrides
from b2t_kaggle.config.schema import ConfigError
from b2t_kaggle.data.simulate import simulate_dataset
from b2t_kaggle.data.store import TrialStore
from b2t_kaggle.devices.torch import pick_torch
from b2t_kaggle.kaggle.session import next_step, prepare_training, training_stage
from b2t_kaggle.pipeline.execute import run_stages
from b2t_kaggle.pipeline.run import Run
from b2t_kaggle.pipeline.stages import STAGES, PipelineError, plan
from b2t_kaggle.pipeline.stages.pretrain import Pretrain
from b2t_kaggle.pipeline.stamps import StageRun, StageStamp
from b2t_kaggle.pytorch import launch as room
from b2t_kaggle.pytorch.checkpoint import load_file, load_model
from b2t_kaggle.pytorch.evaluate import evaluate
from b2t_kaggle.pytorch.parallel import SingleDevice
from b2t_kaggle.pytorch.pretraining.objective import Objective, first_window
from b2t_kaggle.pytorch.pretraining.trainer import Trainer, train
from b2t_kaggle.pytorch.trainer import Trainer as LabelledTrainer
from b2t_kaggle.training import loop
from b2t_kaggle.training.budget import Budget
from b2t_kaggle.training.history import read_history, summarize
from b2t_kaggle.training.pretraining import UnlabelledStore, pretraining_config
from b2t_kaggle.training.recipe import TrainingError

CPU = SingleDevice(pick_torch('cpu', 'float32'))
CAUSAL = {'gru': {}, 'triple_gru': {}, 'transformer': {'model.causal': True}, 'mamba': {'model.bidirectional': False},
          'zipformer': {}}


def config(name='gru', objective='masked', **changes):
    steps = {'pretrain.objective': objective, 'pretrain.batches': 30, 'train.batches_per_val_step': 30,
             'train.batches_per_save': 7, 'train.precision': 'float32', 'data.batch_size': 6}
    width = {'data.feature_subset': None, 'model.neural_dim': 512} if objective == 'next_step' else {}
    return small_config(name, **steps | width | {'model.n_classes': 41} | changes)


def packed(data, folder, features=None):
    "Train, val and test."
    return [TrialStore.build(data, split, folder/f'{split}.arrow', progress=False, feature_subset=features)
            for split in ('train', 'val', 'test')]


@pytest.fixture(scope='module')
def all_features(tmp_path_factory):
    tmp = tmp_path_factory.mktemp('bins')
    simulate_dataset(tmp/'data', n_sessions=3, train=6, val=3, test=4, max_words=4, lm_sentences=0)
    return packed(tmp/'data', tmp)


@pytest.fixture(scope='module')
def stores(all_features, tmp_path_factory):
    "The same trials with few features."
    return packed(all_features[0].path.parent/'data', tmp_path_factory.mktemp('few'), FEATURES)


def by_hand(cfg, found, target, counted, n_bins, channels):
    "The losses of trials, bin by bin: the channels' mean, summed over the bins; in float64."
    stride, begin = cfg.model.frame_stride(), first_window(cfg)
    F = target.shape[-1]
    losses = []
    for b, n in enumerate(n_bins):
        errors = []
        for t in range(begin, n):
            frame, place = divmod(t - begin, stride)
            if frame >= cfg.model.n_frames(n) or not counted[b, t]: continue
            z, y = found[b, frame, place*F:(place + 1)*F][channels[b]], target[b, t][channels[b]]
            per_channel = (z - y)**2 if cfg.pretrain.objective == 'masked' else np.logaddexp(0, z) - y*z
            errors.append(per_channel.mean())
        losses.append(sum(errors) if cfg.train.ctc_reduction == 'trial' else np.mean(errors or [0]))
    return losses


@pytest.mark.parametrize('reduction', ['trial', 'label'])
@pytest.mark.parametrize('objective', ['masked', 'next_step'])
@pytest.mark.parametrize('name', ['gru', 'transformer', 'zipformer'])
def test_losses_beside_numpy(name, objective, reduction):
    "Of two participants with different numbers of channels; power is none of the crossings."
    sessions = {'data.sessions': ['t12.2022.04.28', 't15.2023.08.11'], 'model.participants': BOTH,
                'data.feature_subset': None, 'model.neural_dim': 512}
    by_feature = {'augment.channel_mask_by': 'feature', 'train.ctc_reduction': reduction}
    cfg = pretraining_config(config(name, objective, **sessions | by_feature))
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 90, 512)).astype('float32')
    x[0, :, 256:] = 0 # As a store pads
    n_bins = [90, 71]
    x[1, 71:] = 0
    of = Objective(cfg, 512, torch.device('cpu'))
    example = of.example(torch.from_numpy(x), torch.tensor(n_bins), 2, torch.Generator().manual_seed(0))
    found = rng.standard_normal((2, cfg.model.n_frames(90), cfg.model.frame_stride()*512))
    channels = [np.arange(512) < n//(2 if objective == 'next_step' else 1) for n in (256, 512)]
    cut = np.pad(x[:, 2:], ((0, 0), (0, 2), (0, 0)))
    target = cut if objective == 'masked' else cut > 0 # The small configurations do not smooth
    expected = by_hand(cfg, found, target.astype(float), example.counted.numpy(), [88, 69], channels)
    losses = of.losses(torch.from_numpy(found).float(), example, torch.tensor([0, 1]))
    np.testing.assert_allclose(losses.numpy(), expected, rtol=1e-4)
    hidden = (example.x == 0).numpy()
    if objective == 'masked':
        assert hidden[example.counted.numpy()].all() and .05 < example.counted.float().mean() < .6
    else:
        is_whole = hidden[1, :60].all(0) # Channels that are hidden, each in the whole trial
        assert .2 < is_whole.mean() < .4 and (hidden[1, :60].any(0) == is_whole).all()


@pytest.mark.parametrize('name', CAUSAL)
def test_every_encoder_learns_and_every_bin_is_drawn(name, stores):
    "Trials of val and of test are in the batches; the loss of what is hidden falls, and each weight moves."
    cfg = pretraining_config(config(name, smooth_data=True, lr_max=.03))
    t = Trainer(UnlabelledStore(stores), stores[1], cfg, CPU)
    before = {k: v.clone() for k, v in t.model.named_parameters()}
    results = [t.train_step(*t.loader(step)) for step in range(30)]
    drawn = {int(i) for r in results for i in r.trials}
    ends = np.cumsum([len(s) for s in stores])
    assert all(any(begin <= i < end for i in drawn) for begin, end in zip([0, *ends], ends))
    losses = [float(r.losses.mean()) for r in results]
    assert np.mean(losses[-8:]) < .9*np.mean(losses[:8]), losses
    still = {k for k, v in t.model.named_parameters() if torch.equal(v, before[k])}
    read_out = {f'encoder.{t.model.encoder.read_out}.{k}' for k in ('weight', 'bias')}
    frozen = {k for k, v in t.model.named_parameters() if not v.requires_grad}
    assert read_out <= frozen and {k for k in still - frozen if not k.startswith('encoder.noisy.')} == set()


@pytest.mark.parametrize('name', ['gru', 'triple_gru', 'transformer', 'mamba'])
def test_what_is_next_is_not_read(name, all_features):
    "Bins from a frame's window on do not change what the head writes of it."
    cfg = pretraining_config(config(name, 'next_step', **CAUSAL[name], smooth_data=True))
    t = Trainer(UnlabelledStore(all_features), None, cfg, CPU)
    t.model.eval()
    x = torch.from_numpy(all_features[2].features(0).astype('float32'))[None]
    n_bins, day = torch.tensor([x.shape[1]]), torch.tensor([0])
    frame = 6
    end = first_window(cfg) + frame*cfg.model.frame_stride()
    assert end + 1 < x.shape[1]
    found = []
    for place in (end, end - 1): # In the window, and just before it
        other = x.clone()
        other[:, place:] += 1
        examples = [t.objective.example(v, n_bins, 0, torch.Generator().manual_seed(0), noisy=False).x
                    for v in (x, other)]
        a, b = (t.model(v, day, n_bins)[0, frame] for v in examples)
        found.append(torch.equal(a, b))
    assert found == [True, False]


def test_encoders_that_read_ahead_are_refused(all_features):
    for name in ('transformer', 'zipformer'):
        cfg = pretraining_config(config(name, 'next_step'))
        with pytest.raises(TrainingError, match=f'model.name = {name} reads later bins'):
            Trainer(UnlabelledStore(all_features), None, cfg, CPU)
    with pytest.raises(ConfigError, match='needs an encoder of PyTorch') as e:
        with_overrides(Config(), {'pretrain.objective': 'masked', 'train.framework': 'tensorflow'})
    assert '\n' not in str(e.value)


def pretrain_in_a_copy(allowed, folder, out):
    torch.set_num_threads(1)
    ask_before_each_step(Trainer, allowed)
    stores = [TrialStore.open(folder/f'{split}.arrow') for split in ('train', 'val', 'test')]
    train(UnlabelledStore(stores), stores[1], pretraining_config(config()), out, progress=False)


def test_a_killed_pretraining_ends_with_the_same_weights(stores, tmp_path):
    "Encoder, head, optimiser and curves, to the last bit."
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    cfg = pretraining_config(config())
    untrained = Trainer(UnlabelledStore(stores), stores[1], cfg, CPU).metrics()
    whole = train(UnlabelledStore(stores), stores[1], cfg, tmp_path/'whole', progress=False)
    kill_behind_a_checkpoint(pretrain_in_a_copy, (stores[0].path.parent, tmp_path/'killed'),
                             tmp_path/'killed'/'last.pt', steps=10)
    assert 0 < load_file(tmp_path/'killed'/'last.pt')['step'] < 30 and not (tmp_path/'killed'/'best.pt').exists()
    again = train(UnlabelledStore(stores), stores[1], cfg, tmp_path/'killed', progress=False)
    assert whole['step'] == again['step'] == 30 and whole['val_loss'] == again['val_loss']
    for name in ('last.pt', 'best.pt'):
        a, b = (load_file(tmp_path/d/name) for d in ('whole', 'killed'))
        for part in ('model_state_dict', 'head_state_dict'):
            for k, v in a[part].items(): assert torch.equal(v, b[part][k]), (name, k)
    a, b = (read_history(tmp_path/d/'history.csv') for d in ('whole', 'killed'))
    assert a.drop(columns='seconds').equals(b.drop(columns='seconds'))
    first = a.iloc[0][['step', 'val_loss', 'val_per']].tolist()
    assert first == [0, untrained['val_loss'], untrained['val_per']] and np.isnan(a.loss[0])
    (tmp_path/'killed'/'best.pt').unlink() # Is made again of the last one
    assert train(UnlabelledStore(stores), stores[1], cfg, tmp_path/'killed', progress=False)['step'] == 30
    a, b = (load_file(tmp_path/d/'best.pt') for d in ('whole', 'killed'))
    torch.set_num_threads(threads)
    for k, v in a['model_state_dict'].items(): assert torch.equal(v, b['model_state_dict'][k]), k


def test_a_look_at_the_probe_changes_no_step(stores, tmp_path):
    "Of an encoder that its own logits are fed back to: in one session, or in many that end with a validation each."
    inside = {'model.n_layers': 2, 'model.inter_ctc_layers': [1], 'model.self_condition': True}
    cfg = pretraining_config(config(**inside | {'pretrain.batches': 4}))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    whole = train(UnlabelledStore(stores), stores[1], cfg, tmp_path/'one', progress=False)
    short = with_overrides(cfg, {'train.time_budget': 1e-6})
    while not train(UnlabelledStore(stores), stores[1], short, tmp_path/'many', progress=False)['finished']: pass
    torch.set_num_threads(threads)
    for name in ('last.pt', 'best.pt'):
        one, many = (load_file(tmp_path/d/name)['model_state_dict'] for d in ('one', 'many'))
        for k, v in one.items(): assert torch.equal(many[k], v), (name, k)
    model = load_model(tmp_path/'one'/'best.pt')[0]
    found = evaluate(model, stores[1], {s: i for i, s in enumerate(stores[1].sessions)}, cfg, CPU)
    assert summarize(found)['val_per'] == whole['val_per'] # That of the model which is saved


def test_two_processes_take_the_steps_of_one(all_features, tmp_path, monkeypatch):
    from copies import call_as_ranks
    monkeypatch.setattr(room, '_exit_status', lambda command, env: (call_as_ranks(2, room.work, command[-1]), False))
    still = dict(white_noise_std=0, constant_offset_std=0, random_cut=0)
    cfg = pretraining_config(config('triple_gru', 'next_step', **still | {
        'pretrain.batches': 3, 'pretrain.mask': 1e-9, 'train.batches_per_val_step': 3}))
    given = UnlabelledStore(all_features), all_features[1], cfg
    one = train(*given, tmp_path/'one', progress=False)
    two = room.launch(2, *given, tmp_path/'two', progress=False)
    assert one['val_loss'] == pytest.approx(two['val_loss'], rel=1e-3)
    a, b = (load_file(tmp_path/d/'best.pt')['model_state_dict'] for d in ('one', 'two'))
    for k in a:
        if not k.startswith('clean.out'): assert torch.allclose(a[k], b[k], atol=1e-4), k


def values(name): return SMALL | {'pretrain.objective': name, 'pretrain.batches': 4}


def test_a_run_pretrains_and_its_training_begins_there(tmp_path):
    "Skipped by default. It has curves, and its weights are those that the training begins with."
    assert STAGES['pretrain'].skipped(Config()) and 'pretrain' not in plan(Config())
    run = Run(tmp_path/'runs'/'one', tmp_path/'work', values('masked') | {
        'train.lr_max': 1e-9, 'train.lr_max_day': 1e-9, 'train.lr_min': 0., 'train.lr_min_day': 0.})
    assert plan(run.cfg)[3:5] == ['pretrain', 'train']
    for name in plan(run.cfg, 'train'): execute_here(run, name)
    first, then = (load_model(run.dir/name/'best.pt')[0].state_dict() for name in ('pretrain', 'train'))
    for k, v in first.items(): torch.testing.assert_close(then[k], v, rtol=0, atol=1e-5, msg=k)
    metrics = StageStamp(run, 'pretrain').stamp['metrics']
    assert metrics['trials'] == 2*24 + 4 + 4 and metrics['steps'] == 4
    rates = read_history(run.dir/'pretrain'/'history.csv').val_per.dropna()
    assert [metrics[f'PER of a linear probe{of}'] for of in (', untrained', '')] == [rates.iloc[0], rates.iloc[-1]]
    assert StageStamp(run, 'train').status() == 'done'
    for key in ('pretrain.batches', 'pretrain.minutes'): # With another value another pretraining, and another training
        other = Run(run.dir, run.work, {key: 5}, save=False)
        assert [other.fingerprint(n) == run.fingerprint(n) for n in ('pack', 'pretrain', 'train')] == [1, 0, 0], key
    StageRun(run, 'pretrain').discard() # As --force does: no training goes on that began with other weights
    assert [StageStamp(run, n).status() for n in ('pack', 'pretrain', 'train')] == ['done', 'never ran', 'never ran']
    assert not (run.dir/'train').exists() and len([*run.dir.glob('train-*/last.pt')]) == 1


def test_time_that_is_its_own_ends_it_and_time_of_the_session_does_not(tmp_path, capsys):
    run = Run(tmp_path/'runs'/'one', tmp_path/'work', values('masked') | {'pretrain.minutes': .001,
                                                                         'pretrain.batches': 4000})
    for name in plan(run.cfg, 'pretrain'): execute_here(run, name)
    stamp = StageStamp(run, 'pretrain').stamp
    assert stamp['finished'] and stamp['metrics']['steps'] < 4000
    Pretrain().check_result(run, STAGES.values())
    said, steps = capsys.readouterr().err, stamp['metrics']['steps']
    assert f'Ended by pretrain.minutes after {steps:,} of 4,000 batches; the learning rate, ' in said
    assert 'PER of a linear probe=' in said and ' PER=' not in said
    with pytest.MonkeyPatch.context() as m:
        m.setattr(StageRun, 'time_left', lambda self: .001)
        other = Run(tmp_path/'runs'/'two', tmp_path/'work', values('masked') | {'pretrain.batches': 4000,
                                                                                'pretrain.minutes': 60})
        for name in plan(other.cfg, 'pretrain'): execute_here(other, name)
    assert StageStamp(other, 'pretrain').status() == 'stopped early'
    assert "Ended by the session's end after " in capsys.readouterr().err
    Pretrain().check_result(other, [STAGES['pretrain']])
    with pytest.raises(PipelineError, match='of 4,000 batches are done; run the same line in another session'):
        Pretrain().check_result(other, STAGES.values())
    history = read_history(other.dir/'pretrain'/'history.csv')
    steps = StageStamp(other, 'pretrain').stamp['metrics']['steps']
    history.assign(seconds=3600.).to_csv(other.dir/'pretrain'/'history.csv', index=False)
    budgets = []
    with pytest.MonkeyPatch.context() as m:
        m.setattr(loop, 'Budget', lambda minutes, *args: budgets.append(minutes) or Budget(minutes, *args))
        execute_here(other, 'pretrain')
    assert budgets == [.01] # Its hour is over, and this is the least that there is
    assert steps < StageStamp(other, 'pretrain').stamp['metrics']['steps'] < 4000
    assert StageStamp(other, 'pretrain').status() == 'done'


def kaggle_session(room, ends, **values):
    "A session of train.ipynb: the last row of its stages, its last line, and the run, which is attached to the next."
    for name in ('working', 'scratch'): shutil.rmtree(room/name, ignore_errors=True)
    with pytest.MonkeyPatch.context() as m, patch.dict(os.environ), stages_here():
        if ends: m.setattr(Budget, 'is_spent', lambda self, steps=1: True)
        folders = room/'input', room/'working', room/'scratch'
        run = prepare_training(*folders, accelerator='cpu', hours=1, **values)
        *_, last = run_stages(run, 'infer')
    plt.close('all')
    attached = room/'input'/'notebooks'/'ada'/'train'/'run'
    shutil.rmtree(attached, ignore_errors=True)
    shutil.copytree(run.dir, attached)
    return last, next_step(run), attached


def test_a_pretraining_over_sessions_on_kaggle(tmp_path, capsys):
    "Ended twice, the third session comes to the training: weights are those of a run that was never ended."
    first = dict(preset='demo', overrides=values('masked'))
    simulate_dataset(tmp_path/'parts'/'input'/RECORDINGS, n_sessions=2, train=12, val=4, test=4, max_words=4,
                     lm_sentences=0)
    shutil.copytree(tmp_path/'parts', tmp_path/'whole')
    for n, given in ((1, first), (2, {})):
        last, said, run = kaggle_session(tmp_path/'parts', True, **given)
        assert (last['stage'], last['state'], training_stage(run)) == ('pretrain', 'stopped early', 'pretrain')
        assert said.startswith(f'{n} of 4 batches of the pretraining are done; to go on, attach the output')
        assert not (run/'train').exists() and read_history(run/training_stage(run)/'history.csv').step.tolist()[-1] == n
        assert 'the session is over' in capsys.readouterr().err
    last, said, run = kaggle_session(tmp_path/'parts', False)
    assert 'goes on from batch 2 of 4 of the pretraining' in capsys.readouterr().out
    assert last['stage'] == 'infer' and 'batches are done; attach the output of this version to submit' in said
    whole = kaggle_session(tmp_path/'whole', False, **first)[-1]
    for name in ('pretrain/last.pt', 'pretrain/best.pt', 'train/last.pt', 'train/best.pt'):
        one, many = (load_file(folder/name)['model_state_dict'] for folder in (whole, run))
        for k, v in one.items(): assert torch.equal(many[k], v), (name, k)


def test_a_command_that_comes_no_further_than_the_pretraining(tmp_path):
    "It ends with status 1, and names no submission."
    def ends(run, name): StageRun(run, name).begin().finish([], finished=name != 'pretrain')
    line = 'run', '--out', str(tmp_path/'out'), '--work', str(tmp_path), '--set', 'pretrain.objective=masked'
    with patch('b2t_kaggle.pipeline.execute.execute', ends): done = CliRunner().invoke(main, line)
    assert done.exit_code == 1 and 'Stopped early: pretrain. The same line goes on' in done.output, done.output
    assert 'Submission:' not in done.output and not (tmp_path/'out'/'demo'/'stages'/'train.json').exists()


def test_other_participants_and_their_test_bins(folders, tmp_path): # noqa: F811
    "All partitions of both; layers of days that have no trial with labels come along, too."
    run = Run(tmp_path/'runs'/'both', tmp_path/'work', values('masked') | {
        'data.dataset_dir': list(map(str, folders)), 'model.participants': BOTH, 'model.neural_dim': 512})
    for name in plan(run.cfg, 'pretrain'): execute_here(run, name)
    every = TrialStore.open(run.packed_dir/'test_of_all.arrow')
    kinds = {s[:3] for s in every.index.session}
    assert kinds == {'t12', 't15'} and every.n_features == 512
    stores = [TrialStore.open(run.packed_dir/f'{split}.arrow') for split in ('train', 'val')] + [every]
    assert StageStamp(run, 'pretrain').stamp['metrics']['trials'] == sum(map(len, stores))
    assert json.loads((run.dir/'stages'/'pretrain.json').read_text())['finished']
    start = Pretrain().training_config(run)
    began = LabelledTrainer(*stores[:2], with_overrides(run.cfg, {'train.init_checkpoint_path': run.pretrained}), CPU)
    saved = load_file(run.pretrained)['model_state_dict']
    for k, v in began.model.state_dict().items(): assert torch.equal(v, saved[k]), k
    assert start.model.participants == BOTH
