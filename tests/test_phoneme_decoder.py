"Lists of phoneme sequences: the search agrees with all paths, learned scores with sums, and real lists are decoded."
import csv
import itertools
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from b2t_kaggle.decoding.phoneme_lists import decoder
from b2t_kaggle.decoding.phoneme_lists.confusions import N_WEIGHTS, class_scores, network_rows, true_classes
from b2t_kaggle.decoding.phoneme_lists.decoder import (
    ConfusionModel,
    RankingWeights,
    _held_out,
    _Labelled,
    decode_lists,
    expected_errors,
    fit_confusions,
    list_frames,
)
from b2t_kaggle.decoding.phoneme_lists.lists import parse_phonemes, phoneme_list, phoneme_network, read_phoneme_lists
from b2t_kaggle.lm.automaton import Automaton
from b2t_kaggle.lm.ngram import build_ngram
from b2t_kaggle.metrics import total, word_errors
from b2t_kaggle.phonemes import BLANK, SIL, build_lexicon, normalize_sentence, to_class_ids

pytestmark = pytest.mark.filterwarnings('ignore:.*too little text')
LEXICON = {'a': [['AH']], 'ab': [['AH', 'B']], 'b': [['B'], ['B', 'AH']]}
CLASSES = [BLANK, *to_class_ids(['AH', 'B']), SIL]
T15 = Path(__file__).parents[2]/'shared'/'t15'


@pytest.fixture(scope='module')
def lm(tmp_path_factory):
    path = tmp_path_factory.mktemp('lm')/'lm.arpa'
    return Automaton.load(build_ngram(['a b', 'b a', 'ab', 'a', 'b b a'], path, order=2))


def random_model(seed):
    rng = np.random.default_rng(seed)
    return ConfusionModel(rng.normal(size=N_WEIGHTS), rng.normal(size=N_WEIGHTS), lm_weight=.7, word_score=-.3)


def spellings(text):
    ways = itertools.product(*(LEXICON[w] for w in text.split()))
    return [tuple(s for pron in way for s in (*to_class_ids(pron).tolist(), SIL)) for way in ways]


def best_by_enumeration(frames, lm, model):
    "The best total of each sentence that a path over the lexicon's classes spells, by enumeration of all paths."
    best_of_labels = {}
    for path in itertools.product(CLASSES, repeat=len(frames)):
        labels = tuple(k for k, _ in itertools.groupby(path) if k != BLANK)
        score = sum(frames[t, k] for t, k in enumerate(path))
        best_of_labels[labels] = max(score, best_of_labels.get(labels, -math.inf))
    totals = {}
    for n in range(4):
        for words in itertools.product(LEXICON, repeat=n):
            text = ' '.join(words)
            acoustic = max(best_of_labels.get(s, -math.inf) for s in spellings(text))
            totals[text] = acoustic + model.lm_weight*lm.score(text) + model.word_score*n
    return max(totals.items(), key=lambda item: item[1])


@pytest.mark.parametrize('seed', range(5))
def test_the_best_sentence_agrees_with_all_paths(lm, seed):
    x = phoneme_list({'five_best': [{'phonemes': 'AH B |', 'score': -.4}, {'phonemes': 'AH | |', 'score': -1.3}]})
    model = random_model(seed)
    frames = list_frames(x, model)
    assert frames.shape == (7, 41) and np.allclose(np.logaddexp.reduce(frames, 1), 0)
    text, score = best_by_enumeration(frames, lm, model)
    found = max(decode_lists([x], LEXICON, lm, model)[0], key=lambda h: h.total)
    assert found.text == text
    assert found.total == pytest.approx(score, abs=1e-3)


def test_the_best_total_with_an_llm_agrees_with_all_paths(lm):
    "For any scores of the LLM; the search's own weights only determine which sentences are found."
    x = phoneme_list({'five_best': [{'phonemes': 'AH B |', 'score': -.4}, {'phonemes': 'AH | |', 'score': -1.3}]})
    def scores(texts): return np.array([math.sin(sum(map(ord, t))) for t in texts])
    class Both:
        "The n-gram and the LLM as one score."
        def score(self, text): return .6*lm.score(text) + 1.7*scores([text])[0]
    model = random_model(11)
    ranking = RankingWeights(acoustic=1., ngram=.6, word_score=-.2, llm=1.7)
    found = decode_lists([x], LEXICON, lm, replace(model, ranking=ranking), llm=scores)[0]
    as_one = replace(model, lm_weight=1., word_score=-.2)
    text, score = best_by_enumeration(list_frames(x, model), Both(), as_one)
    best = max(found, key=lambda h: h.total)
    assert len(found) > 3 and best.text == text
    assert best.total == pytest.approx(score, abs=1e-3)
    assert (np.diff(expected_errors(found, 2.)) > -1e-9).all()


