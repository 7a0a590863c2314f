"Corrections of a vote: what makes one sentence of another, weak and missing systems, and the real lists' form."
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rapidfuzz.distance import Levenshtein

from b2t_kaggle.metrics import word_error_rate
from b2t_kaggle.rescoring.corrections import (
    _differences,
    corrected,
    cross_validate,
    fit_corrector,
    pivot,
    proposals,
    vote,
    voter_weights,
)
from b2t_kaggle.rescoring.gate import read_blocks, with_corpora
from b2t_kaggle.rescoring.hypotheses import Ballots, Entry, Hypotheses, Trial, read_hypotheses, write_hypotheses

REAL = next((p for p in (Path(__file__).parents[n]/'shared'/'t15' for n in (1, 2)) if p.exists()), None)
sentence = st.lists(st.sampled_from('abcd'), max_size=6).map(' '.join)


def simulated(n, seed, rates):
    "Systems that mishear each word independently at these rates, as one of few short words."
    rng = np.random.default_rng(seed)
    h = Hypotheses()
    for i in range(n):
        words = [f'word{chr(97 + k)}' for k in rng.integers(0, 26, 6)]
        def misheard(rate): return ' '.join(w if rng.random() > rate else rng.choice(['he', 'in', 'at']) for w in words)
        entries = [Entry(str(i), misheard(rate), f'system{k}') for k, rate in enumerate(rates)]
        h.add(Trial(str(i), reference=' '.join(words)), entries)
    return h


def wer(h, combined): return word_error_rate(h.references(), [c.text for c in combined])


@given(sentence, sentence)
def test_all_differences_together_make_the_other_sentence(a, b):
    assert corrected(a.split(), _differences(a.split(), b)) == b


@given(st.lists(sentence, min_size=1, max_size=5, unique=True))
def test_a_sentence_has_or_keeps_or_contradicts_a_correction(texts):
    p = proposals(texts, 0)
    assert not (p.has & p.keeps).any() and p.keeps[:, 0].all() and not p.has[:, 0].any()
    assert all(row.any() for row in p.has)


@given(st.lists(sentence, min_size=1, max_size=5, unique=True), st.data())
def test_the_pivot_has_the_lowest_risk(texts, data):
    weights = np.array(data.draw(st.lists(st.integers(1, 9), min_size=len(texts), max_size=len(texts))), float)
    def edits(a, b): return Levenshtein.distance(a.split(), b.split())
    risks = [sum(w*edits(other, text) for w, other in zip(weights, texts)) for text in texts]
    assert risks[pivot(Ballots(texts, np.eye(len(texts))), weights)] == pytest.approx(min(risks))


def test_an_error_rate_half_as_high_weighs_four_times_as_much():
    weights = voter_weights([('a', '', ''), ('b', '', '')], np.array([1e4, 2e4]), np.array([1e6, 1e6]))
    assert weights[0]/weights[1] == pytest.approx(4, rel=0.01)


def test_bad_systems_do_no_harm():
    good = (0.25, 0.25, 0.25)
    few = [simulated(100, seed, good) for seed in (0, 1)]
    many = [simulated(100, seed, good + (0.7,)*6) for seed in (0, 1)]
    rates = [wer(test, fit_corrector(val).predict(test)) for val, test in (few, many)]
    assert word_error_rate(many[1].references(), vote(many[1])) > 2*rates[0]
    assert rates[1] < 1.2*rates[0]


def test_systems_may_lack_trials():
    full = simulated(60, 0, (0.2, 0.2, 0.2))
    some = {t: [e for k, e in enumerate(entries) if (int(t) + k) % 4] for t, entries in full.entries.items()}
    h = Hypotheses(full.trials, some)
    combined = cross_validate(h, folds=3)
    assert len(combined) == 60 and wer(h, combined) < 0.25
    nothing = Hypotheses({'x': Trial('x')}, {'x': []})
    assert [c.text for c in fit_corrector(h).predict(nothing)] == ['']


def test_no_sentence_is_judged_by_what_it_taught():
    h = simulated(60, 0, (0.3, 0.3, 0.3))
    before = cross_validate(h, folds=3)
    fold = np.random.default_rng(0).permutation(60) % 3
    for t in np.flatnonzero(fold == 1): h.trials[str(t)] = replace(h.trials[str(t)], reference='quite another one')
    after = cross_validate(h, folds=3)
    assert all(before[t] == after[t] for t in np.flatnonzero(fold == 1))
    assert any(before[t] != after[t] for t in np.flatnonzero(fold != 1))


def test_learning_is_deterministic():
    h = simulated(40, 0, (0.3, 0.3, 0.5))
    assert fit_corrector(h) == fit_corrector(h)


@pytest.mark.skipif(REAL is None, reason='../shared/t15 is not beside the repository')
def test_the_real_lists(tmp_path):
    h = read_hypotheses(REAL/'hypotheses_val.jsonl')
    assert len(h) == 731 and len(h.voters) == 40 and len({v[1] for v in h.voters} | {v[0] for v in h.voters}) > 2
    unknown = Hypotheses({t: replace(trial, corpus=None) for t, trial in h.trials.items()}, h.entries)
    assert with_corpora(unknown, read_blocks(REAL/'copy_task_description.csv')).trials == h.trials
    few = h.subset(list(h.trials)[:50])
    write_hypotheses(tmp_path/'few.jsonl', few)
    assert read_hypotheses(tmp_path/'few.jsonl') == few
    assert word_error_rate(few.references(), vote(few)) < 0.06
