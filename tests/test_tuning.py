"""Tuning of the search's weights: equivalent points have equal errors, the grid agrees with searches at each of its
points, a fold does not affect its own weights, and results depend only on the trials."""
import itertools

import numpy as np
import pytest
from tqdm import tqdm

from b2t_kaggle.decoding import tuning
from b2t_kaggle.decoding.decoder import LexiconBeamDecoder
from b2t_kaggle.decoding.tuning import SearchWeights, tune_search
from b2t_kaggle.lm.automaton import Automaton
from b2t_kaggle.lm.ngram import build_ngram
from b2t_kaggle.metrics import word_errors
from b2t_kaggle.phonemes import to_class_ids

pytestmark = pytest.mark.filterwarnings('ignore:.*too little text')
LEXICON = {'a': [['AA']], 'b': [['B']], 'ab': [['AA', 'B']], 'ba': [['B', 'AA']], 'aab': [['AA', 'AA', 'B']]}
REFERENCES = ['a b', 'ab', 'ba a', 'a ab', 'b', 'aab b', 'a ba', 'ab ab', 'b a', 'a', 'ba', 'aab']
GRID = dict(acoustic_scale=np.array([0.4, 0.8, 1.6]), lm_weight=np.array([1.]), blank_penalty=np.array([1., 3., 9.]),
            word_score=np.array([-1., 0., 1.]))
BLANK_FACTOR = 27.


def frames(sentence, seed, blank_factor=1.):
    "Noisy frames of a model that overestimates the odds of the blank by the factor `blank_factor`."
    rng = np.random.default_rng(seed)
    rows = [[0]]
    for word in sentence.split():
        for k in to_class_ids([*LEXICON[word][0], 'SIL']): rows += [[k], [0]*rng.integers(1, 3)]
    ids = np.concatenate(rows).astype(int)
    x = 2.*rng.standard_normal((len(ids), 41))
    x[np.arange(len(ids)), ids] += 5
    x[:, 0] += np.log(blank_factor)
    return x - np.logaddexp.reduce(x, axis=1, keepdims=True)


@pytest.fixture(scope='module')
def lm(tmp_path_factory):
    folder = tmp_path_factory.mktemp('lm')
    return Automaton.load(build_ngram(REFERENCES, folder/'lm.arpa', order=2))


@pytest.fixture(scope='module')
def decoder(lm): return LexiconBeamDecoder(LEXICON, lm, beam=50)


@pytest.fixture(scope='module')
def trials(): return [frames(s, seed) for seed, s in enumerate(REFERENCES)]


def tuned(decoder, trials, references=REFERENCES, grid=GRID, folds=3, n_jobs=1, **options):
    return tune_search(decoder, trials, references, grid=grid, folds=folds, n_jobs=n_jobs, progress=False, **options)


def searches_of(decoder, trials, points):
    searches = tuning._Searches(decoder, trials, REFERENCES, GRID, 1, (1, 0, 0, 1))
    for point in points: searches.add(point)
    return searches


def test_a_penalty_compensates_for_a_blank_that_is_too_likely(decoder, trials):
    """Multiplying the blank's odds and the penalties by 27 gives equivalent trials, with the same errors at each point;
    this determines the choice."""
    biased = [frames(s, seed, BLANK_FACTOR) for seed, s in enumerate(REFERENCES)]
    plain = tuned(decoder, trials)
    other = tuned(decoder.with_options(blank_penalty=BLANK_FACTOR), biased,
                  grid=GRID | dict(blank_penalty=BLANK_FACTOR*GRID['blank_penalty']))
    assert other.edits == plain.edits and other.fold_edits == plain.fold_edits
    for a, b in zip((plain.candidate, *plain.folds), (other.candidate, *other.folds), strict=True):
        assert b == a._replace(blank_penalty=BLANK_FACTOR*a.blank_penalty)
    # The penalty is also found from a start of 1
    wide = GRID | dict(blank_penalty=3.**np.arange(6))
    found = tuned(decoder, biased, grid=wide)
    assert found.candidate.blank_penalty >= 9 and found.edits['candidate'] < found.edits['start']


