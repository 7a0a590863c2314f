"""The adversarial denoiser agrees with formulas made of PyTorch's own layers: values, gradients and their signs; its
costs, configuration and checkpoints."""

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from b2t_kaggle.config import load_config, preset, save_config, with_overrides
from b2t_kaggle.config.encoders.triple_gru import TripleGRUConfig
from b2t_kaggle.config.schema import ConfigError
from b2t_kaggle.core.ctc import n_frames
from b2t_kaggle.pytorch.checkpoint import load_model, save_atomic, save_official, to_official_args, to_official_state
from b2t_kaggle.pytorch.models import build_model
from b2t_kaggle.pytorch.models.gru import GRUDecoder
from b2t_kaggle.pytorch.models.triple_gru import NoisySpeechModel, TripleGRUDecoder, triple_loss
from b2t_kaggle.training.checkpoints import CheckpointError

SMALL = dict(
    neural_dim=6,
    n_units=8,
    n_classes=5,
    n_layers=2,
    patch_size=4,
    patch_stride=2,
    noise_units=3,
    rnn_dropout=0,
    input_dropout=0,
)


def random_model(seed=0, **kw):
    "A float64 model without zero weights."
    torch.manual_seed(seed)
    model = TripleGRUDecoder(TripleGRUConfig(**SMALL | kw), n_days=3)
    for p in model.parameters(): nn.init.normal_(p, std=p.shape[-1]**-0.5)
    return model.double().eval()


def batch(lengths, seed=0, neural_dim=6):
    g = torch.Generator().manual_seed(seed)
    n_bins = torch.tensor(lengths)
    return (
        torch.randn(len(lengths), max(lengths), neural_dim, generator=g, dtype=torch.float64),
        torch.randint(0, 3, (len(lengths),), generator=g),
        n_bins,
    )


def padded(model, x, day, n_bins, **kw):
    "The model's output with padded frames, as on an accelerator."
    model.frames = lambda x, day, n_bins: model._padded(x, day)
    try: return model(x, day, n_bins=n_bins, **kw)
    finally: del model.frames


def states(part, x):
    "GRU states of one trial `[T', I]`, computed by PyTorch."
    g = part.gru
    gru = nn.GRU(g.input_size, g.hidden_size, g.num_layers).double()
    return torch.func.functional_call(
        gru, dict(g.named_parameters()), (x[:, None], part.h0.expand(g.num_layers, 1, -1).contiguous())
    )[0][:, 0]


def by_formula(model, x, day, n_bins):
    "Clean logits, noisy logits and noise of each trial, without reversal."
    for xi, d, n in zip(x, day, n_bins):
        y = F.softsign(xi[:n] @ model.day_weights[d] + model.day_biases[d][0])
        size, stride = model.patch_size, model.patch_stride
        frames = torch.stack([y[s:s + size].flatten() for s in range(0, n - size + 1, stride)])
        noise = model.noise.out(states(model.noise, frames))
        yield model.clean.out(states(model.clean, frames - noise)), model.noisy.out(states(model.noisy, noise)), noise


@settings(max_examples=10, deadline=None)
@given(
    lengths=st.lists(st.integers(4, 15), min_size=1, max_size=4),
    noise_units=st.sampled_from([None, 1, 5]),
    seed=st.integers(0, 50),
)
def test_packed_padded_and_formula_agree(lengths, noise_units, seed):
    "All three outputs and every gradient, for trials of any length."
    model = random_model(seed, noise_units=noise_units)
    args = batch(lengths, seed)
    frames = n_frames(args[2], 4, 2)
    grads = []
    for outs in (
        model(*args[:2], n_bins=args[2], mode='full', grl_lambda=-1.0),
        padded(model, *args, mode='full', grl_lambda=-1.0),
    ):  # With −λ = 1, nothing is reversed
        for trial, n, want in zip(zip(*outs), frames, by_formula(model, *args), strict=True):
            for ours, theirs in zip(trial, want):
                torch.testing.assert_close(ours[:n], theirs, rtol=0, atol=1e-10)
        loss = sum((o[:n] ** 3).sum() for trial, n in zip(zip(*outs), frames) for o in trial)
        grads.append(torch.autograd.grad(loss, list(model.parameters())))
    grads.append(
        torch.autograd.grad(
            sum((o**3).sum() for trial in by_formula(model, *args) for o in trial), list(model.parameters())
        )
    )
    for (name, _), *g in zip(model.named_parameters(), *grads):
        for other in g[1:]: torch.testing.assert_close(g[0], other, rtol=1e-7, atol=1e-9, msg=name)


