"An opinion pool agrees with definitions, finite differences and simulated systems whose seeds share their errors."
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from rapidfuzz.distance import Levenshtein
from tiny_models import tiny_lm

from b2t_kaggle.cli.combine import combine_files
from b2t_kaggle.lm.causal import load_lm, score_sentences
from b2t_kaggle.metrics import word_error_rate
from b2t_kaggle.rescoring.hypotheses import (
    Entry,
    Hypotheses,
    Trial,
    read_blocks,
    read_hypotheses,
    vote,
    with_corpora,
    write_hypotheses,
)
from b2t_kaggle.rescoring.opinion_pool import (
    Opinions,
    bounded_voice,
    cross_validate_pool,
    fit_conditional_logit,
    fit_pool,
    llm_scores,
    random_trials,
    sentence_folds,
)

REAL = next((p for p in (Path(__file__).parents[n]/'shared'/'t15' for n in (1, 2)) if p.exists()), None)
KINDS = (8, 0.1, 0.02), (3, 0.1, 0.05), (3, 0.1, 0.05)


def with_errors(rng, words, rate):
    return [w if rng.random() > rate else f'miss{chr(97 + rng.integers(26))}' for w in words]


def simulated(n, seed, kinds=KINDS):
    """Simulate kinds, each with its number of seeds, their shared error rate and each seed's own; seeds have the same
    sentences."""
    h = Hypotheses()
    sentences = np.random.default_rng(seed)
    for i in range(n):
        words = [f'word{chr(97 + k)}' for k in sentences.integers(0, 26, 6)]
        h.add(Trial(str(i), reference=' '.join(words)))
        for g, (n_seeds, shared, own) in enumerate(kinds):
            rng = np.random.default_rng([seed, i, g])
            heard = with_errors(rng, words, shared)
            h.add(Trial(str(i)), [Entry(str(i), ' '.join(with_errors(rng, heard, own)), f'system{g}', str(k))
                                  for k in range(n_seeds)])
    return h


def wer(h, combined): return word_error_rate(h.references(), [c.text for c in combined])


def test_the_coefficients_have_the_least_loss():
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 6, 200)
    starts = np.r_[0, np.cumsum(sizes)[:-1]]
    x = rng.normal(size=(sizes.sum(), 3))
    good = rng.random(len(x)) < 0.4
    good[starts] |= ~np.logical_or.reduceat(good, starts) # At least one error in each trial
    prior = np.array([1., 0., 0.])
    penalty = np.array([0.1, 1., 20.])
    def loss(w):
        nll = 0
        for start, size in zip(starts, sizes):
            p = np.exp(x[start:start + size] @ w)
            nll -= np.log(p[good[start:start + size]].sum()/p.sum())
        return nll + (penalty*(w - prior)**2).sum()/2
    w = fit_conditional_logit(x, good, starts, prior, penalty)
    for step in np.concatenate([np.eye(3), -np.eye(3)]): assert loss(w + 1e-3*step) > loss(w)


@given(st.lists(st.lists(st.sampled_from('abc'), max_size=4).map(' '.join), min_size=1, max_size=8), st.data())
def test_the_chosen_sentence_has_the_fewest_expected_errors(texts, data):
    h = Hypotheses()
    names = [(data.draw(st.sampled_from('st')), str(k)) for k in range(len(texts))]
    h.add(Trial('1', reference='a b'), [Entry('1', text, *name) for text, name in zip(texts, names)])
    pool = fit_pool(h)
    text = pool.predict(h)[0].text
    trials = Opinions(h, h.voters)
    p = np.exp(trials.x @ [*pool.coefficients.values(), *pool.deviations.values()])
    def risk(t): return sum(q*Levenshtein.distance(t.split(), u.split()) for q, u in zip(p/p.sum(), set_of(texts)))
    assert text in texts and risk(text) == pytest.approx(min(map(risk, texts)))


def set_of(texts): return list(dict.fromkeys(texts))


def test_more_voters_do_no_harm():
    few, many = ([simulated(150, seed, kinds) for seed in (0, 1)]
                 for kinds in (KINDS, KINDS + ((8, 0.3, 0.05), (4, 0.3, 0.1), (1, 0.5, 0.))))
    rates = [wer(test, fit_pool(val).predict(test)) for val, test in (few, many)]
    votes = [word_error_rate(h.references(), vote(h)) for _, h in (few, many)]
    assert rates[0] < 0.75*votes[0] and rates[1] < 1.05*rates[0]
    weights = list(fit_pool(many[0]).weights.values())
    assert np.mean(weights[3:]) < 0.8*np.mean(weights[:3])


def test_equal_seeds_do_not_count_several_times():
    def copied(seed, n):
        h = simulated(150, seed, ((1, 0.12, 0.), (1, 0.1, 0.), (1, 0.1, 0.)))
        for t, entries in h.entries.items(): entries += [replace(entries[0], model=str(k)) for k in range(1, n)]
        return h
    val, test = copied(0, 9), copied(1, 9)
    assert word_error_rate(test.references(), vote(test)) > 0.11 # The nine copies outvote the two others
    assert wer(test, fit_pool(val).predict(test)) < 0.5*word_error_rate(test.references(), vote(test))


def test_names_and_order_of_seeds_do_not_matter():
    h = simulated(60, 0)
    other = Hypotheses(h.trials, {t: [replace(e, model=f'seed {-int(e.model)}') for e in entries[::-1]]
                                  for t, entries in h.entries.items()})
    pool = fit_pool(h)
    again = fit_pool(other)
    assert again.weights == pytest.approx(pool.weights) and again.coefficients == pytest.approx(pool.coefficients)
    assert fit_pool(h) == pool