def test_an_llm_is_weighted_with_sentences_found_without_their_references(lm):
    """Other references in one fold change only the lists of the other fold. With a large penalty nothing is learned,
    and the best total is that of all paths."""
    spoken = {'AH B | AH |': 'a b', 'AH | B |': 'a b', 'B | AH |': 'b a', 'AH B |': 'ab'}
    lists = [phoneme_list({'greedy': heard, 'phonemes': heard, 'sentence': s}) for heard, s in spoken.items()]
    model = random_model(5)
    networks = [phoneme_network(x.sequences, x.scores) for x in lists]
    labelled = [_Labelled(*network_rows(network), *true_classes(network, x.phonemes), x.sentence)
                for network, x in zip(networks, lists)]
    trials = [trial.candidates(found, model, LEXICON)
              for trial, found in zip(labelled, decode_lists(lists, LEXICON, lm, model, nbest=20))]
    fold = np.array([0, 1, 0, 1])
    lies = [t._replace(errors=t.errors[::-1].copy()) if f == 0 else t for t, f in zip(trials, fold)]
    def totals(trials, penalty):
        return [[h.total for h in found] for found in _held_out(trials, fold, model, penalty, LEXICON, lm, 20)]
    same = [a == b for a, b in zip(totals(trials, 3.), totals(lies, 3.))]
    assert same == [True, False, True, False]
    short = lists[3]
    assert totals(trials, 1e9)[3][0] == pytest.approx(best_by_enumeration(list_frames(short, model), lm, model)[1],
                                                      abs=1e-3)


def test_repetitions_of_a_sentence_are_in_one_fold(monkeypatch, lm):
    "A ranking is learned from folds that share no sentence; other trials stay in their fold."
    noted = {}
    def note(name, i):
        inner = getattr(decoder, name)
        def outer(*args):
            noted[name] = args[i]
            return inner(*args)
        monkeypatch.setattr(decoder, name, outer)
    note('_held_out', 1)
    note('_fit_ranking', 1)
    def folds_of(said):
        lists = [phoneme_list({'greedy': 'AH B | AH |', 'phonemes': 'AH B | AH |', 'sentence': s}) for s in said]
        fit_confusions(lists, LEXICON, lm, n_folds=3, n_candidates=5, llm=lambda texts: np.zeros(len(texts)))
        return sorted(set(zip(noted['_fit_ranking'], noted['_held_out'].tolist())))
    assert folds_of('abcdef') == list(zip('abcdef', np.random.default_rng(0).permutation(6) % 3))
    assert [s for s, _ in folds_of('abcdabcd')] == list('abcd')


def test_weights_of_the_list_alone_give_its_shares():
    "With one weight for the ratio and no other, a slot's classes have the list's probabilities, except for the floor."
    sequences = [parse_phonemes('AH | B'), parse_phonemes('AH | D'), parse_phonemes('AH | B AH')]
    network = phoneme_network(sequences, np.log([.5, .3, .2]))
    weights = np.zeros(N_WEIGHTS)
    weights[-2] = 1
    slots, gaps = network_rows(network)
    for rows, shares in (slots, network.slots), (gaps, network.gaps):
        scores = class_scores(rows, weights)
        p = np.exp(scores - np.logaddexp.reduce(scores, axis=1)[:, None])
        assert np.abs(p - shares).max() < .09 # Classes missing from the list have a floor of 0.002
    assert network.slots[2, to_class_ids(['D'])[0]] == pytest.approx(.3)
    assert network.gaps[3, to_class_ids(['AH'])[0]] == pytest.approx(.2)


def test_sentences_are_ordered_by_expected_errors(lm):
    x = phoneme_list({'greedy': 'AH B | AH |'})
    found = decode_lists([x], LEXICON, lm, random_model(7), nbest=20)[0]
    p = np.exp([h.total for h in found])
    errors = np.array([[word_errors([b.text], [a.text])[0].edits for b in found] for a in found])
    assert np.allclose(expected_errors(found), errors @ p/p.sum())
    assert (np.diff(expected_errors(found)) > -1e-9).all()


@pytest.mark.skipif(not (T15/'phonemes_val.jsonl').exists(), reason=f'{T15} does not exist: no real lists')
def test_real_lists_become_sentences(tmp_path):
    "With a context of two words from the training transcripts alone, four of five words are right."
    lists = [x for x in read_phoneme_lists(T15/'phonemes_val.jsonl', labelled=True) if len(x.sequences) > 1][::4]
    with open(T15/'train.csv') as f: text = [normalize_sentence(row['sentence']) for row in csv.DictReader(f)]
    words = sorted({w for s in text for w in s.split() if w.replace("'", '').isalpha()})
    lm = Automaton.load(build_ngram(text, tmp_path/'lm.arpa', order=2))
    lexicon = build_lexicon(words, variants=False)
    others = lists[::4]
    model = fit_confusions([x for i, x in enumerate(lists) if i % 4], lexicon, lm, change_penalty=np.inf)
    found = decode_lists(others, lexicon, lm, model, beam=300, nbest=20)
    assert total(word_errors([x.sentence for x in others], [h[0].text for h in found])).rate < .25
