"Alignment, minimum Bayes risk and ROVER against definitions and brute force; the bootstrap's interval against the normal one; what cross-validation may not see."
import numpy as np
import pytest
from hypothesis import given, strategies as st
from rapidfuzz.distance import Levenshtein

from b2t_kaggle.decoding.nbest import Hypothesis
from b2t_kaggle.rescoring.combine import (Combination, _grid, bootstrap_difference, candidates, combine, combine_trial, cross_validate_combination, minimum_bayes_risk, posterior,
                                         rover, tune_combination, word_network)

sentence = st.lists(st.sampled_from('abcd'), max_size=5).map(' '.join)
distinct = st.lists(sentence, min_size=1, max_size=6, unique=True)


def hyp(text, total=0.): return Hypothesis(text, total, 0., len(text.split()), total)


@given(distinct)
def test_a_network_holds_every_sentence(texts):
    rows = word_network(texts)
    assert len({len(row) for row in rows}) == 1
    assert [' '.join(filter(None, row)) for row in rows] == texts
    assert all(any(column) for column in zip(*rows)) # No slot is empty for all


@given(sentence, sentence)
def test_two_sentences_are_aligned_at_their_edit_distance(a, b):
    if a == b: return
    rows = word_network([a, b])
    assert sum(x != y for x, y in zip(*rows)) == Levenshtein.distance(a.split(), b.split())


@given(distinct, st.data())
def test_minimum_bayes_risk_by_definition(texts, data):
    weights = np.array(data.draw(st.lists(st.integers(1, 9), min_size=len(texts), max_size=len(texts))), float)
    c = candidates([[hyp(t, np.log(w)) for t, w in zip(texts, weights)]])
    p = posterior(c, Combination())
    np.testing.assert_allclose(p, weights/weights.sum())
    risk = lambda t: sum(w*Levenshtein.distance(t.split(), u.split()) for u, w in zip(texts, p))
    assert risk(minimum_bayes_risk(c, p)) == pytest.approx(min(map(risk, texts)))


@given(distinct.flatmap(st.permutations))
def test_rover_takes_the_heaviest_word_of_each_slot(texts):
    c = candidates([[hyp(t, np.log(2.)*i) for i, t in enumerate(texts)]]) # Powers of two: no two sets of sentences weigh the same
    p = posterior(c, Combination())
    heaviest = lambda column: max(set(column), key=lambda w: sum(q for x, q in zip(column, p) if x == w))
    assert rover(c, p) == ' '.join(filter(None, map(heaviest, zip(*c.rows))))


def test_among_equals_the_first_sentence_wins():
    c = candidates([[hyp('a b'), hyp('c d')]])
    for answer in (rover, minimum_bayes_risk): assert answer(c, posterior(c, Combination())) == 'a b'


def test_certainty_wins_whatever_the_method():
    c = candidates([[hyp('a b c', 0.), hyp('a d c', -50.), hyp('x y z', -60.)], [hyp('x y z', 0.)]])
    for method in ('mbr', 'rover'):
        assert combine_trial(c, Combination(method, 1., (1., 0.))) == 'a b c'
        assert combine_trial(c, Combination(method, 1., (0., 1.))) == 'x y z'


def test_words_far_beyond_a_byte_are_told_apart():
    texts = [' '.join(f'w{chr(97 + j % 26)}{chr(97 + j // 26)}{chr(97 + i)}' for j in range(300)) for i in range(3)]
    assert (candidates([[hyp(t) for t in texts]]).distance == 300*(1 - np.eye(3))).all()


def simulated(n, seed, rates):
    "What systems with these word error rates understood, and what was said."
    rng = np.random.default_rng(seed)
    said = [[f'w{chr(97 + i)}' for i in rng.integers(0, 26, 6)] for _ in range(n)]
    hears = lambda words, rate: ' '.join(w if rng.random() > rate else f'x{chr(97 + rng.integers(26))}' for w in words)
    return [[[hyp(hears(s, rate))] for s in said] for rate in rates], [' '.join(s) for s in said]


def wer(said, texts): return sum(sum(a != b for a, b in zip(s.split(), t.split())) for s, t in zip(said, texts))/sum(len(s.split()) for s in said)


def test_independent_systems_correct_each_other():
    systems, said = simulated(150, 0, (0.2, 0.2, 0.2))
    alone = [wer(said, [h.text for h, in s]) for s in systems]
    votes = combine(systems, Combination('rover'))
    assert wer(said, votes) < 0.7*min(alone)
    assert bootstrap_difference(said, [h.text for h, in systems[0]], votes).high < 0


def test_tuning_trusts_the_better_system():
    systems, said = simulated(60, 1, (0.5, 0.02))
    how = tune_combination(systems, said)
    assert how.weights[1] > how.weights[0]
    assert wer(said, combine(systems, how)) <= wer(said, [h.text for h, in systems[1]])


def test_all_ways_to_share_out_quarters_among_few_systems():
    shares = {how.weights for how in _grid(3)}
    assert shares == {(1., 1., 1.)} | {(a/4, b/4, (4 - a - b)/4) for a in range(5) for b in range(5 - a)} # Three systems never share four quarters alike
    assert {how.weights for how in _grid(2)} == {(1., 1.), (0., 1.), (0.25, 0.75), (0.75, 0.25), (1., 0.)}


def test_ten_systems_weigh_the_same():
    systems, said = simulated(20, 3, (0.3,)*10)
    how = tune_combination(systems, said)
    assert how.weights == (1.,)*10
    assert wer(said, combine(systems, how)) < min(wer(said, [h.text for h, in s]) for s in systems)


def test_cross_validation_never_asks_the_trial_itself():
    systems, said = simulated(30, 2, (0.3, 0.3))
    texts, chosen = cross_validate_combination(systems, said)
    assert len(chosen) == 2 and texts[4] == combine([s[4:5] for s in systems], chosen[0])[0] and texts[7] == combine([s[7:8] for s in systems], chosen[1])[0]
    liar = said.copy(); liar[4] = 'something else entirely'
    again = cross_validate_combination(systems, liar)
    assert again[1][0] == chosen[0] and again[0][4] == texts[4]


def test_the_interval_is_the_normal_one_for_many_sentences():
    rng = np.random.default_rng(0)
    said = ['a b c d e']*2000
    a, b = ([' '.join(w if rng.random() > rate else 'x' for w in 'abcde') for _ in said] for rate in (0.2, 0.15))
    more = np.array([sum(x == 'x' for x in t.split()) for t in b]) - np.array([sum(x == 'x' for x in t.split()) for t in a])
    d = bootstrap_difference(said, a, b)
    half = 1.96*more.std()/np.sqrt(len(more))/5
    assert d.value == pytest.approx(more.mean()/5)
    assert (d.low, d.high) == pytest.approx((d.value - half, d.value + half), abs=half/8)
    assert bootstrap_difference(said, a, b) == d
    assert bootstrap_difference(said, b, a).value == -d.value
