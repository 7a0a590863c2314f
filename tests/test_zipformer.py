"""The Zipformer agrees with icefall's numbers, and with formulas if these are not available.

`shared/zipformer` beside this repository holds results of icefall's own modules: each stack, each gradient, and each
part that is randomly skipped.
"""
import json
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from encoders import config, open_toy, write_toy

from b2t_kaggle.devices.torch import pick_torch
from b2t_kaggle.pytorch.models import build_model
from b2t_kaggle.pytorch.models.zipformer import Conv2dSubsampling, Zipformer2
from b2t_kaggle.pytorch.models.zipformer.attention import (
    CompactRelPositionalEncoding,
    RelPositionMultiheadAttentionWeights,
)
from b2t_kaggle.pytorch.models.zipformer.bypass import BypassModule, SimpleDownsample, SimpleUpsample
from b2t_kaggle.pytorch.models.zipformer.convolution import ChunkCausalDepthwiseConv1d
from b2t_kaggle.pytorch.parallel import SingleDevice
from b2t_kaggle.pytorch.scaling import Balancer, ScheduledFloat, Whiten, set_batch_count
from b2t_kaggle.pytorch.trainer import Trainer

SHARED = Path(__file__).parents[2]/'shared'/'zipformer'
needs_reference = pytest.mark.skipif(not SHARED.exists(), reason='needs ../shared/zipformer: figures made with icefall')


class Figures:
    "A file's arrays as tensors, and its texts as decoded JSON."
    def __init__(self, name):
        self.file = np.load(SHARED/f'{name}.npz')

    def __getitem__(self, key):
        array = self.file[key]
        return json.loads(str(array)) if array.dtype.kind == 'U' else torch.from_numpy(array.copy())

    def __contains__(self, key): return key in self.file.files

    def below(self, prefix):
        "Keys with this prefix, without it."
        return [k.removeprefix(prefix) for k in self.file.files if k.startswith(prefix)]


figures = cache(Figures)


def tiny(causal=False, **changes):
    "Front end and encoder with the reference's weights, in evaluation mode."
    f = figures('encoder_tiny')
    sizes = f['config']
    state = {k: f[k] for k in f['state_keys']}
    if causal:
        state = {k: v for k, v in state.items() if k not in set(f['causal_without'])}
        state |= {k: f[f'causal.{k}'] for k in f.below('causal.')}
    front = Conv2dSubsampling(**sizes['subsampling'])
    encoder = Zipformer2(**{k: tuple(v) if isinstance(v, list) else v for k, v in sizes['encoder'].items()},
                         causal=causal, **changes)
    model = torch.nn.ModuleDict(dict(subsampling=front, encoder=encoder))
    model.load_state_dict(state)
    return model.eval()


def encode(model, x, lens, masked=True):
    "Frames, encoder output and output lengths of a batch of filter banks."
    frames, lens = model['subsampling'](x, lens)
    padding = torch.arange(frames.shape[1]) >= lens[:, None]
    y, y_lens = model['encoder'](frames.transpose(0, 1), lens, padding if masked else None)
    return frames, y.transpose(0, 1), y_lens


def outputs_of(model, names, run):
    "Outputs of modules during a run, by name."
    found = {}
    hooks = [model.get_submodule(name).register_forward_hook(lambda m, args, y, name=name: found.update({name: y}))
             for name in names]
    with torch.no_grad(): run()
    for h in hooks: h.remove()
    return found


def close(a, b, tolerance=1e-5):
    torch.testing.assert_close(a.detach(), b, rtol=0, atol=tolerance)


def relatively_close(a, b, tolerance, what=''):
    deviation = float((a.detach() - b).abs().max() / b.abs().max().clamp(min=1e-20))
    assert deviation < tolerance, (what, deviation)


# Forward