@pytest.mark.parametrize('strength', [0.5, 2, torch.tensor(0.25)])
def test_the_gradient_is_reversed_up_to_the_noise(strength):
    model = random_model()
    args = batch([12, 9])
    loss = sum((noisy**2).sum() for noisy in model(*args[:2], mode='full', grl_lambda=strength)[1])
    ours = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    plain = sum((noisy**2).sum() for _, noisy, _ in by_formula(model, args[0], args[1], torch.tensor([12, 12])))
    theirs = torch.autograd.grad(plain, list(model.parameters()), allow_unused=True)
    for (name, _), a, b in zip(model.named_parameters(), ours, theirs):
        if name.startswith('clean.'): assert a is None and b is None
        else:
            assert b.abs().max() > 1e-6, name
            torch.testing.assert_close(
                a, b if name.startswith('noisy.') else -float(strength) * b, rtol=1e-6, atol=1e-9, msg=name
            )


def test_inference_uses_only_the_clean_part(monkeypatch):
    model = random_model()
    args = batch([12, 9])
    clean = model(*args[:2], mode='full')[0]
    def refuse(*_): raise AssertionError('the adversary was asked')
    monkeypatch.setattr(NoisySpeechModel, 'forward', refuse)
    assert torch.equal(model(*args[:2]), clean)
    with pytest.raises(ValueError, match="mode is 'Full', expected 'inference' or 'full'"):
        model(*args[:2], mode='Full')


def test_cut_trials_continue():
    model = random_model()
    x, day, _ = batch([20, 20])
    whole = model(x, day)
    first, at = model(x[:, :10], day, return_state=True)  # Frames 0 … 3
    (clean, _, _), _ = model(x[:, 8:], day, mode='full', states=at, return_state=True)
    torch.testing.assert_close(torch.cat([first, clean], 1), whole, rtol=0, atol=1e-10)


def test_loss_is_the_weighted_sum():
    out = torch.randn(3, 6, 5), torch.randn(3, 6, 5), torch.randn(3, 6, 11)
    frames = torch.tensor([6, 1, 4])
    def ctc(logits): return logits.square().sum((1, 2))

    loss = triple_loss(out, ctc, frames, noisy_weight=0.2, noise_weight=0.001)['loss']
    for i, n in enumerate(frames):
        torch.testing.assert_close(
            loss[i], out[0][i].square().sum() + 0.2 * out[1][i].square().sum() + 0.001 * out[2][i, :n].square().mean()
        )
    changed = out[2].clone()
    changed[1, 1:] = 1e3  # After the end of the trial
    same = triple_loss((*out[:2], changed), ctc, frames, noisy_weight=0.2, noise_weight=0.001)['loss']
    assert torch.equal(same, loss)


def ctc_of(labels, frames):
    return lambda logits: F.ctc_loss(
        logits.float().log_softmax(-1).transpose(0, 1),
        labels,
        frames,
        torch.full((len(labels),), labels.shape[1]),
        reduction='none',
    )


