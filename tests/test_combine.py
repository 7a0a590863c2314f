"Minimum Bayes risk and the plain vote against definitions and brute force; the bootstrap."
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rapidfuzz.distance import Levenshtein

from b2t_kaggle.decoding.nbest import Hypothesis, word_distances
from b2t_kaggle.metrics.bootstrap import bootstrap_difference
from b2t_kaggle.rescoring.combine import Combination, combine, minimum_bayes_risk, posterior

sentence = st.lists(st.sampled_from('abcd'), max_size=5).map(' '.join)
distinct = st.lists(sentence, min_size=1, max_size=6, unique=True)


def hyp(text, total=0.): return Hypothesis(text, total, 0., len(text.split()), total)


@given(distinct, st.data())
def test_minimum_bayes_risk_by_definition(texts, data):
    weights = np.array(data.draw(st.lists(st.integers(1, 9), min_size=len(texts), max_size=len(texts))), float)
    p = posterior([[hyp(t, np.log(w)) for t, w in zip(texts, weights)]], Combination())
    np.testing.assert_allclose(list(p.values()), weights/weights.sum())
    def risk(t): return sum(w*Levenshtein.distance(t.split(), u.split()) for u, w in p.items())
    assert risk(minimum_bayes_risk(p)) == pytest.approx(min(map(risk, texts)))


@given(distinct, st.data())
def test_the_pivot_of_a_vote_has_the_lowest_risk(texts, data):
    weights = np.array(data.draw(st.lists(st.integers(1, 9), min_size=len(texts), max_size=len(texts))), float)
    def edits(a, b): return Levenshtein.distance(a.split(), b.split())
    risks = {text: sum(w*edits(other, text) for w, other in zip(weights, texts)) for text in texts}
    assert risks[minimum_bayes_risk(dict(zip(texts, weights)))] == pytest.approx(min(risks.values()))


def test_the_first_of_equal_sentences_wins():
    assert minimum_bayes_risk(posterior([[hyp('a b'), hyp('c d')]], Combination())) == 'a b'


def test_certainty_wins():
    systems = [[hyp('a b c', 0.), hyp('a d c', -50.), hyp('x y z', -60.)]], [[hyp('x y z', 0.)]]
    assert combine(systems, Combination(weights=(1., 0.))) == ['a b c']
    assert combine(systems, Combination(weights=(0., 1.))) == ['x y z']


def test_more_than_256_words_are_distinguished():
    texts = [' '.join(f'w{chr(97 + j % 26)}{chr(97 + j // 26)}{chr(97 + i)}' for j in range(300)) for i in range(3)]
    assert (word_distances(texts) == 300*(1 - np.eye(3))).all()


def simulated(n, seed, rates):
    "Systems with these word error rates, and references."
    rng = np.random.default_rng(seed)
    references = [[f'w{chr(97 + i)}' for i in rng.integers(0, 26, 6)] for _ in range(n)]
    def with_errors(words, rate):
        return ' '.join(w if rng.random() > rate else f'x{chr(97 + rng.integers(26))}' for w in words)
    return [[[hyp(with_errors(s, rate))] for s in references] for rate in rates], [' '.join(s) for s in references]


def wer(references, texts):
    "Word error rate of texts with as many words as the references."
    edits = sum(sum(a != b for a, b in zip(s.split(), t.split())) for s, t in zip(references, texts))
    return edits/sum(len(s.split()) for s in references)


def test_independent_systems_correct_each_other():
    systems, references = simulated(150, 0, (0.2, 0.2, 0.2))
    alone = [wer(references, [h.text for h, in s]) for s in systems]
    votes = combine(systems)
    assert wer(references, votes) < 0.7*min(alone)
    assert bootstrap_difference(references, [h.text for h, in systems[0]], votes).high < 0


def test_the_interval_is_normal_for_many_sentences():
    rng = np.random.default_rng(0)
    references = ['a b c d e']*2000
    def system(rate): return [' '.join(w if rng.random() > rate else 'x' for w in 'abcde') for _ in references]
    def errors(texts): return np.array([sum(x == 'x' for x in t.split()) for t in texts])
    a = system(0.2)
    b = system(0.15)
    more = errors(b) - errors(a)
    d = bootstrap_difference(references, a, b)
    half = 1.96*more.std()/np.sqrt(len(more))/5
    assert d.value == pytest.approx(more.mean()/5)
    assert (d.low, d.high) == pytest.approx((d.value - half, d.value + half), abs=half/8)
    assert bootstrap_difference(references, a, b) == d
    assert bootstrap_difference(references, b, a).value == -d.value


def test_sources_of_two_splits_or_without_sentences_are_refused(tmp_path, monkeypatch):
    "Trials of val and test have the same numbers; an empty source would vote nowhere, and an id twice only once."
    from click.testing import CliRunner

    from b2t_kaggle.cli import main
    monkeypatch.chdir(tmp_path)
    for name in 'a_val.jsonl', 'b_test.jsonl', 'c_val.jsonl':
        first = 100*(name == 'c_val.jsonl')
        lines = (f'{{"trial": "{i + first}", "text": "how are you", "system": "{name}"}}\n' for i in range(3))
        (tmp_path/name).write_text(''.join(lines))
    (tmp_path/'empty_val.txt').touch()
    (tmp_path/'d.csv').write_text('id,text\n0,a\n1,b\n2,c\n')
    (tmp_path/'twice_val.csv').write_text('id,text\n0,a\n0,b\n')
    def combined(*sources): return CliRunner().invoke(main, ['combine-files', *sources, '-o', 'o.jsonl']).output
    for other in 'b_test.jsonl', 'd.csv':
        assert f'{other} has sentences of test and a_val.jsonl of val' in combined('a_val.jsonl', other)
    assert 'empty_val.txt has no sentences' in combined('a_val.jsonl', 'empty_val.txt')
    assert 'the id 0 occurs twice' in combined('a_val.jsonl', 'twice_val.csv')
    assert 'different trials: 6 trials with 1 voter' in combined('a_val.jsonl', 'c_val.jsonl')
    assert 'different trials' not in combined('b_test.jsonl', 'd.csv')