@needs_reference
def test_every_stack_and_every_part():
    f = figures('encoder_tiny')
    model = tiny()
    inner = f.below('inner.')
    stacks = [f'encoder.encoders.{i}' for i in range(6)]
    front = ['subsampling.conv', 'subsampling.convnext', 'subsampling.out']
    results = []
    found = outputs_of(model, inner + stacks + front, lambda: results.append(encode(model, f['x'], f['lens'])))
    frames, out, lens = results[0]
    for name in inner: close(found[name], f[f'inner.{name}'])
    for i, name in enumerate(stacks): close(found[name], f[f'stack_{i}'])
    for name, key in zip(front, ('embed_conv', 'embed_convnext', 'embed_out')):
        close(found[name] if key == 'embed_out' else found[name][:1, :, :4], f[key])
    close(frames, f['embed'])
    close(out, f['out'])
    assert torch.equal(lens, f['out_lens'])


@needs_reference
def test_a_trial_without_a_mask():
    f = figures('encoder_tiny')
    with torch.no_grad(): _, out, lens = encode(tiny(), f['single_x'], f['single_lens'], masked=False)
    close(out, f['single_out'])
    assert torch.equal(lens, f['single_out_lens'])


@needs_reference
def test_chunks():
    f = figures('encoder_tiny')
    model = tiny(causal=True)
    for i, (chunk, left) in enumerate(f['causal_cases']):
        model['encoder'].chunk_size = (chunk,)
        model['encoder'].left_context_frames = (left,)
        names = [f'encoder.encoders.{j}' for j in range(6)] if i == 0 else []
        results = []
        found = outputs_of(model, names, lambda: results.append(encode(model, f['x'], f['lens'])))
        for j, name in enumerate(names): close(found[name], f[f'causal_stack_{j}'])
        close(results[0][1], f[f'causal_out_{i}'])


@needs_reference
def test_streaming():
    f = figures('encoder_tiny')
    model = tiny(causal=True, chunk_size=(8,), left_context_frames=(24,))
    front, encoder = model['subsampling'], model['encoder']
    x = f['stream_x']
    left_pad = front.get_init_states(2)
    states = encoder.get_init_states(2)
    pieces = []
    with torch.no_grad():
        for n in range(8):
            part = x[:, 16*n:16*n + 29]
            frames, lens, left_pad = front.streaming_forward(part, torch.tensor([29, 29]), left_pad)
            unseen = (torch.arange(-24, 8) < -8*n).expand(2, -1)
            y, lens, states = encoder.streaming_forward(frames.transpose(0, 1), lens, states, unseen)
            pieces.append((frames, y.transpose(0, 1)))
        whole = encode(model, x, torch.tensor([141, 141]), masked=False)[1]
    close(torch.cat([p[0] for p in pieces], 1), f['stream_embed'])
    close(torch.cat([p[1] for p in pieces], 1), f['stream_out'])
    close(whole, f['stream_offline_out'])
    close(left_pad, f['stream_embed_left_pad'])
    for i, state in enumerate(states): close(state, f[f'stream_state_{i:02}'])
    assert len(states) == 42


# Backward

RATES = ('attention_skip_rate', 'conv_skip_rate', 'const_attention_rate', 'ff2_skip_rate', 'ff3_skip_rate', 'skip_rate',
         'pos_emb_skip_rate', 'layerdrop_rate', 'dropout_p', 'p')


def set_number(module, name, value):
    "Replace a number that may be scheduled by a constant."
    if isinstance(getattr(module, name), torch.nn.Module): delattr(module, name)
    setattr(module, name, value)


def training_model(**settings):
    "A model in training mode without randomness, Balancer or Whiten, which keeps all channels."
    model = tiny(**settings).train()
    model['encoder'].encoder_unmasked_dim = model['encoder'].encoder_dim
    for m in list(model.modules()):
        for name in RATES:
            if hasattr(m, name): set_number(m, name, 0.0)
        if isinstance(m, Balancer): set_number(m, 'prob', 0.0)
        if isinstance(m, Whiten): m.min_prob = m.max_prob = m.prob = 0.0
    return model