def test_only_ratios_count(decoder, trials):
    "Doubling scale, n-gram weight and word score gives the same search."
    plain = tuned(decoder, trials)
    doubled = tuned(decoder.with_options(acoustic_scale=1.6, lm_weight=2), trials, grid=GRID | {
        k: 2*GRID[k] for k in ('acoustic_scale', 'lm_weight', 'word_score')})
    assert doubled.edits == plain.edits and doubled.fold_edits == plain.fold_edits
    assert doubled.candidate == SearchWeights(*np.array(plain.candidate)*[2, 2, 1, 2])


def test_the_grid_agrees_with_searches(decoder, lm, trials):
    "Each point is compared with a decoder that has its weights."
    searches = searches_of(decoder, trials, [(1, 0, 0, 1), (0, 0, 2, 1), (2, 0, 1, 1)])
    for point in itertools.product(range(3), [0], range(3), range(3)):
        weights = searches.weights(point)
        built = LexiconBeamDecoder(LEXICON, lm, beam=50, **weights._asdict())
        best = [built.decode(x)[0].text for x in trials]
        expected = [e.edits for e in word_errors(REFERENCES, best)]
        assert searches.table[(slice(None), *point)].tolist() == expected, weights


def test_a_fold_does_not_affect_its_own_weights(decoder, trials):
    "The errors of a fold's own trials do not affect its choice."
    searches = searches_of(decoder, trials, itertools.product(range(3), [0], range(3), range(3)))
    fold = np.arange(12) % 3
    def chosen(): return searches.choose([fold != k for k in range(3)], tqdm(disable=True))
    before = chosen()
    rng = np.random.default_rng(0)
    changes = 0
    for k in range(3):
        table = searches.table.copy()
        found = {point: edits.copy() for point, edits in searches.edits.items()}
        searches.table[fold == k] = rng.integers(0, 99, searches.table[fold == k].shape)
        for edits in searches.edits.values(): edits[k::3] = rng.integers(0, 99, 4)
        after = chosen()
        assert after[k] == before[k]
        changes += after != before
        searches.table[:] = table
        searches.edits = found
    assert changes


def test_the_figures_agree_with_the_sentences(decoder, lm, trials):
    "Start, candidate and folds are compared with decoders that have their weights."
    result = tuned(decoder, trials)
    def edits(weights, some):
        built = LexiconBeamDecoder(LEXICON, lm, beam=50, **weights._asdict())
        best = [built.decode(trials[i])[0].text for i in some]
        return sum(e.edits for e in word_errors([REFERENCES[i] for i in some], best))
    assert result.edits['start'] == edits(SearchWeights(0.8, 1, 1, 0), range(12)) > 0
    assert result.edits['candidate'] == edits(result.candidate, range(12)) <= result.edits['start']
    assert list(result.fold_edits) == [edits(w, range(k, 12, 3)) for k, w in enumerate(result.folds)]
    assert sum(result.fold_edits) == result.edits['validated']
    assert sum(result.fold_words) == sum(len(r.split()) for r in REFERENCES)
    better = result.edits['validated'] < result.edits['start']
    assert result.weights == (result.candidate if better else result.start)


@pytest.mark.parametrize('seed', range(3))
def test_tuned_weights_make_no_more_errors_than_the_start(decoder, trials, seed):
    "This also holds if the references belong to other trials, so that nothing can be learned."
    shuffled = np.random.default_rng(seed).permutation(REFERENCES).tolist()
    result = tuned(decoder, trials, shuffled)
    assert result.edits['candidate'] <= result.edits['start']


def test_results_depend_only_on_the_trials(decoder, trials):
    first = tuned(decoder, trials)
    assert tuned(decoder, trials, n_jobs=3) == first
    some = tuned(decoder, trials, most=5)
    assert some.trials == (0, 2, 4, 7, 9)
