"Sampling, buckets, filling and prefetching agree with their definitions."
import gc
import itertools
import tempfile
import threading
import time
from collections import Counter
from functools import partial

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from b2t_kaggle.core.ctc import round_length
from b2t_kaggle.core.ragged import RaggedWriter
from b2t_kaggle.data.batches import (
    Batcher,
    DayBalancedSampler,
    bucket_of,
    choose_buckets,
    evaluation_batches,
    fill_rows,
    longest_in_batches,
    prefetch,
)
from b2t_kaggle.data.store import _COLUMNS, TrialStore

# Trials per day; some days have none, like real sessions without a split
day_counts = st.lists(st.integers(0, 7), min_size=1, max_size=8).filter(any)


@settings(max_examples=200, deadline=None)
@given(counts=day_counts, data=st.data())
def test_day_balanced_batches(counts, data):
    days = np.repeat(np.arange(len(counts)), counts)
    with_trials = np.flatnonzero(counts).tolist()
    days_per_batch = data.draw(st.integers(1, len(with_trials)))
    batch_size = data.draw(st.integers(days_per_batch, 20))
    must = data.draw(st.lists(st.sampled_from(with_trials), max_size=days_per_batch, unique=True))
    seed = data.draw(st.integers(0, 2**40))
    step = data.draw(st.integers(0, 10**7))
    from_end = [d - with_trials[-1] - 1 for d in must]
    def make(must): return DayBalancedSampler(days, batch_size, days_per_batch, seed, must)
    batch = make(must).batch(step)
    assert len(batch) == batch_size and batch.min() >= 0 and batch.max() < len(days)
    per_day = Counter(days[batch].tolist())
    assert len(per_day) == days_per_batch and set(must) <= set(per_day)
    assert max(per_day.values()) - min(per_day.values()) <= 1
    assert max(per_day.values()) == -(-batch_size//days_per_batch)
    other = make(must)
    for s in (step + 1, 0): other.batch(s)          # earlier calls make no difference
    assert np.array_equal(other.batch(step), batch) and np.array_equal(make(from_end).batch(step), batch)


def test_days_and_trials_are_drawn_evenly():
    "Frequencies in 4,000 batches agree with uniform sampling within five standard deviations."
    days = np.repeat([0, 1, 2, 4, 5], [3, 10, 5, 4, 8])
    s = DayBalancedSampler(days, 10, 2, seed=3)
    batches = [s.batch(i) for i in range(4000)]
    n = Counter(d for b in batches for d in set(days[b].tolist()))
    assert n.keys() == {0, 1, 2, 4, 5} and all(abs(c - 1600) < 5*np.sqrt(4000*.4*.6) for c in n.values())
    n = np.bincount(np.concatenate(batches), minlength=30)
    want = 4000*.4*5/np.array([3, 10, 5, 4, 8])[np.searchsorted([0, 1, 2, 4, 5], days)]
    # The trials of a batch share their day, so the variance is up to 5 + 1 times as large
    assert (abs(n - want) < 5*np.sqrt(want*6)).all()
    assert any(len(set(b)) < len(b) for b in batches)          # with replacement


@given(n_bins=st.lists(st.integers(1, 99), max_size=40), batch_size=st.integers(1, 9), pad=st.booleans())
def test_evaluation_sees_every_trial_once(n_bins, batch_size, pad):
    batches = evaluation_batches(n_bins, batch_size, pad)
    everything = np.concatenate(batches) if batches else np.array([], int)
    assert sorted(everything[everything >= 0]) == list(range(len(n_bins)))
    lengths = [n_bins[i] for i in everything if i >= 0]
    assert lengths == sorted(lengths, reverse=True) and len(batches) == -(-len(n_bins)//batch_size)
    assert all(len(b) == batch_size for b in (batches if pad else batches[:-1]))
    assert all((b >= 0).all() for b in (batches[:-1] if pad else batches))


@settings(max_examples=150, deadline=None)
@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=12), n=st.integers(1, 4),
       longest=st.integers(1, 70) | st.none(),
       patch=st.sampled_from([(14, 4), (0, 0), (5, 3)]))