def test_no_sentence_is_judged_by_a_pool_fitted_on_it():
    h = simulated(60, 0)
    before = cross_validate_pool(h, folds=3)
    h.add(replace(h.trials['7'], trial='again'), [replace(e, trial='again') for e in h.entries['8']])
    after = cross_validate_pool(h, folds=3)
    fold = sentence_folds(h.references(), 3)
    assert fold[7] == fold[60] and all(before[i] == after[i] for i in np.flatnonzero(fold[:60] == fold[7]))
    assert any(before[i] != after[i] for i in np.flatnonzero(fold[:60] != fold[7]))


NOISY = (3, 0.2, 0.05), (3, 0.2, 0.05)


def knowing(hypotheses, sign=1):
    "Scores of an LM that knows the references, except for every fourth sentence."
    right = {t.reference for i, t in enumerate(hypotheses.trials.values()) if i % 4}
    texts = {e.text for entries in hypotheses.entries.values() for e in entries}
    return {text: -10. - sign*30.*(text not in right) for text in texts}


def test_the_weight_of_a_causal_lm_is_bounded():
    val, test = simulated(150, 0, NOISY), simulated(150, 1, NOISY)
    plain = wer(test, fit_pool(val).predict(test))
    pool = fit_pool(val, llm=knowing(val))
    oracle = [min((e.text for e in test.entries[t]), key=lambda text: Levenshtein.distance(text, trial.reference))
              for t, trial in test.trials.items()]
    floor = word_error_rate(test.references(), oracle)
    assert wer(test, pool.predict(test, llm=knowing(test))) - floor < 0.7*(plain - floor)
    assert pool.coefficients['llm'] > 0
    voice = bounded_voice(np.array([-1e6, -5., -np.inf]))
    assert np.ptp(voice) == pytest.approx(np.log(10.5/0.5)) # Like ten votes against none
    with pytest.raises(ValueError, match='found the features votes, agreement, support, .* repeats, expected'):
        pool.predict(test)


def test_a_causal_lm_is_ignored_in_blocks_of_random_words():
    h = simulated(100, 0, NOISY)
    trials = {t: replace(trial, corpus='Random' if int(t) % 2 else 'Harvard') for t, trial in h.trials.items()}
    h = Hypotheses(trials, h.entries)
    assert random_trials(h, {}) == {t for t in trials if int(t) % 2}
    pool = fit_pool(h, llm=knowing(h))
    one, other = ([c.text for c in pool.predict(h, llm=knowing(h, sign))] for sign in (1, -1))
    assert one[1::2] == other[1::2] and one[::2] != other[::2]


def test_scores_of_a_causal_lm_agree_with_those_of_the_sentences(tmp_path):
    h = simulated(3, 0)
    texts = sorted({e.text for entries in h.entries.values() for e in entries})
    model, tokenizer = load_lm(tiny_lm(tmp_path, 'llama', texts))
    found = llm_scores(h, model, tokenizer, progress=False)
    assert set(found) == set(texts)
    np.testing.assert_allclose([found[t] for t in texts], score_sentences(model, tokenizer, texts, end=True), rtol=1e-4)


def test_the_command_uses_a_causal_lm(tmp_path):
    val, test = simulated(20, 0, NOISY), simulated(10, 1, NOISY)
    for name, h in ('val', val), ('test', test): write_hypotheses(tmp_path/f'{name}.jsonl', h)
    folder = tiny_lm(tmp_path/'llm', 'llama', val.references())
    told = CliRunner().invoke(combine_files, [str(tmp_path/'test.jsonl'), '--tune', str(tmp_path/'val.jsonl'), '--llm',
                                              str(folder), '-o', str(tmp_path/'out.jsonl')])
    assert told.exit_code == 0, told.output
    assert re.search(r'of language models and other features: .*llm [+-]', told.output), told.output
    model, tokenizer = load_lm(folder)
    scores = [llm_scores(h, model, tokenizer, progress=False) for h in (val, test)]
    expected = fit_pool(val, llm=scores[0]).predict(test, llm=scores[1])
    written = read_hypotheses(tmp_path/'out.jsonl').entries.values()
    assert [e.text for (e,) in written] == [c.text for c in expected]


def test_systems_may_lack_trials():
    full = simulated(60, 0, ((1, 0.2, 0.), (1, 0.2, 0.), (1, 0.2, 0.)))
    some = {t: [e for k, e in enumerate(entries) if (int(t) + k) % 4] for t, entries in full.entries.items()}
    h = Hypotheses(full.trials, some)
    combined = cross_validate_pool(h, folds=3)
    assert len(combined) == 60 and wer(h, combined) < 0.25
    nothing = Hypotheses({'x': Trial('x')}, {'x': []})
    assert [c.text for c in fit_pool(h).predict(nothing)] == ['']


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


@pytest.mark.skipif(REAL is None, reason='../shared/t15 is not beside the repository')
def test_ninety_real_voters_are_better_than_forty():
    forty = read_hypotheses(REAL/'hypotheses_val.jsonl')
    ninety = read_hypotheses(REAL/'hypotheses_val.jsonl', REAL/'more_systems_val.jsonl')
    assert random_trials(forty, {}) == {n for n, t in forty.trials.items() if t.corpus == 'Random'}
    rates = [wer(h, cross_validate_pool(h, folds=3)) for h in (forty, ninety)]
    assert rates[1] <= rates[0] + 1e-3 and rates[1] < word_error_rate(ninety.references(), vote(ninety)) - 2e-3
