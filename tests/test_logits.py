"LogitStore: refused input, round trips, and averages that agree with their formulas."
import json
import os
import pickle

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from b2t_kaggle.core.ragged import RaggedError, write_ragged
from b2t_kaggle.logits import LogitError, LogitStore, log_sum_exp


def log_probs(rng, n, k, scale=3.):
    "Log-probabilities [n, k], computed independently: exact in float64, then float32."
    p = np.exp(scale*rng.standard_normal((n, k)))
    return np.log(p/p.sum(1, keepdims=True)).astype('float32')


def index_of(n, **kw):
    keys = [f'trial_{i:04d}' for i in range(n)]
    return pd.DataFrame(dict(session='t15.2023.08.13', key=keys, block=1) | kw)


def store(path, seed=0, lengths=(5, 0, 8, 3), k=6, scale=3., **kw):
    rng = np.random.default_rng(seed)
    arrays = (log_probs(rng, n, k, scale) for n in lengths)
    return LogitStore.write(path, arrays, index_of(len(lengths), **kw), dict(model=f'm{seed}'))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lengths=st.lists(st.integers(0, 30), min_size=1, max_size=8), k=st.integers(2, 41), seed=st.integers(0, 99),
       dtype=st.sampled_from(['float32', 'float64']))
def test_round_trip(tmp_path, lengths, k, seed, dtype):
    rng = np.random.default_rng(seed)
    arrays = [log_probs(rng, n, k).astype(dtype) for n in lengths]
    provenance = dict(model='gru', checkpoint='0'*64, config=dict(units=[1, None, 'ü']))
    s = LogitStore.write(tmp_path/'x', iter(arrays), index_of(len(arrays)), provenance)
    assert (len(s), s.n_classes, s.n_frames.tolist(), s.provenance) == (len(lengths), k, lengths, provenance)
    for x, y in zip(arrays, s): assert y.dtype == np.float32 and np.array_equal(x.astype('float32'), y)
    assert s.index.key.tolist() == index_of(len(arrays)).key.tolist()
    assert np.array_equal(pickle.loads(pickle.dumps(s))[0], s[0])


@pytest.mark.parametrize('broken, match', [
    (lambda x: 3*x, r'array 1, frame \d: probabilities sum to exp'),
    (lambda x: x + .01, 'expected 1; give log-probabilities'),
    (lambda x: np.exp(x), 'expected 1; give log-probabilities'),
    (lambda x: np.where(x == x.min(), np.nan, x), 'array 1 has NaN or infinity in frame'),
    (lambda x: np.where(x == x.min(), -np.inf, x), 'array 1 has NaN or infinity in frame'),
    (lambda x: x[None], r"array 1 has the shape \[1, 4, 6\], expected \[T', K\]"),
    (lambda x: np.pad(x, ((0, 0), (0, 1)), constant_values=-200), r'array 1 has the shape \[4, 7\], expected \[n, 6\]'),
])
def test_invalid_log_probabilities_are_refused(tmp_path, broken, match):
    good = log_probs(np.random.default_rng(0), 4, 6)
    with pytest.raises((LogitError, RaggedError), match=match):
        LogitStore.write(tmp_path/'x', [good, broken(good)], index_of(2), {})
    assert os.listdir(tmp_path) == []


def test_inconsistent_input_is_refused(tmp_path):
    x = log_probs(np.random.default_rng(0), 4, 6)
    def write(arrays, index, **provenance): return LogitStore.write(tmp_path/'x', arrays, index, provenance)
    with pytest.raises(RaggedError, match='2 rows of the index, but 1 arrays'): write([x], index_of(2))
    with pytest.raises(RaggedError, match='more arrays than the 1 rows'): write([x, x], index_of(1))
    with pytest.raises(LogitError, match='no trials'): write([], index_of(0))
    with pytest.raises(LogitError, match="lacks the columns \\['session'\\]"):
        write([x], index_of(1).drop(columns='session'))
    with pytest.raises(TypeError): write([x], index_of(1), model=object())
    write_ragged(tmp_path/'other', [x])
    with pytest.raises(RaggedError, match='holds arrays, expected log_probs'): LogitStore.open(tmp_path/'other')
    assert os.listdir(tmp_path) == ['other']


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(n=st.integers(1, 4), scale=st.sampled_from([.1, 3., 20.]), mean=st.sampled_from(['log_prob', 'prob']))
def test_averages_follow_their_formulas(tmp_path, n, scale, mean):
    stores = [store(tmp_path/str(i), i, scale=scale) for i in range(n)]
    got = LogitStore.average(stores, tmp_path/'average', mean=mean)
    for i in range(len(got)):
        p = np.exp(np.stack([s[i] for s in stores]).astype('longdouble'))
        want = p.mean(0) if mean == 'prob' else np.prod(p**(np.longdouble(1)/n), 0)
        want = np.log(want/want.sum(-1, keepdims=True)).astype('float64')
        assert np.allclose(got[i], want, rtol=1e-5, atol=1e-5) and got[i].dtype == np.float32
    assert got.provenance == dict(average=mean, members=[s.provenance for s in stores])
    assert got.index.equals(stores[0].index)


def test_an_average_needs_no_path(tmp_path):
    stores = [store(tmp_path/str(i), i) for i in range(2)]
    a = LogitStore.average(stores)
    b = LogitStore.average(stores, tmp_path/'average')
    assert all(np.array_equal(x, y) for x, y in zip(a, b)) and len(a) == len(b) == 4
    assert sorted(os.listdir(tmp_path)) == ['0', '1', 'average']


def test_an_average_can_be_averaged(tmp_path):
    a, b, c = (store(tmp_path/str(i), i) for i in range(3))
    nested = LogitStore.average([LogitStore.average([a, b]), c], tmp_path/'nested')
    inner = dict(average='log_prob', members=[a.provenance, b.provenance])
    assert json.dumps(nested.provenance) == json.dumps(dict(average='log_prob', members=[inner, c.provenance]))


@pytest.mark.parametrize('kw, match', [
    (dict(lengths=(5, 0, 8)), 'different numbers of trials, 4 and 3'),
    (dict(k=7), 'different numbers of classes, 6 and 7'),
    (dict(lengths=(5, 0, 9, 3)), 'trial 2 has different numbers of frames, 8 and 9'),
    (dict(session='t15.2023.08.18'), 'different trials, t15.2023.08.13 trial_0000 and t15.2023.08.18 trial_0000'),
    (dict(key=['trial_0001', 'trial_0000', 'trial_0002', 'trial_0003']), 'different trials'),
])
def test_different_things_are_not_averaged(tmp_path, kw, match):
    a = store(tmp_path/'a')
    b = store(tmp_path/'b', 1, **kw)
    with pytest.raises(LogitError, match=match): LogitStore.average([a, b], tmp_path/'average')
    assert not (tmp_path/'average').exists()


def test_log_sum_exp_neither_overflows_nor_vanishes():
    x = np.array([[1e4, 1e4, -1e4], [-1e4, -1e4, -1e4]])
    assert np.allclose(log_sum_exp(x), [1e4 + np.log(2), -1e4 + np.log(3)], rtol=1e-15)
    assert np.allclose(log_sum_exp(x, axis=0), [1e4, 1e4, -1e4 + np.log(2)])
