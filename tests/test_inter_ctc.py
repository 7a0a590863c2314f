"""CTC losses of inner layers and posteriors that are fed back: against PyTorch's own GRU and CTC loss, for every
encoder with layers, in streams, behind a checkpoint."""
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from encoders import INNER, SESSIONS, config, open_toy, write_toy

from b2t_kaggle.config import Config, with_overrides
from b2t_kaggle.config.schema import ConfigError
from b2t_kaggle.devices.torch import pick_torch
from b2t_kaggle.pytorch.checkpoint import load_model
from b2t_kaggle.pytorch.frontend import Frontend
from b2t_kaggle.pytorch.models import build_model, encoder_class, model_names
from b2t_kaggle.pytorch.models.transformer import Transformer
from b2t_kaggle.pytorch.parallel import SingleDevice
from b2t_kaggle.pytorch.streaming import EncoderStream
from b2t_kaggle.pytorch.trainer import Trainer, _all_gradients, train
from b2t_kaggle.training.history import read_history
from b2t_kaggle.training.recipe import TrainingError

NO_FEEDBACK = {'model.self_condition': False}
NONE = NO_FEEDBACK | {'model.inter_ctc_layers': [], 'train.inter_ctc': 0}


@pytest.fixture(scope='module')
def stores(tmp_path_factory):
    folder = tmp_path_factory.mktemp('toy')
    write_toy(folder, n_trials=2)
    return open_toy(folder)


def trainer(stores, name, checkpoint=None, **changes):
    cpu = SingleDevice(pick_torch('cpu', 'float32'))
    return Trainer(*stores, config(name, **changes), cpu, checkpoint)


def model_of(name, **changes):
    "A model in evaluation mode, whose weights are large enough for posteriors to matter."
    torch.manual_seed(0)
    model = build_model(config(name, **changes).model, 2).eval()
    for p in model.parameters(): torch.nn.init.normal_(p, std=.3)
    return model


X = torch.randn(3, 60, 16, generator=torch.Generator().manual_seed(1))
DAY = torch.tensor([0, 1, 1])
N_BINS = torch.tensor([60, 44, 31])


def ctc(logits, rows, frames):
    return F.ctc_loss(logits.log_softmax(-1).transpose(0, 1), rows.labels, frames, rows.n_labels, reduction='none')


def test_all_encoders_with_layers_are_here():
    names = {name for name in model_names() if encoder_class(name).Config(name=name).n_inner_layers()}
    assert names == {name for name, _ in INNER.values()}


@pytest.mark.parametrize('directions', [1, 2])
def test_the_gru_is_one_gru_of_pytorch_for_each_layer(directions):
    "Posteriors go through the linear layer, are added to the layer's output, and read by the next layer."
    name = 'gru inside' if directions == 1 else 'bidirectional gru inside'
    model = model_of(name)
    f = model._padded(X[:1], DAY[:1])
    h0 = [model.h0] if directions == 1 else [model.h0, model.h0_reverse]
    y = f.x
    expected = []
    for i in range(3):
        layer = torch.nn.GRU(y.shape[-1], 32, bidirectional=directions == 2)
        ours = {k: v for k, v in model.gru.state_dict().items() if f'_l{i}' in k}
        layer.load_state_dict({k.replace(f'_l{i}', '_l0'): v for k, v in ours.items()})
        y = layer(y, torch.cat(h0).detach())[0]
        expected.append(model.out(y))
        y = y + model.feedback(expected[-1].softmax(-1))
    out = model(X[:1], DAY[:1], with_inner=True)
    for found, want in zip([*out.inner, out.out], expected):
        torch.testing.assert_close(found, want.transpose(0, 1), rtol=1e-4, atol=1e-5)
    without = model_of(name, **NONE)(X[:1], DAY[:1])
    assert not torch.allclose(without, out.out, atol=1e-2), 'what is fed back changes nothing, so this proves nothing'


