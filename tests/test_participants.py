"""Two participants trained together: padded stores, participant layers, shares of batches, and runs on one of them
before and afterwards."""
import csv
import json
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
import torch
from encoders import config as small_config
from rapidfuzz.distance import Levenshtein
from test_pipeline import SMALL, execute_here
from tiny_models import tiny_lm

from b2t_kaggle.config import Config, InferConfig, with_overrides
from b2t_kaggle.config.schema import ConfigError
from b2t_kaggle.data.sessions import session_path
from b2t_kaggle.data.simulate import simulate_dataset
from b2t_kaggle.data.store import StoreError, TrialStore
from b2t_kaggle.data.t12 import import_t12, simulate_t12
from b2t_kaggle.decoding.nbest import Hypothesis, read_nbest
from b2t_kaggle.devices.torch import pick_torch
from b2t_kaggle.phonemes import normalize_sentence
from b2t_kaggle.pipeline.execute import run_stages
from b2t_kaggle.pipeline.results import as_hypotheses
from b2t_kaggle.pipeline.run import Run
from b2t_kaggle.pipeline.stages import PipelineError, plan
from b2t_kaggle.pytorch.adaptation import infer_adapted
from b2t_kaggle.pytorch.checkpoint import load_model
from b2t_kaggle.pytorch.frontend import Frontend
from b2t_kaggle.pytorch.inference import infer
from b2t_kaggle.pytorch.models import build_model
from b2t_kaggle.pytorch.models.transformer import Transformer
from b2t_kaggle.pytorch.parallel import SingleDevice
from b2t_kaggle.pytorch.streaming import EncoderStream
from b2t_kaggle.pytorch.trainer import Trainer
from b2t_kaggle.rescoring.hypotheses import write_hypotheses
from b2t_kaggle.training.recipe import TrainingError

BOTH = {'t12': 256, 't15': 512}
NAMES = 'gru', 'transformer', 'mamba'
SESSIONS = ['t15.2023.08.11', 't15.2023.08.13', 't12.2022.04.28', 't12.2022.05.05']


@pytest.fixture(scope='module')
def folders(tmp_path_factory):
    "Simulated sessions of t15 and t12; those of t12 are imported from MATLAB files."
    tmp = tmp_path_factory.mktemp('both')
    simulate_dataset(tmp/'t15', n_sessions=2, train=6, val=3, test=2, max_words=4, lm_sentences=10)
    simulate_t12(tmp/'mat', n_sessions=2, train=6, val=2, test=2)
    import_t12(tmp/'mat', tmp/'t12')
    return [tmp/'t15', tmp/'t12']


@pytest.fixture(scope='module')
def stores(folders, tmp_path_factory):
    tmp = tmp_path_factory.mktemp('packed')
    return [TrialStore.build(folders, split, tmp/f'{split}.arrow', progress=False) for split in ('train', 'val')]


def own_stores(folder, tmp_path):
    "Train and val of one participant."
    paths = {split: tmp_path/f'{folder.name}_{split}.arrow' for split in ('train', 'val')}
    return [TrialStore.build(folder, split, path, progress=False) for split, path in paths.items()]


def config(name='gru', participants=BOTH, **changes):
    width = {'data.feature_subset': None, 'model.neural_dim': 512, 'model.n_classes': 41}
    return small_config(name, **width | {'model.participants': participants} | changes)


CPU = 'cpu', 'float32'
def trainer(stores, *args, **kw): return Trainer(*stores, config(*args, **kw), SingleDevice(pick_torch(*CPU)))


def random_model(name, sessions=SESSIONS):
    torch.manual_seed(0)
    model = build_model(config(name).model, len(sessions), sessions).eval()
    for p in model.parameters(): torch.nn.init.normal_(p, std=.1)
    return model


