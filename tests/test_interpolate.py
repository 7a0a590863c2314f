"""Interpolated and pruned models sum to one in KenLM and have the right probabilities.

Models of other programs can be read."""
import math
import random
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from b2t_kaggle.lm.arpa import ArpaError, Grams, read_arpa, read_counts, write_arpa
from b2t_kaggle.lm.backoff import _removal_costs, from_arpa, prune_ngram, write_backoff
from b2t_kaggle.lm.interpolate import interpolate_ngrams, interpolation_weights
from b2t_kaggle.lm.ngram import NGram, build_ngram

pytestmark = pytest.mark.filterwarnings('ignore:.*too little text')


def sentences(letters):
    "Texts of 1 to 12 sentences of 1 to 6 one-letter words."
    sentence = st.lists(st.sampled_from(letters), min_size=1, max_size=6).map(' '.join)
    return st.lists(sentence, min_size=1, max_size=12)


def prob(lm, context, word):
    "p(word | context) after the beginning of a sentence; the word may be `</s>`."
    before = lm.score(context, eos=False)
    return math.exp((lm.score(context) if word == '</s>' else lm.score([*context, word], eos=False)) - before)


def assert_normalised(path, contexts):
    words = [w for w in read_arpa(path).words if w not in ('<s>', '<unk>')] + ['unknown']
    lm = NGram.load(path)
    for context in contexts: assert sum(prob(lm, context, w) for w in words) == pytest.approx(1, abs=1e-4), context


@settings(max_examples=25)
@given(sentences('abcde'), sentences('cdefg'), st.integers(2, 4), st.integers(2, 3), st.floats(.05, .95), st.randoms())
def test_mixture(tmp_path_factory, one, two, order, other_order, weight, rng):
    "Every n-gram of models with different orders and vocabularies gets its interpolated probability."
    tmp = tmp_path_factory.mktemp('mix')
    def build(text, name, order):
        order = min(order, max(len(s.split()) for s in text) + 2)
        return build_ngram(text, tmp/name, order=order)
    paths = [build(one, 'one.arpa', order), build(two, 'two.arpa', other_order)]
    interpolate_ngrams(paths, tmp/'mix.arpa', weights=[weight, 1 - weight])
    contexts = [[], *(rng.choices('abcdefgz', k=k) for k in (1, 2, 3))]
    assert_normalised(tmp/'mix.arpa', contexts)
    mixed, *parts = map(NGram.load, [tmp/'mix.arpa', *paths])
    assert read_counts(tmp/'mix.arpa')[0] == len({w for p in paths for w in read_arpa(p).words})
    for s in one + two: # n-grams at the beginnings of sentences, up to the lower order
        words = s.split()
        known = min(m.order for m in parts)
        for k in range(min(len(words), known - 1)):
            expected = sum(x*prob(m, words[:k], words[k]) for m, x in zip(parts, (weight, 1 - weight)) if words[k] in m)
            if all(w in m for m in parts for w in words[:k + 1]):
                assert prob(mixed, words[:k], words[k]) == pytest.approx(expected, rel=1e-3)


@settings(max_examples=25)
@given(sentences('abcdef'), st.integers(2, 4), st.sampled_from([0, 1e-4, 1e-2, .1, 10]), st.randoms())
def test_pruning(tmp_path_factory, text, order, threshold, rng):
    tmp = tmp_path_factory.mktemp('prune')
    order = min(order, max(len(s.split()) for s in text) + 2)
    path = build_ngram(text, tmp/'lm.arpa', order=order)
    pruned = prune_ngram(path, tmp/'pruned.arpa', threshold)
    assert_normalised(pruned, [[], *(rng.choices('abcdefz', k=k) for k in (1, 2, 3))])
    before, after = read_counts(path), read_counts(pruned)
    assert len(before) == len(after) and before[0] == after[0]
    assert all(a <= b for a, b in zip(after, before))
    if threshold == 0: assert before == after
    if threshold == 10: assert sum(after[1:]) < sum(before[1:]) or sum(before[1:]) == 0
    kept = [set(map(tuple, g.ids.tolist())) for g in read_arpa(pruned).grams]
    for low, high in zip(kept, kept[1:]): assert all(g[:-1] in low for g in high)
    full = read_arpa(path)
    lm = NGram.load(pruned)
    for g in read_arpa(pruned).grams[1:]: # Remaining n-grams keep their probabilities
        for ids, p in list(zip(g.ids.tolist(), g.log_prob.tolist()))[:20]:
            words = [full.words[i] for i in ids]
            if words[0] == '<s>': assert prob(lm, words[1:-1], words[-1]) == pytest.approx(10**p, rel=1e-3)


def test_weights_find_the_mixture():
    "Words are drawn from a known mixture of known distributions; unknown words are ignored."
    rng = np.random.default_rng(0)
    models = rng.dirichlet(np.full(50, .3), 3)
    weights = np.array([.6, .3, .1])
    words = rng.choice(50, 40_000, p=weights @ models)
    found = interpolation_weights(models[:, words].T)
    np.testing.assert_allclose(found, weights, atol=.03)
    np.testing.assert_allclose(interpolation_weights(np.concatenate([models[:, words].T, np.zeros((500, 3))])), found)
    with pytest.raises(ValueError, match='no model knows a word'): interpolation_weights(np.zeros((5, 2)))


TEXT = [' '.join(random.Random(i).choices('abcdefgh', k=7)) for i in range(60)]