@pytest.mark.parametrize('name', INNER)
def test_without_feedback_nothing_else_changes(name):
    "The same weights, and logits that are equal bit for bit; the inner ones are those of fewer layers."
    torch.manual_seed(3)
    plain = build_model(config(name, **NONE).model, 2).eval()
    torch.manual_seed(3)
    inside = build_model(config(name, **NO_FEEDBACK).model, 2).eval()
    assert list(plain.state_dict()) == list(inside.state_dict())
    for k, v in plain.state_dict().items(): assert torch.equal(v, inside.state_dict()[k]), k
    out = inside(X, DAY, n_bins=N_BINS, with_inner=True)
    assert torch.equal(out.out, plain(X, DAY, n_bins=N_BINS))
    assert torch.equal(inside(X, DAY, n_bins=N_BINS), out.out)
    assert [logits.shape for logits in out.inner] == [out.out.shape] * 2
    assert not torch.allclose(out.inner[0], out.inner[1], atol=1e-4)
    torch.manual_seed(3)
    fed_back = build_model(config(name).model, 2).state_dict()
    assert set(fed_back) - set(plain.state_dict()) == {'feedback.weight', 'feedback.bias'}
    for k, v in plain.state_dict().items(): assert torch.equal(v, fed_back[k]), f'{k} begins as another number'