def test_buckets_are_optimal(lengths, n, longest, patch):
    def waste(buckets): return sum(min(b for b in buckets if b >= t) - t for t in lengths)
    rounded = partial(round_length, patch_size=patch[0], patch_stride=patch[1])
    got = choose_buckets(lengths, n, rounded, longest)
    top = int(rounded(max([*lengths, longest or 0])))
    candidates = sorted({int(t) for t in rounded(np.array(lengths))} | {top})
    best = min(waste([*c, top]) for k in range(n) for c in itertools.combinations(candidates[:-1], k))
    assert got == sorted(set(got)) and len(got) <= n and got[-1] == top and waste(got) == best
    if patch == (0, 0): assert got == choose_buckets(lengths, n, longest=longest)


@given(t=st.integers(1, 500), size=st.integers(1, 20), stride=st.integers(1, 8))
def test_a_rounded_length_has_no_unused_bins(t, size, stride):
    n = int(round_length(t, size, stride))
    frames = lambda t: (t - size)//stride + 1
    assert n >= max(t, size) and (n - size) % stride == 0 and n - max(t, size) < stride
    assert frames(n) in (frames(max(t, size)), frames(max(t, size)) + 1)


def test_a_batch_takes_the_smallest_bucket_that_holds_it():
    assert [bucket_of(t, [14, 18, 30]) for t in (1, 14, 15, 18, 30)] == [14, 14, 18, 18, 30]
    with pytest.raises(ValueError, match='31 bins is longer than the longest bucket, 30'): bucket_of(31, [14, 30])


def store_of(lengths, n_features=8, dtype='float16', seed=0):
    "A store of random trials with the given lengths."
    rng = np.random.default_rng(seed)
    xs = [rng.standard_normal((n, n_features)).astype(dtype) for n in lengths]
    ids = [rng.integers(1, 41, rng.integers(0, 9)) for _ in lengths]
    with tempfile.TemporaryDirectory() as d: # An open store keeps its deleted file
        metadata = dict(split='train', sessions=['a', 'b', 'c'])
        with RaggedWriter(f'{d}/train.arrow', dtype, (n_features,), _COLUMNS, 'trials', metadata) as writer:
            for i, (x, labels, day) in enumerate(zip(xs, ids, rng.integers(0, 3, len(lengths)))):
                writer.append(x, session='abc'[day], day=day, block=1, trial=i, key='', sentence='', n_bins=len(x),
                              is_instruction=False, n_labels=len(labels), class_ids=labels.tolist())
        return TrialStore(f'{d}/train.arrow')


@settings(max_examples=100, deadline=None)
@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=10),
       types=st.sampled_from([('float16', 'float32'), ('float16', 'float16'), ('float32', 'float32')]),
       seed=st.integers(0, 9), data=st.data())
def test_a_batch_contains_its_trials_with_padding(lengths, types, seed, data):
    store = store_of(lengths, dtype=types[0], seed=seed)
    batcher = Batcher(store, choose_buckets(lengths, 3), types[1])
    for _ in range(4):                                            # the memory of earlier batches is reused
        trials = np.array(data.draw(st.lists(st.integers(-1, len(lengths) - 1), min_size=1, max_size=6)))
        assume((trials >= 0).any())
        b = batcher(trials)
        T = bucket_of(max(lengths[i] for i in trials if i >= 0), batcher.buckets)
        assert b.features.shape == (len(trials), T, 8) and b.features.dtype == types[1]
        assert b.features.flags.c_contiguous
        assert b.labels.shape == (len(trials), max(1, store.n_labels.max())) and np.array_equal(b.trials, trials)
        for row, i in enumerate(trials):
            n, s = (lengths[i], store.n_labels[i]) if i >= 0 else (0, 0)
            assert (b.n_bins[row], b.n_labels[row], b.day[row]) == ((n, s, store.day[i]) if i >= 0 else (T, 0, 0))
            assert not b.features[row, n:].any() and not b.labels[row, s:].any()
            if i >= 0:
                assert np.array_equal(b.features[row, :n], store.features(i))
                assert np.array_equal(b.labels[row, :s], store.class_ids(i))