def gradients(model):
    "The loss of the reference, and its gradients with respect to the filter banks and each parameter."
    f = figures('encoder_tiny')
    x = f['x'].requires_grad_()
    loss = (encode(model, x, f['lens'])[1] * figures('encoder_gradients')['weights']).sum()
    loss.backward()
    return loss, x.grad, {k: p.grad for k, p in model.named_parameters()}


@needs_reference
def test_gradients():
    g = figures('encoder_gradients')
    loss, x_grad, found = gradients(training_model())
    relatively_close(loss, g['loss'], 1e-5)
    relatively_close(x_grad, g['x_grad'], 1e-3)
    assert {k for k, v in found.items() if v is None} == set(g['no_gradient'])
    for k in g.below('grad.'): relatively_close(found[k], g[f'grad.{k}'], 1e-3, k)
    assert len(g.below('grad.')) == len(found) - 7


@needs_reference
def test_gradients_of_chunks():
    g = figures('encoder_gradients')
    loss, x_grad, found = gradients(training_model(causal=True, chunk_size=(8,), left_context_frames=(24,)))
    relatively_close(loss, g['causal_loss'], 1e-5)
    relatively_close(x_grad, g['causal_x_grad'], 1e-3)
    for k in g.below('causal_grad.'): relatively_close(found[k], g[f'causal_grad.{k}'], 1e-3, k)


@needs_reference
def test_gradients_that_balancer_and_whiten_edit():
    g = figures('encoder_gradients')
    model = training_model()
    set_batch_count(model, float(g['edited_batch_count']))
    whitens = {name: m for name, m in model.named_modules() if isinstance(m, Whiten)}
    for m in model.modules():
        if hasattr(m, 'scale_min'): set_number(m, 'scale_min', 0.0)
        if isinstance(m, Balancer): m.prob = 1.0
        if isinstance(m, Whiten): m.min_prob, m.max_prob, m.prob = 0.025, 0.25, 1.0
    _, x_grad, found = gradients(model)
    relatively_close(x_grad, g['edited_x_grad'], 1e-3)
    for k in g.below('edited.'): relatively_close(found[k], g[f'edited.{k}'], 1e-3, k)
    assert {name for name, m in whitens.items() if m.prob == 0.25} == set(g['edited_whiten_fired'])
    assert {name for name, m in whitens.items() if m.prob == 0.025} == set(g['edited_whiten_not_fired'])


def skip_always(model, part):
    "Always skip a part that is skipped at random."
    for m in model.modules():
        if part == 'bypass_skip_rate' and hasattr(m, 'bypass'): m.bypass.skip_rate = 1.0
        elif hasattr(m, part): setattr(m, part, 1.0)


@needs_reference
@pytest.mark.parametrize('part', ['none', 'attention_skip_rate', 'conv_skip_rate', 'ff2_skip_rate', 'ff3_skip_rate',
                                  'const_attention_rate', 'bypass_skip_rate', 'pos_emb_skip_rate', 'layerdrop_rate'])
def test_a_random_part_is_always_skipped(part):
    f = figures('encoder_tiny')
    model = training_model()
    skip_always(model, part)
    close(encode(model, f['x'], f['lens'])[1], figures('encoder_gradients')[f'rate1.{part}'])


def draw(monkeypatch, shape, *given):
    "Make `torch.rand` return these values, one after another, for this shape."
    rand = torch.rand
    given = iter(given)
    def drawn(*size, **options):
        size = tuple(size[0]) if size and not isinstance(size[0], int) else size
        return next(given) if size == shape else rand(size, **options)
    monkeypatch.setattr(torch, 'rand', drawn)


