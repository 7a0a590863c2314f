"""Line searches agree with brute force, the gate with a search over all thresholds, and exchanged words with their
definition."""
import itertools
import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from b2t_kaggle.decoding.nbest import Hypothesis, LLMHypothesis, read_nbest, write_nbest
from b2t_kaggle.lm.automaton import Automaton
from b2t_kaggle.lm.ngram import NGram, build_ngram
from b2t_kaggle.metrics import word_error_rate, word_errors
from b2t_kaggle.rescoring import mixture
from b2t_kaggle.rescoring.mixture import (
    Weights,
    augment_nbest,
    cross_validate,
    interpolate,
    line_search,
    ngram_per_word,
    tune,
)

number = st.integers(-4, 4).map(float) # Coarse values, so that parallel and equal lines are frequent
line = st.tuples(number, number, st.integers(0, 5))


@settings(max_examples=200)
@given(st.lists(st.lists(line, min_size=1, max_size=6), min_size=1, max_size=5))
def test_line_search_is_brute_force_between_its_edges(trials):
    slopes, at0, errors = ([np.array([l[k] for l in t], float) for t in trials] for k in range(3))
    steps = line_search(slopes, at0, errors, -3, 3)
    assert steps.edges[0] == -3 and steps.edges[-1] == 3 and (np.diff(steps.edges) >= 0).all()
    for a, b, n in zip(steps.edges, steps.edges[1:], steps.errors):
        if b - a < 1e-9: continue
        x = (a + b)/2
        least = most = 0
        for s, i, e in zip(slopes, at0, errors): # Any of several equal lines may win, and their errors may differ
            total = i + x*s
            best = e[total >= total.max() - 1e-9]
            least += best.min()
            most += best.max()
        assert least <= n <= most


def make(n=60, seed=0, n_hyps=8):
    "Make n-best lists with distinct random scores, and references."
    rng = np.random.default_rng(seed)
    nbest = []
    references = []
    for _ in range(n):
        truth = [f'w{i}' for i in rng.integers(0, 9, 5)]
        hyps = []
        for _ in range(n_hyps):
            text = [w if rng.random() < 0.7 else f'x{rng.integers(3)}' for w in truth][:rng.integers(3, 6)]
            wrong = 5 - sum(a == b for a, b in zip(text, truth))
            acoustic = -3*wrong + rng.normal(0, 5)
            ngram = -wrong + rng.normal(0, 2) - rng.integers(0, 30)
            llm = -3*wrong + rng.normal(0, 4)
            n_tokens = len(text) + int(rng.integers(4))
            hyps.append(LLMHypothesis(' '.join(text), acoustic, ngram, len(text), 0.3*acoustic + ngram, llm, n_tokens))
        nbest.append(hyps)
        references.append(' '.join(truth))
    return nbest, references


@pytest.mark.parametrize('weights', [Weights(), Weights(0.2, 0.9, 1.5), Weights(1., 0.3, -2., gate=-4.),
                                     Weights(0.3, 0.6, 0.5, length_penalty=1.5)])
def test_errors_of_arrays_equal_those_of_the_ranked_lists(weights):
    nbest, references = make()
    expected = [e.edits for e in word_errors(references, [hyps[0].text for hyps in interpolate(nbest, weights)])]
    trials = mixture._TrialScores(nbest, references)
    np.testing.assert_array_equal(trials.winner_errors(weights), expected)
    for name in ('alpha', 'acoustic_scale', 'word_score'): # The curve contains this point
        steps = trials.curve(name, weights)
        i = np.searchsorted(steps.edges, getattr(weights, name), side='right') - 1
        assert steps.errors[min(i, len(steps.errors) - 1)] == sum(expected)


def test_totals_and_order_by_definition():
    nbest, _ = make(20)
    w = Weights(0.7, 0.4, 0.3, gate=-5., length_penalty=0.2)
    for before, after in zip(nbest, interpolate(nbest, w)):
        alpha = w.alpha if ngram_per_word(before) >= w.gate else 0
        assert sorted(h.text for h in before) == sorted(h.text for h in after)
        assert [h.total for h in after] == sorted((h.total for h in after), reverse=True)
        for h in after:
            llm = h.llm - 0.2*h.n_tokens
            assert h.total == pytest.approx(0.7*h.acoustic + (1 - alpha)*h.ngram + alpha*llm + 0.3*h.n_words)


def test_the_gate_is_the_best_of_all_thresholds():
    nbest, references = make(80, seed=3)
    for hyps in nbest[::4]: # For these, the LLM is misleading
        hyps[:] = [replace(h, llm=-h.llm, ngram=h.ngram - 60, total=h.total - 60) for h in hyps]
    trials = mixture._TrialScores(nbest, references)
    w = Weights(0.3, 0.6)
    thresholds = [-np.inf, *sorted(trials.ngram_per_word), np.inf]
    errors = [trials.winner_errors(replace(w, gate=g)).sum() for g in thresholds]
    gate = trials.best_gate(w)
    assert gate > -np.inf and trials.winner_errors(replace(w, gate=gate)).sum() == min(errors) < errors[0]