def srilm_pruned(path, out, every):
    """Remove one in `every` bigrams that begin no trigram, as SRILM's pruning may do.

    The backoff weights are not updated."""
    content = path.read_text().replace('\\end\\', '')
    head = content.split('\\1-grams:\n')[0]
    unigrams, bigrams, trigrams = (content.split(f'\\{n}-grams:\n')[1].split('\\')[0] for n in (1, 2, 3))
    bigrams = bigrams.strip().splitlines()
    begins = {' '.join(line.split()[1:3]) for line in trigrams.strip().splitlines()}
    bigrams = [line for i, line in enumerate(bigrams) if ' '.join(line.split()[1:3]) in begins or i % every]
    head = '\n'.join(f'ngram 2={len(bigrams)}' if line.startswith('ngram 2') else line for line in head.splitlines())
    out.write_text('\n'.join([head, '', '\\1-grams:', unigrams.strip(), '', '\\2-grams:', *bigrams, '',
                              '\\3-grams:', trigrams.strip(), '', '\\end\\', '']))
    return out


def test_suffixes_that_other_programs_pruned_are_added(tmp_path):
    """Added suffixes get the probabilities that KenLM finds by backing off; if KenLM refuses a model, the error gives a
    remedy."""
    path = build_ngram(TEXT, tmp_path/'lm.arpa', order=3)
    holes = srilm_pruned(path, tmp_path/'holes.arpa', 4)
    model = read_arpa(holes)
    closed = from_arpa(read_arpa(holes))
    assert len(closed.tables[1].key) > len(model.grams[1].ids)
    again = from_arpa(read_arpa(write_backoff(closed, tmp_path/'closed.arpa')))
    for a, b in zip(closed.tables, again.tables):
        np.testing.assert_array_equal(a.key, b.key)
        np.testing.assert_allclose(a.prob[2:], b.prob[2:], rtol=1e-5)
    a, b = NGram.load(holes), NGram.load(tmp_path/'closed.arpa')
    for s in TEXT: assert a.score(s) == pytest.approx(b.score(s), abs=1e-4)
    words = ['<unk>', '<s>', '</s>', *map(str, range(20))]
    numbers = range(3, 23)
    ids = [(i,) for i in range(23)], [(1, i) for i in numbers], [(1, i, j) for i in numbers for j in numbers]
    grams = [Grams(np.array(i), np.full(len(i), -1.5), np.zeros(len(i))) for i in ids]
    write_arpa(tmp_path/'many.arpa', words, list(map(len, ids)), grams)
    with pytest.raises(ValueError, match='b2t lm prune .*many.arpa -o NEW.arpa --threshold 0'):
        NGram.load(tmp_path/'many.arpa')
    assert read_counts(prune_ngram(tmp_path/'many.arpa', tmp_path/'mended.arpa', 0)) == [23, 420, 400]
    assert NGram.load(tmp_path/'mended.arpa').order == 3
    assert_normalised(prune_ngram(holes, tmp_path/'mended.arpa', 0), [[], ['a'], ['a', 'b'], ['z']])


def test_capitals_and_lower_case_are_interpolated(tmp_path):
    path = build_ngram([f'{s} want to' for s in TEXT], tmp_path/'lm.arpa', order=3)
    capitals = re.sub(r'(?<=[\t ])(?!<)\S+', lambda m: m[0].upper(), path.read_text())
    (tmp_path/'data.arpa').write_text(capitals.replace('<unk>', '<UNK>'))
    interpolate_ngrams([tmp_path/'data.arpa', path], tmp_path/'mix.arpa', weights=[1, 1])
    mixed = NGram.load(tmp_path/'mix.arpa')
    lm = NGram.load(path)
    assert read_counts(tmp_path/'mix.arpa') == read_counts(path)
    for s in TEXT[:20]: assert mixed.score(s) == pytest.approx(lm.score(s), abs=1e-3)


def test_pruning_with_a_threshold_of_zero_changes_nothing(tmp_path):
    path = prune_ngram(build_ngram(TEXT, tmp_path/'lm.arpa', order=4), tmp_path/'pruned.arpa', 1e-3)
    a, b = NGram.load(path), NGram.load(prune_ngram(path, tmp_path/'again.arpa', 0))
    for s in TEXT: assert a.score(s) == pytest.approx(b.score(s), abs=1e-4)
    assert all((c >= 0).all() for c in _removal_costs(from_arpa(read_arpa(path))))


def test_refuses(tmp_path):
    path = build_ngram(TEXT, tmp_path/'lm.arpa', order=2)
    with pytest.raises(ValueError, match='development text'): interpolate_ngrams([path], tmp_path/'x')
    with pytest.raises(ValueError, match='expected 1'): interpolate_ngrams([path], tmp_path/'x', weights=[-1])
    content = path.read_text()
    n_bigrams = read_counts(path)[1]
    first_bigram = content.split('\\2-grams:\n')[1].split('\n')[0]
    content = content.replace('\n\n\\end', f'\n{first_bigram}\n\n\\end')
    (tmp_path/'twice.arpa').write_text(content.replace(f'ngram 2={n_bigrams}', f'ngram 2={n_bigrams + 1}'))
    with pytest.raises(ArpaError, match='twice.arpa: a 2-gram occurs twice'):
        prune_ngram(tmp_path/'twice.arpa', tmp_path/'x', 0)
    (tmp_path/'no.arpa').write_text('\\data\\\nngram 1=1\n\n\\1-grams:\n-1\ta\n\n\\end\\\n')
    with pytest.raises(ArpaError, match='no.arpa: the model has no unigram <s>'):
        prune_ngram(tmp_path/'no.arpa', tmp_path/'x', 0)