@needs_reference
@pytest.mark.parametrize('which, draws', [('both', (0, 0)), ('second', (1, 0)), ('neither', (1, 1))])
def test_channels_that_trials_lack(monkeypatch, which, draws):
    f = figures('encoder_tiny')
    model = training_model()
    model['encoder'].encoder_unmasked_dim = tuple(f['config']['encoder']['encoder_unmasked_dim'])
    draw(monkeypatch, (1, 3, 1), *(torch.full((1, 3, 1), float(v)) for v in draws))
    close(encode(model, f['x'], f['lens'])[1], figures('encoder_gradients')[f'rate1.feature_mask_{which}'])


# Settings

@needs_reference
def test_schedules_and_settings():
    "All scheduled numbers, and all settings of limits, norms and dropout, by the path of their module."
    f = figures('encoder_tiny')
    sizes = f['config']
    falling = ScheduledFloat((0.0, 0.3), (20000.0, 0.1))
    front = Conv2dSubsampling(**sizes['subsampling'] | dict(dropout=falling))
    model = torch.nn.ModuleDict(dict(subsampling=front, encoder=Zipformer2(**sizes['encoder'])))
    scheduled = {}
    for path, expected in f['schedules'].items():
        found = model.get_submodule(path.rpartition('.')[0])
        found = getattr(found, path.rpartition('.')[2])
        if isinstance(found, ScheduledFloat):
            scheduled[path] = found
            assert found.default == expected['default'], path
            assert np.allclose(found.schedule.pairs, expected['pairs'], rtol=1e-12), path
        else: assert found == pytest.approx(expected, rel=1e-12), path
    assert set(scheduled) == {k for k, m in model.named_modules() if isinstance(m, ScheduledFloat)}


@needs_reference
def test_names_of_parameters():
    f = figures('encoder_tiny')
    for causal in (False, True):
        missing, unknown = tiny(causal).load_state_dict({k: f[k] for k in f['state_keys']}, strict=False)
        assert bool(missing) == bool(unknown) == causal


def test_parameters_of_the_published_sizes():
    def count(layers, feedforward, width, unmasked):
        with torch.device('meta'):
            front = Conv2dSubsampling(80, 192)
            encoder = Zipformer2(
                downsampling_factor=(1, 2, 4, 8, 4, 2), num_encoder_layers=layers, feedforward_dim=feedforward,
                encoder_dim=width, encoder_unmasked_dim=unmasked, num_heads=(4, 4, 4, 8, 4, 4), query_head_dim=32,
                pos_head_dim=4, value_head_dim=12, pos_dim=48, cnn_module_kernel=(31, 31, 15, 15, 15, 31),
            )
        return sum(p.numel() for m in (front, encoder) for p in m.parameters())
    assert count(2, (512, *5*[768]), (192, *5*[256]), 192) == 21_989_779
    assert count((2, 2, 3, 4, 3, 2), (512, 768, 1024, 1536, 1024, 768), (192, 256, 384, 512, 384, 256),
                 (192, 192, 256, 256, 256, 192)) == 63_994_103
    assert count((2, 2, 4, 5, 4, 2), (512, 768, 1536, 2048, 1536, 768), (192, 256, 512, 768, 512, 256),
                 (192, 192, 256, 320, 256, 192)) == 146_625_594


# Individual parts

def units(): return figures('scaling')


def load(module, prefix, names):
    "Load the arrays of a unit into a module, and return it."
    with torch.no_grad():
        for ours, theirs in names.items(): module.get_parameter(ours).copy_(units()[f'{prefix}.{theirs}'])
    return module


@needs_reference
@pytest.mark.parametrize('ds, T', [(2, 9), (4, 9), (8, 3), (2, 8)])
def test_downsample_and_upsample(ds, T):
    unit = f'downsample.{ds}_{T}'
    x = units()[f'{unit}.x'].requires_grad_()
    down = load(SimpleDownsample(5, ds, 0.0), unit, dict(bias='bias'))
    y = down(x)
    close(y, units()[f'{unit}.y'], 1e-6)
    close(SimpleUpsample(5, ds)(y), units()[f'{unit}.up'], 1e-6)
    y.backward(units()[f'{unit}.y_grad'])
    relatively_close(x.grad, units()[f'{unit}.x_grad'], 1e-5)
    relatively_close(down.bias.grad, units()[f'{unit}.bias_grad'], 1e-4)