def test_a_store_of_both_is_padded(folders, stores):
    "Features as h5py reads them, padded with zeros; the days of the second folder follow those of the first."
    store = stores[0]
    assert store.sessions == SESSIONS and store.n_features == 512 and len(store) == 24
    for i in range(len(store)):
        row = store.index.iloc[i]
        n = BOTH[row.session[:3]]
        path = session_path(folders[row.day//2], row.session, 'train')
        with h5py.File(path) as f: x = f[row.key]['input_features'][:]
        assert x.shape == (row.n_bins, n)
        np.testing.assert_array_equal(store.features(i), np.hstack([x.astype('float16'), np.zeros((len(x), 512 - n))]))
    with pytest.raises(StoreError, match='session t15.2023.08.11 is also in '):
        TrialStore.build([folders[0], folders[0]], 'val', store.path.with_name('twice.arrow'), progress=False)
    with pytest.raises(StoreError, match=f'^{folders[0]} and {folders[1]}: there is no session t15.2023.08.12;'):
        TrialStore.build(folders, 'val', store.path.with_name('none.arrow'), sessions=['t15.2023.08.12'])


@pytest.mark.parametrize('way', ['packed', 'padded'])
@pytest.mark.parametrize('name', [*NAMES, 'triple_gru', 'zipformer'])
def test_each_has_a_map_onto_the_model(name, way, monkeypatch):
    "The model equals one without participant layers on features that NumPy has mapped; padding has no effect."
    if way == 'padded':
        for kind in (Frontend, Transformer): monkeypatch.setattr(kind, '_packed', kind._padded)
    model = random_model(name)
    plain = build_model(config(name, {}).model, 4).eval()
    own = model.state_dict()
    W, b = (own.pop(f'participant_{k}').double().numpy() for k in ('weights', 'biases'))
    plain.load_state_dict(own)
    x = np.random.default_rng(0).standard_normal((3, 60, 512)).astype('float32')
    day, n_bins = [2, 1, 3], torch.tensor([60, 44, 31])
    mapped = np.zeros_like(x)
    for i, (d, n) in enumerate(zip(day, n_bins)):
        p = 0 if d >= 2 else 1
        F = [256, 512][p]
        mapped[i, :n] = x[i, :n, :F] @ W[p, :F] + b[p]
        x[i, n:] = 1e4
    found = model(torch.from_numpy(x), day, n_bins=n_bins)
    expected = plain(torch.from_numpy(mapped), day, n_bins=n_bins)
    for i, n in enumerate(model.cfg.n_frames(n_bins)):
        torch.testing.assert_close(found[i, :n], expected[i, :n], rtol=1e-3, atol=1e-3)


def test_batches_have_the_shares(stores):
    "Batches have the given shares of trials and of days; without shares, days are sampled from all participants."
    t = trainer(stores, **{'data.batch_size': 8, 'data.days_per_batch': 3, 'data.shares': {'t12': .25, 't15': .75}})
    for step in range(6):
        days = t.store.day[t.loader.trials(step)]
        assert (days >= 2).sum() == 2 and len(set(days[days >= 2])) == 1 and len(set(days)) == 3
    t = trainer(stores, **{'data.batch_size': 8, 'data.days_per_batch': 2})
    assert {int(d) for step in range(20) for d in t.store.day[t.loader.trials(step)]} == {0, 1, 2, 3}


@pytest.fixture(scope='module')
def trained(stores, tmp_path_factory):
    "The folder of a few steps on both participants, by encoder, and the trainer."
    made = {}
    def get(name):
        if name not in made:
            out = tmp_path_factory.mktemp(name)
            t = trainer(stores, name, **{'data.shares': {'t12': .5, 't15': .5}})
            for i in range(3): t.train_step(*t.loader(i))
            t.save_last(out/'last.pt')
            for i in range(3, 6): t.train_step(*t.loader(i))
            t.save_best(out/'best.pt')
            made[name] = out, t
        return made[name]
    return get


@pytest.mark.parametrize('name', NAMES)
def test_training_continues_exactly_and_is_validated_for_each(name, stores, trained):
    out, t = trained(name)
    for k in 'participant_weights', 'day_weights':
        if k not in t.model.state_dict(): continue
        moved = (t.model.state_dict()[k] != torch.eye(512)).flatten(1).any(1)
        assert moved.all(), f'{k}: rows that no step has changed'
    again = Trainer(*stores, t.cfg, SingleDevice(pick_torch(*CPU)), out/'last.pt')
    for i in range(3, 6): again.train_step(*again.loader(i))
    for k, v in t.model.state_dict().items(): assert torch.equal(v, again.model.state_dict()[k]), k
    metrics = t.validate()
    n = stores[1].index.groupby(stores[1].index.session.str[:3]).n_labels.sum()
    assert set(metrics['participants']) == set(n.index) == {'t12', 't15'}
    assert sum(n[p]*per for p, per in metrics['participants'].items())/n.sum() == pytest.approx(metrics['val_per'])


@pytest.mark.parametrize('name', NAMES)
def test_inference_for_one_of_them(name, folders, stores, trained, tmp_path):
    "A store with one participant's features gives the same result as the store of both."
    both = infer(trained(name)[0]/'best.pt', stores[1], tmp_path/'both.arrow', *CPU, progress=False)
    sessions = stores[1].index.session
    for folder in folders:
        own = TrialStore.build(folder, 'val', tmp_path/f'{folder.name}.arrow', progress=False)
        assert own.n_features == BOTH[folder.name]
        alone = infer(trained(name)[0]/'best.pt', own, tmp_path/f'{folder.name}_logits.arrow', *CPU, progress=False)
        rows = np.flatnonzero(sessions.str.startswith(folder.name))
        assert len(rows) == len(alone) > 0
        for i, row in enumerate(rows): np.testing.assert_allclose(alone[i], both[row], rtol=1e-4, atol=1e-4)


def test_adaptation_to_one_of_them(folders, stores, trained, tmp_path):
    "A store with t12's features gives the same result as the padded store of both."
    decoder = SimpleNamespace(decode=lambda log_probs: [SimpleNamespace(text='what is it')])
    options = InferConfig(adapt='dietcorp', adapt_copies=2).model_copy(update=dict(adapt_gate=10.))
    def adapted(store):
        return infer_adapted(trained('gru')[0]/'best.pt', store, tmp_path/f'{store.n_features}.arrow', options,
                             decoder, *CPU, progress=False)

    both, alone = adapted(stores[1]), adapted(own_stores(folders[1], tmp_path)[1])
    rows = np.flatnonzero(stores[1].index.session.str.startswith('t12')) # Recorded first, so not adapted yet
    for i, row in enumerate(rows): np.testing.assert_allclose(alone[i], both[row], rtol=1e-3, atol=1e-3)
    assert 0 < alone.provenance['learned'] <= both.provenance['learned']


def test_trials_on_the_device_give_the_same_weights(stores, trained):
    t = trainer(stores, 'gru', **{'data.shares': {'t12': .5, 't15': .5}, 'data.on_device': True})
    for i in range(6): t.train_step(*t.loader(i))
    for k, v in trained('gru')[1].model.state_dict().items(): assert torch.equal(t.model.state_dict()[k], v), k


@pytest.mark.parametrize('name', ['gru', 'transformer', 'zipformer'])
def test_a_stream_of_one_of_them(name):
    cfg = with_overrides(config(name), {'data.sessions': SESSIONS} | ({'model.causal': True} if name != 'gru' else {}))
    torch.manual_seed(0)
    model = build_model(cfg.model, 4, SESSIONS).eval()
    for p in model.parameters(): torch.nn.init.normal_(p, std=.1)
    x = np.random.default_rng(0).standard_normal((53, 256)).astype('float32')
    stream = EncoderStream(model, cfg, SESSIONS[3])
    found = np.concatenate([*(stream.push(piece) for piece in np.split(x, [3, 30])), stream.finish()])
    whole = model(torch.from_numpy(x)[None], [3]).log_softmax(-1)[0].detach().numpy()
    np.testing.assert_allclose(found, whole, rtol=1e-3, atol=1e-3)
    with pytest.raises(ValueError, match='expected .t, 256.'): stream.push(np.zeros((3, 512)))


@pytest.mark.parametrize('frozen', [False, True])
@pytest.mark.parametrize('name', NAMES)
def test_a_checkpoint_starts_another_participant(name, frozen, folders, tmp_path):
    """A checkpoint of t15 starts a run on t12 with 256 features: its layers begin as the identity, the other weights
    come from the checkpoint."""
    t15, t12 = (own_stores(folder, tmp_path) for folder in folders)
    first = trainer(t15, name, {})
    for i in range(3): first.train_step(*first.loader(i))
    first.save_best(tmp_path/'first.pt')
    given = {'train.init_checkpoint_path': tmp_path/'first.pt', 'train.frozen': frozen, 'train.lr_warmup_steps': 0,
             'train.lr_warmup_steps_day': 0}
    t = trainer(t12, name, {'t12': 256}, **given)
    before = {k: v.clone() for k, v in t.model.state_dict().items()}
    is_own = {k: k.startswith(('day_', 'participant_')) for k in before}
    for k, v in before.items():
        if not is_own[k]: assert torch.equal(v, first.model.state_dict()[k]), k
        elif 'weights' in k: assert (v == torch.eye(512)).all()
        else: assert (v == 0).all()
    for i in range(2): t.train_step(*t.loader(i))
    changed = {k for k, v in t.model.state_dict().items() if not torch.equal(v, before[k])}
    assert {k for k in before if is_own[k]} <= changed
    assert changed <= {k for k in before if is_own[k]} if frozen else len(changed) > 4


def test_a_frozen_model_without_own_layers_is_refused(folders, tmp_path):
    t15 = own_stores(folders[0], tmp_path)
    first = trainer(t15, 'transformer', {}, **{'model.day_layer': False})
    first.save_best(tmp_path/'first.pt')
    with pytest.raises(TrainingError, match='train.frozen = true leaves nothing to train'):
        trainer(t15, 'transformer', {}, **{'model.day_layer': False, 'train.frozen': True,
                                           'train.init_checkpoint_path': tmp_path/'first.pt'})


def test_a_checkpoint_of_both_starts_one(folders, trained, tmp_path):
    "The participant layer and the days of one participant are copied; a model without participant layers is refused."
    out, both = trained('gru')
    t15, t12 = (own_stores(folder, tmp_path) for folder in folders)
    t = trainer(t12, 'gru', {'t12': 256}, **{'train.init_checkpoint_path': out/'best.pt'})
    theirs = load_model(out/'best.pt')[0].state_dict()
    own = t.model.state_dict()
    assert torch.equal(own['participant_weights'][0], theirs['participant_weights'][0])
    assert torch.equal(own['day_weights'], theirs['day_weights'][2:])
    with pytest.raises(TrainingError, match='participant_weights is not in the model'):
        trainer(t15, 'gru', {}, **{'train.init_checkpoint_path': out/'best.pt'})


def test_refusals_in_one_line(folders, stores):
    for text, values in {
        'data.dataset_dir names 2 folders, one per participant, but model.participants is not set':
            {'data.dataset_dir': folders},
        'data.shares = {\'t15\': 1.0} must add up to 1 and have a part for each of model.participants, t12, t15':
            {'data.shares': {'t15': 1.}, 'model.participants': BOTH},
        'TensorFlow has only {}; set that, or train.framework=pytorch':
            {'model.participants': BOTH, 'train.framework': 'tensorflow'},
        'train.frozen is true, but train.init_checkpoint_path names no checkpoint': {'train.frozen': True},
        'audio.llm does not work with train.frozen = True; set that to False':
            {'train.frozen': True, 'train.init_checkpoint_path': 'first.pt', 'audio.llm': 'name/llm'},
        'takes the first half of the features for threshold crossings and the second for power, but found '
        'model.participants': {'model.participants': BOTH, 'augment.channel_masks': .2},
    }.items():
        with pytest.raises(ConfigError) as e: with_overrides(Config(), values)
        assert text in str(e.value) and '\n' not in str(e.value)
    with pytest.raises(TrainingError, match='sessions of t12 have 256 features, but model.participants has 128'):
        trainer(stores, participants={'t12': 128, 't15': 512})
    with pytest.raises(ConfigError, match='t12.2022.04.28: model.participants = .* has no t12'):
        trainer(stores, participants={'t15': 512})


def test_sessions_of_only_the_second_folder_are_refused_before_anything_is_computed(folders, tmp_path):
    values = {'data.dataset_dir': folders, 'model.participants': BOTH, 'data.sessions': SESSIONS[2:]}
    run = Run(tmp_path/'run', tmp_path/'work', SMALL | values, save=False)
    with pytest.raises(PipelineError, match=f'^data.sessions = t12.*: found none of them in {folders[0]}, the first '
                                            f'folder .*; use some of {SESSIONS[0]}, {SESSIONS[1]}, or'):
        run_stages(run)
    assert not list(tmp_path.rglob('*.yaml')) and not (tmp_path/'work').exists()


def test_runs_on_both_and_then_on_one(folders, tmp_path):
    """PER and WER of each participant, also for an LLM's and combined lists; the submission is for the first folder,
    and in a second run with that model for the other."""
    def execute(name, values):
        run = Run(tmp_path/'runs'/name, tmp_path/'work', SMALL | values)
        for stage in plan(run.cfg): execute_here(run, stage)
        metrics = {p.stem: json.loads(p.read_text())['metrics'] for p in (run.dir/'stages').glob('*.json')}
        return run, metrics, list(csv.DictReader((run.dir/'submission.csv').open()))

    theirs = {split: tmp_path/f'theirs_{split}.jsonl' for split in ('val', 'test')} # Always the same sentence
    for split, path in theirs.items():
        store = TrialStore.build(folders if split == 'val' else folders[0], split, tmp_path/f'{split}.arrow')
        said = [[Hypothesis('what is it', -1., -1., 3, -1.)]]*len(store)
        write_hypotheses(path, as_hypotheses(store.index, said, split, system='theirs'))
    both, metrics, rows = execute('both', {
        'data.dataset_dir': folders, 'model.participants': BOTH, 'data.shares': {'t12': .5, 't15': .5},
        'rescore.llm': tiny_lm(tmp_path/'lm', 'opt', ['what is it']), 'combine.sources': [*theirs.values()]})
    assert {'PER', 'PER t12', 'PER t15'} <= metrics['train'].keys() & metrics['infer'].keys()
    index = TrialStore.open(both.packed_dir/'val.arrow').index
    for stage in 'decode', 'rescore', 'combine':
        best = [hyps[0].text for hyps in read_nbest(both.nbest_path('val', stage))]
        edits, words = ({'t12': 0, 't15': 0} for _ in range(2))
        for row, text in zip(index.itertuples(), best):
            said = normalize_sentence(row.sentence).split()
            edits[row.session[:3]] += Levenshtein.distance(said, normalize_sentence(text).split())
            words[row.session[:3]] += len(said)
        for p in edits: assert metrics[stage][f'WER {p}'] == edits[p]/words[p], (stage, p)
        assert metrics[stage]['WER'] == sum(edits.values())/sum(words.values())
    given = {'infer.logits': [both.logits(split) for split in ('val', 'test')]}
    average = Run(tmp_path/'runs'/'average', tmp_path/'work', given, both.cfg)
    execute_here(average, 'ensemble')
    found = json.loads((average.dir/'stages'/'ensemble.json').read_text())['metrics']
    for figure in ('PER', 'PER t12', 'PER t15'): assert found[figure] == metrics['infer'][figure]
    assert len(rows) == 2 and len(TrialStore.open(both.packed_dir/'train.arrow')) == 24 # t15's first day has no test
    _, metrics, rows = execute('t12', {'data.dataset_dir': folders[1], 'infer.checkpoint': str(both.checkpoint)})
    assert len(rows) == 4 and 'WER' in metrics['decode'] and 'WER t12' not in metrics['decode']