@pytest.mark.parametrize('noise_units', [4, None])
@pytest.mark.parametrize('precision', ['float32', 'bfloat16'])
def test_training_lowers_the_loss(precision, noise_units):
    torch.manual_seed(0)
    cfg = TripleGRUConfig(**SMALL | dict(noise_units=noise_units, rnn_dropout=0.1, input_dropout=0.1))
    model = TripleGRUDecoder(cfg, n_days=3).train()
    x, day, n_bins = batch([30, 22, 26])
    labels = torch.tensor([[1, 2, 3], [2, 1, 4], [4, 3, 1]])
    frames = n_frames(n_bins, 4, 2)
    opt = torch.optim.Adam(model.parameters(), lr=0.02)
    losses = []
    for step in range(40):
        with torch.autocast('cpu', torch.bfloat16, enabled=precision == 'bfloat16'):
            out = model(x.float(), day, n_bins=n_bins, **model.training_args(step, 40))
        loss = model.training_losses(out, ctc_of(labels, frames), frames)['loss']
        assert loss.shape == (3,) and loss.dtype == torch.float32
        opt.zero_grad(); loss.mean().backward(); opt.step()
        assert all(p.grad.isfinite().all() and p.grad.dtype == torch.float32 for p in model.parameters())
        losses.append(ctc_of(labels, frames)(out[0].detach()).mean().item())
    assert losses[-1] < losses[0] / 3, losses


def test_autocast_follows_float32():
    torch.manual_seed(0)
    sizes = dict(neural_dim=64, n_units=256, n_classes=41, patch_size=14, patch_stride=4, noise_units=256)
    model = TripleGRUDecoder(TripleGRUConfig(**SMALL | sizes), n_days=3)
    nn.init.normal_(model.noise.out.weight, std=0.02)
    x, day, _ = batch([100] * 4, neural_dim=64)
    grads = []
    for on in (False, True):
        model.zero_grad()
        with torch.autocast('cpu', torch.bfloat16, enabled=on): out = model(x.float(), day, mode='full')
        model.training_losses(
            out, lambda logits: -logits.float().log_softmax(-1)[..., 3].sum(1), torch.full((4,), out[0].shape[1])
        )['loss'].sum().backward()
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert torch.cosine_similarity(*grads, dim=0) > 0.995


def test_a_new_model_equals_its_clean_part_on_the_whole_recording():
    torch.manual_seed(0)
    model = TripleGRUDecoder(TripleGRUConfig(**SMALL), n_days=3).double()
    x, day, _ = batch([12, 9])
    single = GRUDecoder(
        SMALL['neural_dim'], SMALL['n_units'], 3, SMALL['n_classes'], n_layers=2, patch_size=4, patch_stride=2
    ).double()
    single.load_state_dict(
        {k.removeprefix('clean.'): v for k, v in model.state_dict().items() if k.startswith(('clean.', 'day_'))}
    )
    torch.testing.assert_close(model(x, day), single(x, day))


def gru_size(n_in, n, layers):
    return 3 * n * (n_in + n + 2) + (layers - 1) * 3 * n * (2 * n + 2) + n  # With the initial state


@pytest.mark.parametrize('noise_units', [256, None])
def test_parameters_at_the_official_sizes(noise_units):
    with torch.device('meta'):
        model = build_model(with_overrides(preset('triple_gru'), {'noise_units': noise_units}).model, n_days=45)
    count = {part: sum(p.numel() for p in getattr(model, part).parameters()) for part in ('noise', 'clean', 'noisy')}
    read_out = 769 * 41
    noise = gru_size(7168, 256, 2) + 257 * 7168 if noise_units else gru_size(7168, 7168, 2)
    assert count == dict(noise=noise, clean=gru_size(7168, 768, 3) + read_out, noisy=gru_size(7168, 768, 2) + read_out)


def test_the_optimiser_finds_all_biases_by_name():
    "Biases are in the trainer's group without weight decay."
    names = [n for n, p in TripleGRUDecoder(TripleGRUConfig(**SMALL), 3).named_parameters() if p.dim() == 1]
    assert len(names) == 2 * 2 + 1 + 2 * 2 + 1 + 2 * 2 + 1 and all('gru.bias' in n or 'out.bias' in n for n in names)


def config(**kw):
    return with_overrides(
        preset('triple_gru'),
        {
            'neural_dim': 6,
            'n_units': 8,
            'n_layers': 2,
            'noise_units': 3,
            'data.sessions': ['t15.2023.08.11', 't15.2023.08.13'],
        }
        | kw,
    )