def test_tuning_is_at_least_as_good_as_a_dense_grid_and_repeatable():
    nbest, references = make(100, seed=1)
    found = tune(nbest, references)
    trials = mixture._TrialScores(nbest, references)
    axes = np.linspace(0.05, 1, 6), np.linspace(0, 1, 6), np.linspace(-2, 2, 5)
    grid = [Weights(*point) for point in itertools.product(*axes)]
    assert found.wer <= min(trials.winner_errors(w).sum() for w in grid)/trials.n_words
    best = [hyps[0].text for hyps in interpolate(nbest, found.weights)]
    assert found.wer == pytest.approx(word_error_rate(references, best))
    again = tune(nbest, references)
    assert again.weights == found.weights and again.curve.equals(found.curve)
    inside = found.curve[(found.curve.low <= found.weights.alpha) & (found.weights.alpha < found.curve.high)]
    assert inside.wer.iloc[0] == pytest.approx(found.wer)


def test_cross_validation_does_not_use_the_trial_itself():
    nbest, references = make(40, seed=2)
    ranked = cross_validate(nbest, references)
    wrong = references.copy()
    wrong[5] = 'something else entirely'
    assert cross_validate(nbest, wrong)[5] == ranked[5]


def test_a_given_length_penalty_is_kept():
    nbest, references = make(60, seed=4)
    found = tune(nbest, references, Weights(length_penalty=-2.))
    assert found.weights.length_penalty == -2 and tune(nbest, references).weights.length_penalty == 0
    best = [hyps[0].text for hyps in interpolate(nbest, found.weights)]
    assert found.wer == pytest.approx(word_error_rate(references, best))


def test_cross_validation_starts_where_tuning_does():
    nbest, references = make(40, seed=2)
    start = Weights(0.15, 0.35, 2.5, length_penalty=3.)
    chosen = [tune(nbest[1 - k::2], references[1 - k::2], start).weights for k in (0, 1)]
    expected = [interpolate([hyps], chosen[i % 2])[0] for i, hyps in enumerate(nbest)]
    assert cross_validate(nbest, references, start=start) == expected != cross_validate(nbest, references)


def swapped_by_definition(a, b):
    "Exchange each differing word of two sentences of equal length, one at a time."
    a = a.split()
    b = b.split()
    swapped = set()
    for i in (i for i, (x, y) in enumerate(zip(a, b)) if x != y):
        swapped |= {' '.join([*a[:i], b[i], *a[i + 1:]]), ' '.join([*b[:i], a[i], *b[i + 1:]])}
    return swapped


@given(st.lists(st.sampled_from('ab'), min_size=3, max_size=3), st.lists(st.sampled_from('cd'), min_size=3, max_size=3))
def test_exchanged_words(a, b):
    a = ' '.join(a)
    b = ' '.join(b)
    hyps = [Hypothesis(a, -10., -4., 3, -7.), Hypothesis(b, -20., -6., 3, -13.)]
    found = augment_nbest(hyps)
    assert {h.text for h in found} == {a, b} | swapped_by_definition(a, b)
    assert len({h.text for h in found}) == len(found)
    for h in found:
        if h in hyps: continue
        assert (h.acoustic, h.ngram, h.n_words, h.total) == pytest.approx((-15.15, -5.05, 3, -10.1))
    assert augment_nbest(hyps, top=0) == augment_nbest(hyps, top=1) == hyps


@pytest.mark.filterwarnings('ignore:.*too little text')
@pytest.mark.parametrize('load', [NGram.load, Automaton.load])
def test_exchanged_words_with_the_ngram_at_hand(tmp_path, load):
    lm = load(build_ngram(['a b c', 'a d c', 'e b c'], tmp_path/'lm.arpa', order=2))
    hyps = [Hypothesis('a d c', -1., lm.score('a d c'), 3, -2.), Hypothesis('e b c', -2., lm.score('e b c'), 3, -3.)]
    found = augment_nbest(hyps, lm=lm)
    assert len(found) == 4
    for h in found: assert h.ngram == pytest.approx(NGram.load(lm.path).score(h.text))


@pytest.mark.filterwarnings('ignore:.*too little text')
@pytest.mark.parametrize('load', [NGram.load, Automaton.load])
def test_a_boosted_word_keeps_its_bonus(tmp_path, load):
    "The search adds the bonus of a boosted word to its n-gram score, but the n-gram model does not contain it."
    lm = load(build_ngram(['a b c', 'a d c', 'e b c'], tmp_path/'lm.arpa', order=2))
    exact = lm.score
    known = [Hypothesis(t, -1., exact(t), 3, total) for t, total in (('a d c', -2.), ('e b c', -3.))]
    spelled = Hypothesis('a k-ae f', -1., exact('a k-ae f') - 12., 3, -2.5)
    found = {h.text: h.ngram for h in augment_nbest([*known, spelled], lm=lm)}
    assert found['a b c'] == pytest.approx(exact('a b c')) and found['e d c'] == pytest.approx(exact('e d c'))
    mean = (known[0].ngram + spelled.ngram)/2
    assert found['a k-ae c'] == found['a d f'] == pytest.approx(mean*1.01) and found['a k-ae c'] < exact('a k-ae c')


def test_lists_of_different_number_of_words_and_rescored_files(tmp_path):
    short = Hypothesis('a b', -1., -1., 2, -2.)
    long = Hypothesis('c d e', -1., -1., 3, -2.)
    assert augment_nbest([short, long]) == [short, long] and augment_nbest([]) == []
    file = tmp_path/'nbest.jsonl'
    write_nbest(file, interpolate([[LLMHypothesis(**vars(short), llm=-3.)]], Weights()))
    text = file.read_text()
    assert '"llm": -3.0' in text
    # File format before length penalty and checksums
    file.write_text(re.sub(r', "(n_tokens|crc32)": \d+', '', text))
    assert text != file.read_text() and read_nbest(file)[0][0].llm == -3
