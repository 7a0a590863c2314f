"""Requirements of every PyTorch encoder. All encoders in the registry are tested, and the variants are tested for
everything that their fields may change."""
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from copies import call_as_ranks
from encoders import (
    FEW,
    LEARNED_BY_100,
    SESSIONS,
    VARIANTS,
    config,
    open_toy,
    train_as_rank,
    train_until_right,
    with_steps,
    write_toy,
)
from killed import ask_before_each_step, kill_after_a_checkpoint

from b2t_kaggle.config.encoders.encoder import encoders_in
from b2t_kaggle.devices.torch import pick_torch
from b2t_kaggle.pytorch.augment import Augment
from b2t_kaggle.pytorch.checkpoint import load_file, load_model, save_official
from b2t_kaggle.pytorch.frontend import Frontend
from b2t_kaggle.pytorch.inference import infer
from b2t_kaggle.pytorch.models import build_model
from b2t_kaggle.pytorch.parallel import SingleDevice
from b2t_kaggle.pytorch.streaming import EncoderStream
from b2t_kaggle.pytorch.trainer import Trainer, train
from b2t_kaggle.training.checkpoints import CheckpointError
from b2t_kaggle.training.history import read_history

NAMES = encoders_in('pytorch')
NAMES_AND_VARIANTS = [*NAMES, *VARIANTS]


@pytest.fixture(scope='module')
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp('toy')
    write_toy(folder)
    open_toy(folder)
    return folder


@pytest.fixture(scope='module')
def trained(data, tmp_path_factory):
    "Folder and result of an uninterrupted training, by encoder."
    runs = {}
    def get(name):
        if name not in runs:
            out = tmp_path_factory.mktemp(name.replace(' ', '_'))
            runs[name] = train_until_right(train, data, out, config(name))
        return runs[name]
    return get


@pytest.mark.parametrize('name', NAMES_AND_VARIANTS)
def test_overfits_a_toy(name, trained):
    _, result = trained(name)
    assert result['val_per'] == 0
    assert result['step'] == 100 or name not in LEARNED_BY_100


@pytest.mark.parametrize('name', NAMES_AND_VARIANTS)
def test_the_layer_that_reads_patches_has_these_parameters(name):
    model = build_model(config(name).model, 2)
    names = [n for n, _ in model.named_parameters()]
    assert all(any(n.startswith(begin) for n in names) for begin in model.patch_layer)
    assert bool(model.patch_layer) or name not in ('gru', 'triple_gru', 'transformer', 'mamba', 'zipformer')


@pytest.mark.parametrize('where', ['processor', 'accelerator'])
@pytest.mark.parametrize('name', NAMES_AND_VARIANTS)
def test_padding_changes_nothing(name, where, monkeypatch):
    """Bins after a trial's end are garbage here, even NaN. Both implementations, for a CPU and for an accelerator, are
    tested in training and in evaluation."""
    if where == 'accelerator': monkeypatch.setattr(Frontend, '_packed', Frontend._padded)
    cfg = config(name)
    torch.manual_seed(0)
    model = build_model(cfg.model, 2)
    for p in model.parameters(): torch.nn.init.normal_(p, std=0.3)
    n_bins = torch.tensor([60, 31, 44])
    x = torch.randn(3, 60, 16)
    garbage = x.clone()
    for row, n in zip(garbage, n_bins): row[n:] = 1e4 * torch.randn_like(row[n:])
    garbage[1, 40] = torch.inf
    garbage[2, 50] = torch.nan
    day = torch.tensor([0, 1, 1])
    frames = cfg.model.n_frames(n_bins)
    model.train()
    arguments = model.training_args(0, 10)
    in_training = []
    for bins in (x, garbage):
        torch.manual_seed(1)  # For layers that are skipped at random
        in_training.append(model.training_logits(model(bins, day, n_bins=n_bins, **arguments)))
    for i, n in enumerate(frames): torch.testing.assert_close(*(y[i, :n] for y in in_training), rtol=1e-5, atol=1e-5)
    model.eval()
    clean = model(x, day, n_bins=n_bins)
    dirty = model(garbage, day, n_bins=n_bins)
    for i, n in enumerate(frames):
        torch.testing.assert_close(clean[i, :n], dirty[i, :n], rtol=1e-5, atol=1e-5)
        alone = model(x[i:i+1, :n_bins[i]], day[i:i+1], n_bins=n_bins[i:i+1])
        torch.testing.assert_close(clean[i, :n], alone[0, :n], rtol=1e-4, atol=1e-4)
    assert cfg.model.n_frames(60) == clean.shape[1], (
        'the configuration says another number of frames than the model gives'
    )