def test_configuration(tmp_path):
    cfg = config(rnn_trainable=False, input_trainable=False)
    save_config(cfg, tmp_path/'config.yaml')
    assert load_config(tmp_path/'config.yaml') == cfg
    model = build_model(cfg.model, 2)
    assert isinstance(model, TripleGRUDecoder)
    assert (
        model.noise.gru.hidden_size,
        model.clean.gru.hidden_size,
        model.clean.gru.num_layers,
        model.noisy.gru.hidden_size,
    ) == (3, 8, 2, 8)
    assert {n for n, p in model.named_parameters() if p.requires_grad} == {
        'noise.h0',
        'clean.h0',
        'noisy.h0',
        'clean.out.weight',
        'clean.out.bias',
        'noisy.out.weight',
        'noisy.out.bias',
        'noise.out.weight',
        'noise.out.bias',
    }
    official = preset('triple_gru').model
    assert (official.n_layers, official.n_units, official.noise_units, official.grl_lambda) == (
        3,
        768,
        256,
        0.5,
    )
    assert build_model(config(noise_units=None).model, 2).noise.gru.hidden_size == 14 * 6


@pytest.mark.parametrize(
    'key, value, message',
    [
        ('model.name', 'triple', "expected 'gru' or"),
        ('model.name', 'triple', "or 'triple_gru'"),
        ('noise_units', 0, 'model.noise_units'),
    ],
)
def test_bad_configuration(key, value, message):
    with pytest.raises(ConfigError, match=message): config(**{key: value})


def test_checkpoints(tmp_path):
    cfg = config()
    model = build_model(cfg.model, 2).eval()
    for p in model.parameters(): nn.init.normal_(p, std=0.2)
    save_atomic(dict(model_state_dict=model.state_dict(), config=cfg.dump()), tmp_path/'best.pt')
    again, c = load_model(tmp_path)
    x = torch.randn(2, 40, 6)
    day = torch.tensor([0, 1])
    assert c == cfg and torch.equal(again(x, day), model(x, day))
    save_atomic(dict(model_state_dict=model.state_dict(), config=config(noise_units=4).dump()), tmp_path/'best.pt')
    with pytest.raises(CheckpointError, match=r'noise.h0 has shape \[1, 1, 3\], expected \[1, 1, 4\]'):
        load_model(tmp_path)
    save_atomic(
        dict(model_state_dict=model.state_dict(), config=with_overrides(config(), {'model.name': 'gru'}).dump()),
        tmp_path / 'best.pt',
    )
    with pytest.raises(CheckpointError, match='gru.weight_ih_l0 is missing'): load_model(tmp_path)


def test_the_official_form_is_refused(tmp_path):
    cfg = config()
    model = build_model(cfg.model, 2)
    with pytest.raises(CheckpointError, match='model.name is triple_gru, which the official kit does not have'):
        save_official(model, cfg, tmp_path)
    with pytest.raises(CheckpointError, match='model.name is triple_gru'): to_official_args(cfg)
    with pytest.raises(CheckpointError, match='noise.h0: the official kit has no such weight'):
        to_official_state(model.state_dict())
    assert not list(tmp_path.iterdir())


def test_a_changing_strength_does_not_compile_again():
    "`torch.compile` notices at the second value that this number changes."
    torch._dynamo.reset()
    model = random_model()
    counter = torch._dynamo.testing.CompileCounter()
    x, day, _ = batch([12, 9])
    compiled = torch.compile(lambda f, noise, strength: model.noisy(f, noise, strength), backend=counter)
    counts = []
    for strength in (0.5, 0.1, 0.2, 0., 1.):
        f = model._padded(x, day)
        noisy = compiled(f, model.noise(f)[0], strength)
        want = model.noisy(f, model.noise(f)[0], strength)
        for a, b in zip(*(torch.autograd.grad(y.sum(), model.noise.out.bias) for y in (noisy, want))):
            torch.testing.assert_close(a, b)
        counts.append(counter.frame_count)
    assert counts[1:] == [counts[1]] * 4 and 0 < counts[0], counts
