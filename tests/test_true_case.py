"Models of text with capitals (`I`, `I'm`, names) can be queried in lower case, in every file format."
import math
import re
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from b2t_kaggle.lm.arpa import Grams, model_words, read_arpa, write_arpa
from b2t_kaggle.lm.automaton import Automaton, load_ngram
from b2t_kaggle.lm.backoff import prune_ngram
from b2t_kaggle.lm.interpolate import interpolate_ngrams
from b2t_kaggle.lm.ngram import NGram, build_ngram, perplexity_report
from b2t_kaggle.phonemes import build_lexicon

TEXT = ['i think anne is here']*4 + ['you and i know mcneil']*3 + ["i'm fine"]*3 + ['will is here']*3 + ['i will']*2
CASED = {'i': 'I', "i'm": 'I’m', 'anne': 'ANNE', 'mcneil': 'McNeil'}
needs_kenlm = pytest.mark.skipif(find_spec('kenlm') is None, reason='the package kenlm is not installed')


@pytest.fixture(scope='module')
def models(tmp_path_factory):
    "A model in lower case, and the same model with some words in their usual case."
    folder = tmp_path_factory.mktemp('lm')
    plain = build_ngram(TEXT, folder/'plain.arpa', order=3)
    cased = folder/'cased.arpa'
    text = re.sub(r"(?<=[\t ])[a-z']+(?=[\t \n])", lambda m: CASED.get(m[0], m[0]), plain.read_text())
    cased.write_text(text, encoding='utf-8')
    return plain, cased


def test_scores_equal_those_of_lower_case(models):
    plain, cased = map(Automaton.load, models)
    assert 'I' not in plain and plain.order == cased.order == 3
    for s in [*TEXT, 'anne and mcneil know i will', 'nobody is here']: assert plain.score(s) == cased.score(s)
    report = perplexity_report(cased, {'text': TEXT})
    assert report.oov['text'] == 0


def test_words_with_accents_match_the_lexicon(tmp_path):
    "The lexicon has plain words, like every text that is decoded or scored."
    write_arpa(tmp_path/'lm.arpa', ['<unk>', '<s>', '</s>', 'Café', 'nai\u0308ve', 'crème', 'creme'], [7],
               [Grams(np.arange(7)[:, None], -np.arange(7.), np.zeros(7))])
    lm = load_ngram(tmp_path/'lm.arpa')
    assert all(w in lm for w in build_lexicon(model_words(tmp_path/'lm.arpa')))
    assert lm.score('cafe naive creme', False, False) == pytest.approx(-math.log(10)*(3 + 4 + 6))


@needs_kenlm
def test_kenlm_finds_the_same_words(models, tmp_path):
    lm, cased = NGram.load(models[1]), Automaton.load(models[1])
    for word in [*CASED, 'will', 'else']: assert (word in lm) == (word in cased) == (word != 'else')
    for s in [*TEXT, 'anne and mcneil']: assert lm.score(s) == pytest.approx(cased.score(s), abs=1e-4)
    capitals = tmp_path/'capitals.arpa'
    write_arpa(capitals, ['<unk>', '<s>', '</s>', 'THE', 'the', 'IN', 'of', 'NO'], [8],
               [Grams(np.arange(8)[:, None], -np.arange(8.), np.zeros(8))])
    lm, ours = NGram.load(capitals), Automaton.load(capitals)
    for word in ('the', 'in', 'of', 'no', 'yes'):
        assert lm.score(word, False, False) == pytest.approx(ours.score(word, False, False), abs=1e-4)


def test_cached_arrays_have_the_same_names(models, tmp_path, monkeypatch):
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
    monkeypatch.setattr(Automaton, 'MIN_CACHED_BYTES', 0)
    first, kept = load_ngram(models[1]), load_ngram(models[1])
    assert Path(f'{models[1]}.automaton').is_file()
    for lm in (first, kept): assert all(w in lm for w in CASED) and 'I' not in lm


def test_lexicon_and_tools(models, tmp_path):
    plain, cased = models
    assert sorted(model_words(cased)) == sorted(model_words(plain))
    assert set(build_lexicon(model_words(cased))) == set(build_lexicon(model_words(plain)))
    sentences = TEXT[::3]
    for tool in (lambda path, out: prune_ngram(path, out, 0),
                 lambda path, out: interpolate_ngrams([path, plain], out, weights=[.5, .5])):
        tool(plain, tmp_path/'a.arpa')
        tool(cased, tmp_path/'b.arpa')
        a, b = (Automaton.load(tmp_path/name) for name in ('a.arpa', 'b.arpa'))
        assert [a.score(s) for s in sentences] == pytest.approx([b.score(s) for s in sentences], abs=1e-5)


@pytest.mark.parametrize('reader', [Automaton, pytest.param(NGram, marks=needs_kenlm)])
@pytest.mark.parametrize('words, name, taken', [
    (['will', 'Will', 'WILL'], 'will', 'will'), (['Will', 'WILL'], 'will', 'Will'), (['ANNE', 'Anne'], 'anne', 'ANNE'),
    (["O'Neil", 'x'], "o'neil", "O'Neil"), (['don’t', 'x'], "don't", 'don’t'), (['McNeil'], 'mcneil', 'McNeil'),
])
@pytest.mark.parametrize('first', [0, 1])
def test_which_spelling_is_used(reader, words, name, taken, first, tmp_path):
    "The lower-case spelling is used, else the most probable one, wherever it is in the file."
    all_words = ['<unk>', '<s>', '</s>', *(words[::-1] if first else words)]
    log_prob = np.array([-3, 0, -2, *(-1.5 - words.index(w) for w in all_words[3:])])
    if name in words: log_prob[all_words.index(name)] = -9
    path = tmp_path/'lm.arpa'
    write_arpa(path, all_words, [len(all_words)], [Grams(np.arange(len(all_words))[:, None], log_prob, 0*log_prob)])
    expected = math.log(10)*log_prob[all_words.index(taken)]
    assert reader.load(path).score(name, bos=False, eos=False) == pytest.approx(expected, abs=1e-4)
    assert name in reader.load(path) and len(set(read_arpa(path).words)) == len(all_words)


def test_a_model_in_lower_case_is_read_as_it_is(tmp_path):
    words = ['<unk>', '<s>', '</s>', 'a', 'naïve', '1,000', "it's"]
    path = tmp_path/'lm.arpa'
    write_arpa(path, words, [7], [Grams(np.arange(7)[:, None], -np.arange(7.), np.zeros(7))])
    assert read_arpa(path).words == words