def train_in_a_copy(allowed, folder, cfg, out, n_threads):
    torch.set_num_threads(n_threads)
    ask_before_each_step(Trainer, allowed)
    train(*open_toy(folder), cfg, out, progress=False)


@pytest.mark.parametrize('name', NAMES)
def test_continues_exactly_after_a_kill(name, data, trained, tmp_path):
    "After SIGKILL at a checkpoint, the final weights equal those of an uninterrupted run, bit for bit."
    without_kill, result = trained(name)
    cfg = with_steps(config(name), result['step'])
    arguments = data, cfg, tmp_path, torch.get_num_threads()
    kill_after_a_checkpoint(train_in_a_copy, arguments, tmp_path/'last.pt', steps=50)
    step = load_file(tmp_path/'last.pt')['step']
    train(*open_toy(data), cfg, tmp_path, progress=False)
    again, never = (load_file(folder/'last.pt') for folder in (tmp_path, without_kill))
    assert 0 < step < again['step'] == never['step'] == result['step']
    for k, v in never['model_state_dict'].items(): assert torch.equal(v, again['model_state_dict'][k]), k


@pytest.mark.parametrize('name', NAMES_AND_VARIANTS)
def test_saves_and_loads(name, data, trained, tmp_path):
    "Inference from `best.pt` equals the model in memory."
    out, _ = trained(name)
    model, cfg = load_model(out/'best.pt')
    assert type(model).Config is type(cfg.model) and cfg.model == config(name).model
    store, _ = open_toy(data)
    logits = infer(out/'best.pt', store, tmp_path/'logits.arrow', 'cpu', 'float32', batch_size=3, progress=False)
    for i in (0, len(store) - 1):
        x = Augment(cfg.augment, 0).eval(torch.tensor(np.array(store[i].features))[None])
        alone = model(x, [int(store.day[i])]).log_softmax(-1)[0].detach()
        torch.testing.assert_close(torch.from_numpy(logits[i]), alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize('name', NAMES_AND_VARIANTS)
def test_official_form_or_refusal(name, trained, tmp_path):
    model, cfg = load_model(trained(name)[0]/'best.pt')
    if reason := cfg.model.no_official_form():
        with pytest.raises(CheckpointError, match=f'{reason}, which the official kit does not have'):
            save_official(model, cfg, tmp_path)
        return
    back, _ = load_model(save_official(model, cfg, tmp_path))
    for k, v in model.state_dict().items(): assert torch.equal(v, back.state_dict()[k]), k


@pytest.mark.parametrize('name', NAMES)
def test_accumulated_gradients(name, data):
    "A batch in two parts has the losses and the gradient of the whole batch."
    results = []
    for accumulate in (1, 2):
        cfg = config(name, accumulate=accumulate)
        trainer = Trainer(*open_toy(data), cfg, SingleDevice(pick_torch('cpu', 'float32')))
        steps = [trainer.train_step(*trainer.loader(i)) for i in range(3)]
        results.append(([s.losses.mean() for s in steps], [s.grad_norm for s in steps]))
    for one, parts in zip(*results): assert parts == pytest.approx(one, rel=2e-3)


@pytest.fixture(scope='module')
def in_two_processes(request, data, tmp_path_factory):
    """A folder for each encoder. One pair of processes trains all of them, because starting it takes longer than the
    steps."""
    names = [item.callspec.params['name'] for item in request.session.items
             if item.name.startswith('test_two_processes[')]
    out = tmp_path_factory.mktemp('pair')
    assert call_as_ranks(2, train_as_rank, data, out, names) == 0
    return out


@pytest.mark.parametrize('name', NAMES)
def test_two_processes(name, data, in_two_processes, tmp_path):
    "DistributedDataParallel with gloo takes the steps of one process; test_trainer tests `launch` itself."
    one = train(*open_toy(data), config(name, **FEW), tmp_path, progress=False)
    two = load_file(in_two_processes/name/'last.pt')
    history = read_history(in_two_processes/name/'history.csv')
    assert two['step'] == one['step'] == 6
    assert history.val_loss.dropna().iloc[-1] == pytest.approx(one['val_loss'], rel=1e-3)


@pytest.mark.parametrize('name', NAMES_AND_VARIANTS)
def test_causal_encoders_stream(name, data, trained):
    "Bins in pieces of any length give the frames of the whole trial; an encoder that is not causal raises an error."
    model, cfg = load_model(trained(name)[0]/'best.pt')
    store, _ = open_toy(data)
    x = np.array(store[3].features, dtype=np.float32)
    if not model.is_causal:
        with pytest.raises(NotImplementedError, match=f'model.name = {cfg.model.name}: this model does not stream'):
            EncoderStream(model, cfg, SESSIONS[0])
        return
    stream = EncoderStream(model, cfg, store.index.session[3])
    pieces = [stream.push(p) for p in np.split(x, [1, 5, 6, 30, 31])]
    streamed = np.concatenate([*pieces, stream.finish()])
    whole = model(Augment(cfg.augment, 0).eval(torch.from_numpy(x)[None]), [int(store.day[3])]).log_softmax(-1)[0]
    np.testing.assert_allclose(streamed, whole.detach().numpy(), rtol=1e-4, atol=1e-4)


def test_names_equal_file_names():
    files = {p.stem for p in (Path(__file__).parent.parent/'b2t_kaggle'/'pytorch'/'models').glob('*.py')}
    assert set(NAMES) >= files - {'__init__', 'encoder'}
    assert {'gru', 'triple_gru'} <= set(NAMES)


@pytest.mark.parametrize('name', [n for n in NAMES_AND_VARIANTS if build_model(config(n).model, 2).is_causal])
def test_from_bins_to_words(name, data, trained, tmp_path):
    "A stream of bins gives partial words, and finally the n-best of the whole trial."
    from b2t_kaggle.decoding.decoder import LexiconBeamDecoder
    from b2t_kaggle.decoding.streaming import Stream
    from b2t_kaggle.lm.automaton import Automaton
    from b2t_kaggle.lm.ngram import build_ngram
    model, cfg = load_model(trained(name)[0]/'best.pt')
    store, _ = open_toy(data)
    whole = infer(trained(name)[0]/'best.pt', store, tmp_path/'logits.arrow', 'cpu', 'float32', progress=False)
    lexicon = {'a': [['AA']], 'b': [['AE']], 'ab': [['AA', 'AE']]}
    decoder = LexiconBeamDecoder(
        lexicon, Automaton.load(build_ngram(['a b', 'ab a'], tmp_path / 'lm.arpa', order=2)), nbest=3
    )

    def padded(log_probs): return np.pad(log_probs, ((0, 0), (0, 41 - log_probs.shape[1])), constant_values=-30.)

    class Padded(EncoderStream):
        "Pads the toy's 5 classes to the decoder's 41."
        def push(self, bins): return padded(super().push(bins))
        def finish(self): return padded(super().finish())

    for i in (0, 3):
        encoder, stream, partial = Padded(model, cfg, store.index.session[i]), Stream(decoder), []
        for piece in np.array_split(np.array(store[i].features), 7):
            stream.push(encoder.push(piece))
            partial.append(stream.partial())
        stream.push(encoder.finish())
        hyps = stream.finish()
        assert all(isinstance(words, str) for words in partial)
        expected = decoder.decode(padded(whole[i]))
        assert [h.text for h in hyps] == [h.text for h in expected]
        assert [h.total for h in hyps] == pytest.approx([h.total for h in expected], abs=1e-2)
