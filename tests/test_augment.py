"Augmentations: their definitions, and that they depend only on seed and step."
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from b2t_kaggle.config import AugmentConfig, preset, with_overrides
from b2t_kaggle.pytorch.augment import Augment, add_noise, channel_mask, cut_start, time_mask
from b2t_kaggle.pytorch.layers import smooth
from b2t_kaggle.training.recipe import draw_cut, gaussian_kernel, step_seed

NONE = AugmentConfig(white_noise_std=0, constant_offset_std=0, random_cut=0, smooth_data=False)
def only(**kw): return NONE.model_copy(update=kw)
def generator(seed=0): return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize('std', [0.7, 1, 2, 3.3, 6])
def test_kernel_is_the_impulse_response_of_a_gaussian_filter(std):
    "Weights are exp(-t²/2σ²) for |t| <= 4σ, scaled to sum 1; those up to 0.01 are dropped, the rest scaled again."
    t = np.arange(-int(4 * std + .5), int(4 * std + .5) + 1)
    w = np.exp(-t**2 / (2 * std**2))
    w /= w.sum()
    w = w[w > 0.01]
    np.testing.assert_allclose(gaussian_kernel(100, std), w / w.sum(), atol=1e-6)


@settings(max_examples=30, deadline=None)
@given(B=st.integers(1, 3), T=st.integers(1, 40), C=st.integers(1, 4), std=st.floats(0.4, 13))
def test_smoothing_equals_the_grouped_convolution(B, T, C, std):
    x = torch.randn(B, T, C)
    k = gaussian_kernel(std=std)
    conv = F.conv1d(x.mT, torch.tensor(k).view(1, 1, -1).repeat(C, 1, 1), padding='same', groups=C).mT
    assert torch.allclose(smooth(x, k), conv, atol=1e-5)


def test_padding_does_not_reach_into_a_trial():
    "A trial is smoothed in the same way alone and padded with zeros."
    x = torch.randn(1, 50, 3)
    k = gaussian_kernel()
    assert torch.equal(smooth(F.pad(x, (0, 0, 0, 30)), k)[:, :50], smooth(x, k))


def test_statistics_of_noise():
    B, T, C = 40, 200, 50
    zeros, ones = torch.zeros(B, T, C), torch.ones(B, T, C)
    white = add_noise(zeros, only(white_noise_std=1.5), generator())
    assert abs(white.std() - 1.5) < 0.01 and abs(white.mean()) < 0.01
    assert abs((white[:, 1:] * white[:, :-1]).mean()) < 0.02                    # bins are independent
    offset = add_noise(zeros, only(constant_offset_std=0.2), generator())
    assert torch.equal(offset, offset[:, :1].expand_as(offset)) and abs(offset[:, 0].std() - 0.2) < 0.02
    gain = add_noise(ones, only(static_gain_std=0.05), generator())
    assert torch.allclose(gain, gain[:, :1].expand_as(gain)) and abs(gain[:, 0].std() - 0.05 * C**.5) < 0.05
    over_time = add_noise(zeros, only(random_walk_std=1, random_walk_axis=1), generator())
    over_features = add_noise(zeros, only(random_walk_std=1), generator())
    assert abs(over_time[:, -1].std() / T**.5 - 1) < 0.1 and abs(over_features[:, :, -1].std() / C**.5 - 1) < 0.1


def test_augmentations_are_in_the_official_order():
    "Gain, white noise, offset, walk, cut and smoothing are replayed from the same generator."
    cfg = AugmentConfig(static_gain_std=.1, white_noise_std=.5, constant_offset_std=.3, random_walk_std=.2,
                        random_cut=3)
    x = torch.randn(3, 60, 4)
    augment = Augment(cfg, seed=5)
    step = next(s for s in range(20) if draw_cut(cfg, step_seed(5, s)) == 2)
    g = generator(step_seed(5, step))
    def normal(*shape, std): return torch.empty(shape).normal_(std=std, generator=g)
    y = x @ (torch.eye(4) + normal(3, 4, 4, std=.1))
    y = y + normal(3, 60, 4, std=.5)
    y = y + normal(3, 1, 4, std=.3)
    y = y + normal(3, 60, 4, std=.2).cumsum(-1)
    y = smooth(y[:, 2:], augment.kernel)
    got, lengths = augment.train(x, torch.tensor([60, 50, 40]), step)
    assert torch.allclose(got[:, :58], y, atol=1e-5) and got.shape == x.shape
    assert lengths.tolist() == [58, 48, 38]