@needs_reference
def test_bypass(monkeypatch):
    "Half of the trials skip, a quarter bypasses the scale, and all scales are limited."
    bypass = BypassModule(6, skip_rate=0.5, straight_through_rate=0.25, scale_min=0.4, scale_max=0.9)
    load(bypass, 'bypass', dict(bypass_scale='scale'))
    a, b = (units()[f'bypass.{k}'].requires_grad_() for k in ('src_orig', 'src'))
    noise = units()['bypass.noise']
    draw(monkeypatch, (4, 1), noise, noise)
    monkeypatch.setattr('b2t_kaggle.pytorch.scaling.balancer.bernoulli', lambda p, device: True)
    y = bypass(a, b)
    close(y, units()['bypass.y'], 1e-6)
    y.backward(units()['bypass.y_grad'])
    close(a.grad, units()['bypass.src_orig_grad'])
    close(b.grad, units()['bypass.src_grad'])
    relatively_close(bypass.bypass_scale.grad, units()['bypass.scale_grad'], 1e-5)
    close(bypass.eval()(a, b), units()['bypass.y_eval'], 1e-6)


@needs_reference
def test_positions():
    def table(dim, T, **more): return CompactRelPositionalEncoding(dim, 0.15, **more).eval()(torch.zeros(T, 1, 1))
    close(table(48, 20), units()['pos_encoding.d48_t20'])
    close(table(16, 7), units()['pos_encoding.d16_t7'])
    close(table(24, 9, length_factor=3.0), units()['pos_encoding.d24_t9_factor3'])
    left = CompactRelPositionalEncoding(16, 0.15).eval()(torch.zeros(5, 1, 1), 12)
    close(left, units()['pos_encoding.d16_t5_left12'])
    rows = units()['pos_encoding.far_offsets'].long() + 2499
    close(table(48, 2500)[0][rows], units()['pos_encoding.far'])


@needs_reference
def test_attention_weights():
    f = units()
    u = 'attention_weights'
    module = RelPositionMultiheadAttentionWeights(20, 16, 4, 8, 3)
    load(module, u, {f'{n}.{k}': f'{n}_{k}' for n, k in (('in_proj', 'weight'), ('in_proj', 'bias'),
                                                         ('linear_pos', 'weight'))})
    module.eval()
    set_number(module.balance_keys, 'prob', 0.0)
    module.whiten_keys.prob = 0.0
    x = f[f'{u}.x'].requires_grad_()
    table = f[f'{u}.pos_emb']
    padding = f[f'{u}.key_padding_mask'].bool()
    close(module(x, table), f[f'{u}.y'], 1e-6)
    close(module(x, table, padding, f[f'{u}.attn_mask'].bool()), f[f'{u}.y_both'], 1e-6)
    y = module(x, table, padding)
    close(y, f[f'{u}.y_padding'], 1e-6)
    y.backward(f[f'{u}.y_grad'])
    relatively_close(x.grad, f[f'{u}.x_grad'], 1e-4)
    for n, k in (('in_proj', 'weight'), ('linear_pos', 'weight')):
        relatively_close(module.get_parameter(f'{n}.{k}').grad, f[f'{u}.{n}_{k}_grad'], 1e-4)
    streamed, key = module.streaming_forward(x[:5], f[f'{u}.stream_pos_emb'], f[f'{u}.stream_cached_key'], 6,
                                             f[f'{u}.stream_mask'].bool())
    close(streamed, f[f'{u}.stream_y'], 1e-6)
    close(key, f[f'{u}.stream_new_cached_key'], 1e-6)