def test_memory_is_reused_only_without_references():
    torch = pytest.importorskip('torch')
    store = store_of([40, 50, 60])
    batcher = Batcher(store, [60])
    held, want = [], []
    for k in range(12):
        b = batcher(np.array([k % 3]))
        want.append(b.features.copy())
        held.append([b, b.features[0, 3:], torch.from_numpy(b.features), memoryview(b.features)][k % 4])
    for k, (h, w) in enumerate(zip(held, want)):
        now = [lambda: h.features, lambda: h, lambda: h.numpy(), lambda: np.asarray(h)][k % 4]()
        assert np.array_equal(now, w[0, 3:] if k % 4 == 1 else w)
    held.clear(); h = now = b = None
    gc.collect()
    places = {batcher(np.array([i % 3])).features.ctypes.data for i in range(20)}
    assert len(places) <= 2
    assert len(batcher._pool._memory) == 12


def test_threads_do_not_share_memory():
    store = store_of([30, 40, 50, 60])
    batcher = Batcher(store, [60])
    wrong = []
    def work(i):
        for _ in range(300):
            b = batcher(np.array([i]))
            if not np.array_equal(b.features[0, :store.n_bins[i]], store.features(i)): wrong.append(i)
    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads: t.start()
    for t in threads: t.join()
    assert not wrong


@pytest.mark.parametrize('stored, delivered', [('float16', 'float32'), ('float16', 'float16'), ('float32', 'float32')])
def test_filling_is_exact_for_every_float16(stored, delivered):
    x = np.arange(2**16, dtype='uint16').view('float16').astype(stored)
    out = np.full((3, 40000), -1, delivered)
    starts = np.array([0, 30000, 5])
    lengths = np.array([30000, 35536, 0])
    fill_rows(out, x, starts, lengths)
    for row, s, n in zip(out, starts, lengths):
        np.testing.assert_array_equal(row[:n], x[s:s + n].astype(delivered))
        assert not row[n:].any()
    with pytest.raises(TypeError, match='float32 cannot be delivered as float16'):
        fill_rows(np.empty((1, 3), 'float16'), np.zeros(3, 'float32'), starts[:1], lengths[2:])
    with pytest.raises(ValueError, match='do not fit'): fill_rows(out[:, :35000], x, starts, lengths)


def threads(): return {t for t in threading.enumerate() if t.name == 'prefetch'}


def test_prefetch_keeps_the_order_and_runs_ahead():
    made = []
    def items():
        for i in range(50): made.append(i); yield i
    it = prefetch(items())
    assert next(it) == 0
    deadline = time.monotonic() + 60
    while len(made) < 4 and time.monotonic() < deadline: time.sleep(0.01)
    time.sleep(0.1)
    assert 3 <= len(made) <= 5                                    # 1 consumed, 2 in the queue, 1 being put
    assert list(it) == list(range(1, 50))


def test_prefetch_raises_errors_in_the_consumer():
    before = threads() # Another test may have left threads that are not collected yet
    def items(): yield 1; raise OSError('the disk is gone')
    it = prefetch(items())
    assert next(it) == 1
    with pytest.raises(OSError, match='the disk is gone'): next(it)
    assert not threads() - before


@pytest.mark.parametrize('how', ['close', 'drop', 'break'])
def test_prefetch_stops_its_thread(how):
    before = threads()
    it = prefetch(itertools.count())
    next(it)
    assert len(threads() - before) == 1
    if how == 'close': it.close()
    elif how == 'break':
        for _ in it: break
    del it
    gc.collect()
    assert not threads() - before


def test_prefetched_batches_equal_the_batches(seed=3):
    store = store_of(np.random.default_rng(0).integers(20, 60, 40).tolist())
    sampler = DayBalancedSampler(store.day, 8, 2, seed=seed)
    batcher = Batcher(store, choose_buckets(longest_in_batches(sampler, store.n_bins, 30), 3, longest=60))
    for step, b in enumerate(prefetch(batcher(sampler.batch(s)) for s in range(30))):
        assert np.array_equal(b.trials, sampler.batch(step))
        for row, i in enumerate(b.trials): assert np.array_equal(b.features[row, :b.n_bins[row]], store.features(i))