def test_cut_is_uniform_and_never_in_evaluation():
    counts = np.bincount([draw_cut(only(random_cut=3), step_seed(1, s)) for s in range(3000)])
    assert len(counts) == 3 and (abs(counts / 3000 - 1/3) < 0.03).all()
    x = torch.randn(2, 9, 3)
    assert torch.equal(Augment(only(random_cut=3, white_noise_std=1), 0).eval(x), x)
    assert cut_start(x, 0) is x


@settings(max_examples=50, deadline=None)
@given(lengths=st.lists(st.integers(1, 200), min_size=1, max_size=5), n_masks=st.integers(1, 30),
       part=st.floats(0, 1), seed=st.integers(0, 10**6))
def test_time_masks_stay_in_bounds(lengths, n_masks, part, seed):
    n_bins = torch.tensor(lengths)
    x = torch.ones(len(lengths), 200, 2)
    y = time_mask(x, n_bins, n_masks, part, generator(seed))
    assert torch.equal(y[..., 0], y[..., 1]) and set(y.unique().tolist()) <= {0., 1.}
    for n, row in zip(lengths, y[..., 0]):
        longest = int(np.float32(n) * np.float32(part) + 1e-3)
        assert (row[n + 1:] == 1).all() and (row[:n] == 0).sum() <= n_masks * longest


@settings(max_examples=50, deadline=None)
@given(T=st.integers(1, 40), n_electrodes=st.integers(1, 5), part=st.floats(0, .9),
       by=st.sampled_from(['electrode', 'feature']), seed=st.integers(0, 10**6))
def test_channel_masks_are_whole_electrodes_or_features(T, n_electrodes, part, by, seed):
    x = torch.randn(3, T, 2*n_electrodes)
    cfg = only(channel_masks=part, channel_mask_by=by)
    y = channel_mask(x, cfg, generator(seed))
    n_drawn = n_electrodes if by == 'electrode' else 2*n_electrodes
    u = torch.rand(3, 1, n_drawn, generator=generator(seed))
    for b, t, f in np.ndindex(*x.shape):
        masked = u[b, 0, f % n_drawn] < part
        assert y[b, t, f] == (0 if masked else x[b, t, f])


@pytest.mark.parametrize('changes, found', [
    ({'feature_subset': [0, 1], 'model.neural_dim': 2}, 'data.feature_subset'), ({'model.neural_dim': 7}, 'an odd')])
def test_electrodes_are_masked_if_they_are_known(changes, found):
    with pytest.raises(ValueError, match=f'found {found}.*channel_mask_by=feature'):
        with_overrides(preset('demo'), changes | {'channel_masks': .2})
    with_overrides(preset('demo'), changes | {'channel_masks': .2, 'channel_mask_by': 'feature'})


def test_results_depend_only_on_seed_and_step():
    cfg = AugmentConfig(time_masks=3, random_walk_std=.1, channel_masks=.3)
    x = torch.randn(2, 50, 4)
    n = torch.tensor([50, 30])
    before = x.clone()
    first = [Augment(cfg, 1).train(x, n, s) for s in range(4)]
    torch.manual_seed(99)
    torch.randn(7)  # other draws do not matter
    again = [Augment(cfg, 1).train(x, n, s) for s in reversed(range(4))][::-1]
    for (a, i), (b, j) in zip(first, again): assert torch.equal(a, b) and torch.equal(i, j)
    assert not torch.equal(first[0][0], first[1][0])
    assert not torch.equal(first[0][0], Augment(cfg, 2).train(x, n, 0)[0])
    assert torch.equal(x, before) and n.tolist() == [50, 30]


def test_half_precision_input_is_widened():
    x = torch.randn(2, 50, 4)
    half, _ = Augment(AugmentConfig(), 1).train(x.half(), torch.tensor([50, 50]), 0)
    full, _ = Augment(AugmentConfig(), 1).train(x.half().float(), torch.tensor([50, 50]), 0)
    assert half.dtype == torch.float32 and torch.equal(half, full)


def test_lengths_may_stay_on_the_host():
    "In training, features are on the device and lengths on the host; like other devices, meta refuses to mix them."
    x = torch.empty(2, 50, 3, device='meta')
    assert time_mask(x, torch.tensor([50, 30]), 2, 0.1, None).device.type == 'meta'
    if torch.cuda.is_available():
        x = torch.randn(2, 50, 4, device='cuda')
        y, _ = Augment(AugmentConfig(time_masks=3), 1).train(x, torch.tensor([50, 30]), 0)
        assert y.is_cuda and y.isfinite().all()
