"""Augmentations in TensorFlow: equal to PyTorch's if they are not random, otherwise equal in distribution; the same
compiled or not."""
import numpy as np
import pytest

tf = pytest.importorskip('tensorflow', reason='needs TensorFlow: pip install b2t_kaggle[tf]')
torch = pytest.importorskip('torch')
from hypothesis import given, settings
from hypothesis import strategies as st

from b2t_kaggle.config import AugmentConfig
from b2t_kaggle.pytorch import augment as pt
from b2t_kaggle.pytorch.layers import smooth as smooth_pt
from b2t_kaggle.tensorflow.augment import (
    Augment,
    add_noise,
    cut_start,
    mask_channels,
    mask_places,
    mask_time,
    trial_seeds,
)
from b2t_kaggle.tensorflow.layers import smooth
from b2t_kaggle.training.recipe import draw_cut, gaussian_kernel, step_seed

NONE = AugmentConfig(white_noise_std=0, constant_offset_std=0, random_cut=0, smooth_data=False)
def only(**kw): return NONE.model_copy(update=kw)


@settings(max_examples=10)
@given(B=st.integers(1, 3), T=st.integers(1, 40), C=st.integers(1, 4), std=st.floats(0.4, 13), cut=st.integers(0, 2))
def test_smoothing_and_cut_equal_pytorchs(B, T, C, std, cut):
    x = np.random.default_rng(T).standard_normal((B, T, C)).astype('float32')
    k = gaussian_kernel(std=std)
    np.testing.assert_allclose(smooth(tf.constant(x), k), smooth_pt(torch.tensor(x), k), atol=1e-6)
    if T > 2:
        ours, theirs = cut_start(tf.constant(x), tf.constant(cut), 2), pt.cut_start(torch.tensor(x), cut)
        np.testing.assert_array_equal(ours, theirs)


@settings(max_examples=20)
@given(lengths=st.lists(st.integers(1, 200), min_size=1, max_size=5), n_masks=st.integers(1, 30),
       part=st.floats(0, 1), seed=st.integers(0, 10**6))
def test_masks_of_the_same_numbers_equal_pytorchs(lengths, n_masks, part, seed):
    x = torch.randn(len(lengths), 200, 2)
    n_bins = torch.tensor(lengths)
    g = torch.Generator()
    theirs = pt.time_mask(x, n_bins, n_masks, part, g.manual_seed(seed))
    u, v = torch.rand(2, len(lengths), n_masks, 1, generator=g.manual_seed(seed))[..., 0].numpy()
    ours = mask_time(tf.constant(x.numpy()), *mask_places(tf.constant(u), tf.constant(v), tf.constant(lengths), part))
    np.testing.assert_array_equal(ours, theirs + 0)  # PyTorch's zeros may be negative


def differ(a, b):
    "Whether two samples differ by the Kolmogorov-Smirnov test at the level 0.001."
    at = np.sort(np.concatenate([a, b]))
    def cumulative(sample): return np.searchsorted(np.sort(sample), at, 'right') / len(sample)
    distance = abs(cumulative(a) - cumulative(b)).max()
    return distance > 1.95 * (1 / len(a) + 1 / len(b))**.5


@pytest.mark.parametrize('kw, samples', [
    (dict(white_noise_std=1.5), lambda y: y[:, 7]),
    (dict(constant_offset_std=.2), lambda y: y[:, 7]),
    (dict(random_walk_std=.3, random_walk_axis=1), lambda y: y[:, -1]),
    (dict(random_walk_std=.3), lambda y: y[:, 7, -1]),
    (dict(static_gain_std=.1), lambda y: y[:, 7]),
], ids=lambda v: '-'.join(v) if isinstance(v, dict) else '')
def test_noise_has_the_distribution_of_pytorchs(kw, samples):
    x = np.ones((400, 10, 8), 'float32')
    noisy = tf.function(lambda x, seeds: add_noise(x, only(**kw), seeds))
    ours = samples(noisy(tf.constant(x), tf.constant(trial_seeds(0, 0, 400))).numpy()).ravel()
    theirs = samples(pt.add_noise(torch.tensor(x), only(**kw), torch.Generator().manual_seed(0)).numpy()).ravel()
    assert not differ(ours, theirs) and differ(ours, 1.5 * theirs)


def test_the_whole_recipe_equals_the_official_one_compiled_or_not():
    """Gain, noise, offset, walk, cut and smoothing are replayed in PyTorch from the same random numbers, also for
    single trials."""
    cfg = AugmentConfig(static_gain_std=.1, white_noise_std=.5, constant_offset_std=.3, random_walk_std=.2,
                        random_cut=3, time_masks=2, channel_masks=.5)
    x = np.random.default_rng(0).standard_normal((3, 60, 4)).astype('float32')
    n = np.array([60, 50, 40], 'int32')
    seeds = trial_seeds(5, 1, 3)
    step = next(s for s in range(20) if draw_cut(cfg, step_seed(5, s)) == 2)
    aug = Augment(cfg)
    cut = draw_cut(cfg, step_seed(5, step))
    def noisy(x, **kw): return torch.tensor(add_noise(tf.constant(x), only(**kw), tf.constant(seeds)).numpy())
    unit_features = [np.tile(row, (3, 60, 1)) for row in np.eye(4, dtype='float32')]
    gain = torch.stack([noisy(unit, static_gain_std=.1)[:, 0] for unit in unit_features], 1)
    zeros = np.zeros_like(x)
    y = torch.tensor(x) @ gain
    y = y + noisy(zeros, white_noise_std=.5) + noisy(zeros, constant_offset_std=.3) + noisy(zeros, random_walk_std=.2)
    y = smooth_pt(pt.cut_start(y, cut), aug.kernel).numpy()
    args = tf.constant(x), tf.constant(n), tf.constant(cut), tf.constant(seeds)
    got, lengths = aug.train(*args)
    silent = mask_channels(tf.ones_like(x), cfg, tf.constant(seeds)).numpy() == 0
    got = got.numpy()
    masked = (got == 0).all(2) & ~silent.all(2)
    assert 0 < masked[:, :38].mean() < 0.2 and 0 < silent.mean() < .6
    np.testing.assert_allclose(got, np.where(masked[..., None] | silent, 0, y), atol=1e-5)
    assert lengths.numpy().tolist() == [58, 48, 38]
    compiled, _ = tf.function(aug.train, jit_compile=True)(*args)
    np.testing.assert_allclose(got, compiled, atol=1e-5)
    for i in range(3):
        one, _ = aug.train(*(v[i:i + 1] if v.shape.rank else v for v in args))
        np.testing.assert_allclose(one[0], got[i], atol=1e-5)


def test_half_precision_input_is_widened():
    x = tf.cast(tf.random.normal([2, 50, 4]), tf.float16)
    n = tf.constant([50, 50])
    cut = tf.constant(1)
    seeds = tf.constant(trial_seeds(0, 0, 2))
    half, full = (Augment(AugmentConfig()).train(v, n, cut, seeds)[0] for v in (x, tf.cast(x, tf.float32)))
    assert half.dtype == tf.float32 and (half.numpy() == full.numpy()).all()