@pytest.mark.parametrize('name', INNER)
def test_padding_changes_nothing(name, monkeypatch):
    "Nor how it is computed: without any padding, as on a processor, or with it, as on an accelerator."
    model = model_of(name)
    garbage = X.clone()
    for row, n in zip(garbage, N_BINS): row[n:] = 1e4
    results = [model(x, DAY, n_bins=N_BINS, with_inner=True) for x in (X, garbage)]
    for kind in (Frontend, Transformer): monkeypatch.setattr(kind, '_packed', kind._padded)
    results.append(model(garbage, DAY, n_bins=N_BINS, with_inner=True))
    first, *others = [[out.out, *out.inner] for out in results]
    for other in others:
        for a, b in zip(first, other):
            for i, n in enumerate(model.cfg.n_frames(N_BINS)):
                torch.testing.assert_close(a[i, :n], b[i, :n], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize('views', [0, .3])
@pytest.mark.parametrize('name', INNER)
def test_the_loss_is_the_sum(name, views, stores):
    "Of each trial, with F.ctc_loss; per label, and beside CR-CTC, which compares the last layer's logits."
    t = trainer(stores, name, cr_ctc=views, ctc_reduction='label')
    (part,), _ = t.loader(0)
    rows = part.two_views() if views else part
    x = t.augment.eval(rows.x)
    given = t.model.training_args(0, 100)
    losses, = _all_gradients(t, [part])
    assert t.model.feedback.weight.grad.abs().sum() > 0
    out = t.model(x, rows.day, n_bins=rows.n_bins, with_inner=True, **given)
    frames = t.cfg.model.n_frames(rows.n_bins)
    last = t.model.training_losses(out.out, lambda logits: ctc(logits, rows, frames) / rows.n_labels, frames)
    inner = sum(w * ctc(logits, rows, frames) for w, logits in zip((.25, .5), out.inner)) / rows.n_labels
    n = 2 if views else 1
    for found, want in (losses['inter_ctc'], inner), (losses['loss'], last + inner):
        torch.testing.assert_close(found, want.detach().view(-1, n).mean(1), rtol=1e-4, atol=1e-5)
    if views: torch.testing.assert_close(losses['consistency'], torch.zeros(4), rtol=0, atol=1e-6) # Nothing is random


@pytest.mark.parametrize('name', INNER)
def test_a_checkpoint_goes_on_exactly_and_opens(name, stores, tmp_path):
    "Three steps, a checkpoint and three more are six; what is saved is read as the same model."
    whole = trainer(stores, name)
    for i in range(6): whole.train_step(*whole.loader(i))
    first = trainer(stores, name)
    for i in range(3): first.train_step(*first.loader(i))
    first.save_last(tmp_path/'last.pt')
    rest = trainer(stores, name, tmp_path/'last.pt')
    for i in range(3, 6): rest.train_step(*rest.loader(i))
    for k, v in whole.model.state_dict().items(): assert torch.equal(v, rest.model.state_dict()[k]), k
    rest.save_best(tmp_path/'best.pt')
    model, cfg = load_model(tmp_path/'best.pt')
    assert cfg.model == config(name).model and cfg.model.self_condition
    assert torch.equal(model(X, DAY, n_bins=N_BINS), whole.model.eval()(X, DAY, n_bins=N_BINS))


def test_a_model_starts_one_without_its_feedback_and_says_so(stores, tmp_path, capsys):
    "The other way round it is refused."
    for name, changes in (('with', {}), ('without', NO_FEEDBACK)):
        t = trainer(stores, 'gru inside', **changes)
        t.train_step(*t.loader(0))
        t.save_best(tmp_path/f'{name}.pt')
    t = trainer(stores, 'gru inside', init_checkpoint_path=tmp_path/'with.pt', **NO_FEEDBACK)
    line = f'{tmp_path/"with.pt"}: the model of this run has no place for feedback.weight, feedback.bias; not taken\n'
    assert line in capsys.readouterr().out
    theirs = load_model(tmp_path/'with.pt')[0].state_dict()
    for k, v in t.model.state_dict().items(): assert torch.equal(v, theirs[k]), k
    with pytest.raises(TrainingError, match='feedback.weight is missing, expected .*make the model group'):
        trainer(stores, 'gru inside', init_checkpoint_path=tmp_path/'without.pt')


@pytest.mark.parametrize('name', [name for name in INNER if build_model(config(name).model, 2).is_causal])
def test_a_stream_equals_the_whole(name, tmp_path):
    model = model_of(name)
    cfg = with_overrides(config(name), {'data.sessions': list(SESSIONS)})
    stream = EncoderStream(model, cfg, SESSIONS[1])
    x = X[0, :53].numpy()
    streamed = np.concatenate([*(stream.push(piece) for piece in np.split(x, [1, 5, 6, 30, 31])), stream.finish()])
    whole = model(X[:1, :53], [1]).log_softmax(-1)[0].detach().numpy()
    np.testing.assert_allclose(streamed, whole, rtol=1e-4, atol=1e-4)


def test_it_trains_and_has_a_curve(stores, tmp_path):
    kw = dict(num_training_batches=60, batches_per_val_step=60)
    result = train(*stores, config('gru inside', **kw), tmp_path, progress=False)
    history = read_history(tmp_path/'history.csv')
    assert result['val_per'] < .5
    assert (history.inter_ctc > 0).all() and history.inter_ctc.iloc[-1] < .5 * history.inter_ctc.iloc[0]


def refusal(**values):
    values = {k.replace('_', '.', 1): v for k, v in values.items()}
    with pytest.raises(ConfigError) as e: with_overrides(Config(), values)
    return str(e.value)


def test_refusals_in_one_line():
    for text, values in {
        'train.inter_ctc = 0.3, but model.inter_ctc_layers names no layer': dict(train_inter_ctc=.3),
        'does nothing without train.inter_ctc or model.self_condition': dict(model_inter_ctc_layers=[2]),
        'must be different numbers from 1 to 4': dict(model_inter_ctc_layers=[5], train_inter_ctc=.3),
        'has 2 weights, but model.inter_ctc_layers = [3] names 1':
            dict(model_inter_ctc_layers=[3], train_inter_ctc=[.1, .2]),
        'model.inter_ctc_layers = [3]: TensorFlow has logits of the last layer alone':
            dict(model_inter_ctc_layers=[3], train_inter_ctc=.3, train_framework='tensorflow'),
        'audio.llm is set, with which train.inter_ctc = 0.3 does not work; set it to 0.0':
            dict(model_inter_ctc_layers=[3], train_inter_ctc=.3, audio_llm='name/llm'),
    }.items():
        message = refusal(**values)
        assert text in message and '\n' not in message