CONV = {'chunkwise_conv_scale': 'chunkwise_conv_scale'} | {
    f'{n}_conv.{k}': f'{n}_conv_{k}' for n in ('causal', 'chunkwise') for k in ('weight', 'bias')
}


@needs_reference
@pytest.mark.parametrize('kernel', [7, 15])
def test_convolution_in_chunks(kernel):
    u = f'chunk_conv.k{kernel}'
    x = units()[f'{u}.x']
    for chunk in (-1, 1, 4, 7, 16, 21, 50):
        conv = load(ChunkCausalDepthwiseConv1d(6, kernel), u, CONV)
        x.requires_grad_().grad = None
        y = conv(x, chunk)
        close(y, units()[f'{u}.y_{chunk}'], 1e-5)
        if f'{u}.y_grad_{chunk}' not in units(): continue
        y.backward(units()[f'{u}.y_grad_{chunk}'])
        relatively_close(x.grad, units()[f'{u}.x_grad_{chunk}'], 1e-5)
        for ours, theirs in CONV.items():
            relatively_close(conv.get_parameter(ours).grad, units()[f'{u}.{theirs}_grad_{chunk}'], 1e-4, ours)
    cache = torch.zeros(2, 6, kernel // 2)
    pieces = []
    for piece in x.split(7, 2):
        y, cache = conv.streaming_forward(piece, cache)
        pieces.append(y)
    close(torch.cat(pieces, 2), units()[f'{u}.stream_7'])
    close(cache, units()[f'{u}.stream_7_cache'], 1e-6)


@needs_reference
def test_feature_masks(monkeypatch):
    sizes = figures('encoder_tiny')['config']['encoder']
    encoder = Zipformer2(**sizes).train()
    draw(monkeypatch, (1, 5, 1), units()['feature_mask.noise1'], units()['feature_mask.noise2'])
    masks = encoder.get_feature_masks(torch.zeros(7, 5, 24))
    for i, mask in enumerate(masks): assert torch.equal(mask, units()[f'feature_mask.stack_{i}'])


# In the kit

EVERYTHING = {'model.balancer': True, 'model.whiten': True, 'model.skips': True, 'model.dropout': 0.1,
              'model.encoder_unmasked_dim': [16]}


def test_a_run_continues_exactly_with_all_randomness(tmp_path):
    "Limits, whitening, skips and dropout are on; the run would differ without the saved state of Whiten."
    write_toy(tmp_path)
    def trainer(checkpoint=None):
        cfg = config('zipformer', **EVERYTHING)
        return Trainer(*open_toy(tmp_path), cfg, SingleDevice(pick_torch('cpu', 'float32')), checkpoint)

    never = trainer()
    for i in range(8):
        if i == 5: never.save_last(tmp_path/'last.pt')
        never.train_step(*never.loader(i))
    again = trainer(tmp_path/'last.pt')
    assert len({float(v) for v in again.model.training_state().values()}) > 1
    for i in range(5, 8): again.train_step(*again.loader(i))
    for k, v in never.model.state_dict().items(): assert torch.equal(v, again.model.state_dict()[k]), k
    assert never.model.training_state() == again.model.training_state()


def test_products_in_16_bits():
    "Sums of layers stay in float32, and the logits are close to those in float32."
    torch.manual_seed(0)
    model = build_model(config('zipformer').model, 2).eval()
    x = torch.randn(2, 60, 16)
    exact = model(x, [0, 1]).detach()
    with torch.autocast('cpu', torch.bfloat16):
        frames = model.frames(x, torch.tensor([0, 1])).transpose(0, 1)
        assert model.encoder(frames, torch.tensor([14, 14]))[0].dtype == torch.float32
        rounded = model(x, [0, 1]).detach().float()
    relatively_close(rounded, exact, 0.03)
    model.train()
    with torch.autocast('cpu', torch.bfloat16): model(x, [0, 1], batch_count=100.0).float().square().mean().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.requires_grad)
