"Boosted decoding agrees with an enumeration of all sentences, for every kind of n-gram model and in streams."
import math
import warnings
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_decoder import TEXT, enumerate_sentences, log_softmax, noisy, posteriors, without_file

from b2t_kaggle.decoding.decoder import LexiconBeamDecoder
from b2t_kaggle.decoding.streaming import Stream
from b2t_kaggle.lm.automaton import Automaton
from b2t_kaggle.lm.boost import Boost
from b2t_kaggle.lm.ngram import NGram, build_ngram
from b2t_kaggle.phonemes import build_lexicon, sentence_to_phonemes, to_class_ids

pytestmark = pytest.mark.filterwarnings('ignore:.*too little text')
LEXICON = {'a': [['AA']], 'aa': [['AA', 'B']], 'b': [['B']], 'c': [['B', 'B'], ['AA']], 'unknown': [['AA', 'AA']]}


def arpa(folder, order):
    path = Path(folder)/f'{order}.arpa'
    return path if path.exists() else build_ngram(TEXT, path, order=order)


def with_unigrams(path, words, log_prob):
    "The same model with additional unigrams, written as an ARPA file."
    lines = path.read_text().splitlines()
    n = next(line for line in lines if line.startswith('ngram 1='))
    lines[lines.index(n)] = f'ngram 1={int(n.split("=")[1]) + len(words)}'
    at = lines.index('\\1-grams:') + 1
    lines[at:at] = [f'{log_prob:.7f}\t{w}\t0' for w in words]
    other = path.with_name(f'more-{path.name}')
    other.write_text('\n'.join(lines) + '\n')
    return (NGram if find_spec('kenlm') else Automaton).load(other)


def bonus_of(text, boosts):
    "Sum of all bonuses, each multiplied by the occurrences of its phrase in a text."
    words = text.split()
    total = 0.
    for phrase, bonus in boosts.items():
        p = phrase.split()
        total += bonus*sum(words[i:i + len(p)] == p for i in range(len(words)))
    return total


boosts = st.dictionaries(
    st.lists(st.sampled_from(['a', 'aa', 'b', 'c', 'unknown', 'new']), min_size=1, max_size=3).map(' '.join),
    st.sampled_from([-2.0, 0.5, 3.0, 8.0]), min_size=1, max_size=4)


@settings(max_examples=40, deadline=None)
@given(posteriors, boosts, st.sampled_from([1, 2, 3]), st.sampled_from(['max', 'sum']), st.sampled_from([0.5, 2.0]))
def test_equals_enumeration(tmp_path_factory, log_probs, boost, order, merge, lm_weight):
    "A sentence's total is its score under a model with all its words, plus the bonus by definition."
    folder = tmp_path_factory.getbasetemp()/'boost'
    folder.mkdir(exist_ok=True)
    path = arpa(folder, order)
    lm = Automaton.load(path)
    boost = {'new': 1.0} | boost
    median = np.median([lm.score(w, bos=False, eos=False) for w in ('a', 'aa', 'b', 'c')])/math.log(10)
    missing = [w for w in ('unknown', 'new') if any(w in p.split() for p in boost)]
    knowing = with_unigrams(path, missing, median)
    entries = [Boost(p, b, 'B AA' if p == 'new' else None) for p, b in boost.items()]
    decoder = LexiconBeamDecoder(LEXICON, lm, beam=5000, nbest=3000, lm_weight=lm_weight, word_score=-1., merge=merge,
                                 acoustic_scale=.7, boost=entries)
    expected = {}
    for text, acoustic in enumerate_sentences(log_probs, LEXICON | {'new': [['B', 'AA']]}).items():
        a = acoustic[merge == 'sum']
        expected[text] = .7*a + lm_weight*knowing.score(text) + bonus_of(text, boost) - len(text.split())
    found = decoder.decode(log_probs)
    assert {h.text for h in found} == set(expected)
    for h in found: assert h.total == pytest.approx(expected[h.text], abs=1e-5)
    best = LexiconBeamDecoder(LEXICON, lm, beam=5000, nbest=1, lm_weight=lm_weight, word_score=-1., merge='max',
                              acoustic_scale=.7).with_boost(entries).decode(log_probs)
    if merge == 'max': assert best[0].total == found[0].total


@pytest.fixture
def lm(tmp_path): return Automaton.load(arpa(tmp_path, 2))


def random_trials(n, frames=12):
    rng = np.random.default_rng(0)
    return [log_softmax(3*rng.standard_normal((frames, 41))) for _ in range(n)]


SOME = {'a b': 3.0, 'b c aa': 6.0, 'c': 1.5, 'a': -1.0}


def test_boosts_can_be_changed_and_removed(lm):
    "After a boost has been removed, a decoder gives the same results as a decoder without a boost."
    plain = LexiconBeamDecoder(LEXICON, lm)
    boosted = plain.with_boost(SOME)
    trials = random_trials(6)
    expected = [plain.decode(x) for x in trials]
    assert [boosted.with_boost(None).decode(x) for x in trials] == expected
    assert [plain.decode(x) for x in trials] == expected
    found = [boosted.decode(x) for x in trials]
    assert found == [LexiconBeamDecoder(LEXICON, lm, boost=SOME).decode(x) for x in trials] and found != expected
    other = plain.with_boost({'new': 9}).with_boost(SOME)
    assert other.words == plain.words and not other.added


def test_streams_and_threads(lm):
    decoder = LexiconBeamDecoder(LEXICON, lm, boost=SOME)
    trials = random_trials(8)
    expected = [decoder.decode(x) for x in trials]
    for x, hyps in zip(trials, expected):
        stream = Stream(decoder)
        for frame in x: stream.push(frame[None])
        assert stream.finish() == hyps
    assert decoder.decode_all(trials, n_jobs=4, progress=False) == expected


def test_weights_keep_the_bonus(lm):
    "A bonus is in nats of the total, whatever the n-gram's weight."
    boosted = LexiconBeamDecoder(LEXICON, lm, boost=SOME)
    decoder = boosted.with_options(acoustic_scale=.5, lm_weight=.25, blank_penalty=3.)
    for h in decoder.decode(random_trials(1)[0]):
        assert h.total == pytest.approx(.5*h.acoustic + .25*lm.score(h.text) + bonus_of(h.text, SOME), abs=1e-5)


@pytest.mark.skipif(not find_spec('kenlm'), reason='kenlm is not installed')
def test_kenlm_has_the_same_bonuses(lm):
    ours, theirs = (LexiconBeamDecoder(LEXICON, m, boost=SOME) for m in (lm, without_file(NGram.load(lm.path))))
    for x in random_trials(5):
        for a, b in zip(ours.decode(x), theirs.decode(x), strict=True):
            assert a.text == b.text and a.total == pytest.approx(b.total, abs=1e-4)


class Letters:
    "A fusion whose model prefers short words."
    weight, every = 0.5, 3

    def begin(self, words):
        self.words = words
        return self

    def score(self, histories, parents, words): return -np.array([float(len(self.words[w])) for w in words])
    def end(self, histories): return np.zeros(len(histories))
    def keep(self, histories): pass


def test_boosts_with_a_fusion(lm):
    decoder = LexiconBeamDecoder(LEXICON, lm, fusion=Letters(), threshold=math.inf, boost=SOME | {'new': 2.})
    plain = LexiconBeamDecoder(LEXICON, lm, threshold=math.inf, beam=5000, nbest=3000, boost=SOME | {'new': 2.})
    for x in random_trials(4, frames=6):
        totals = {h.text: h.total - .5*len(h.text.replace(' ', '')) for h in plain.decode(x)}
        best = decoder.decode(x)[0]
        assert best.text == max(totals, key=totals.get) and best.total == pytest.approx(totals[best.text], abs=1e-5)


def frames_of(phonemes, seed=0): return noisy(to_class_ids(phonemes), seed, sharp=9.)


def test_names_are_found(lm):
    "An unknown name is decoded if it is boosted, also in a stream; a warning shows a guessed pronunciation."
    lexicon = build_lexicon(['a', 'b', 'c', 'sacks'])
    plain = LexiconBeamDecoder(lexicon, lm)
    spoken = frames_of('EY SIL BLANK Z AO R B L AE K S SIL'.split())
    assert 'zorblax' not in plain.decode(spoken)[0].text
    with pytest.warns(UserWarning, match='guessed from their letters: zorblax Z ER B L AE K S. Give'):
        guessed = plain.with_boost({'zorblax': 5.0})
    assert [(w.text, w.is_guessed) for w in guessed.added] == [('zorblax', True)]
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        decoder = plain.with_boost([Boost('Zorblax', 5.0, 'Z AO1 R B L AE2 K S')])
    assert decoder.decode(spoken)[0].text == 'a zorblax'
    stream = Stream(decoder)
    stream.push(spoken)
    assert stream.partial() == 'a zorblax'
    words = decoder.word_frames(spoken, decoder.decode(spoken)[0].text)
    assert words[1].tolist() == [3, 10]


def test_a_large_bonus_does_not_empty_the_search(tmp_path):
    "Bonuses only increase totals, so the best total is at least the plain search's, despite pruning."
    texts = ['the tea is cold', 'tell the time', 'the television is on', 'time for tea', 'more tea for me']
    lm = Automaton.load(build_ngram(texts, tmp_path/'tea.arpa', order=2))
    plain = LexiconBeamDecoder(build_lexicon({w for s in texts for w in s.split()}), lm)
    rng = np.random.default_rng(0)
    for text in texts:
        x = frames_of(sentence_to_phonemes(text))
        x = log_softmax(.5*x + .8*rng.standard_normal(x.shape))
        least = plain.decode(x)[0].total
        for word in ('television', 'more', 'cold'):
            for bonus in (6., 20., 60.): assert plain.with_boost({word: bonus}).decode(x)[0].total >= least - 1e-6


def test_pronunciations_are_added(lm):
    lexicon = {'a': [['EY']], 'tomato': [['T', 'AH', 'M', 'EY', 'T', 'OW']]}
    spoken = frames_of('EY SIL BLANK T AH M AA T OW SIL'.split())
    plain = LexiconBeamDecoder(lexicon, lm)
    boosted = plain.with_boost([Boost('tomato', 1.0, 'T AH M AA T OW')])
    text = 'a tomato'
    assert boosted.acoustic(spoken, [text])[0] > plain.acoustic(spoken, [text])[0] + 5
    assert boosted.decode(spoken)[0].text == text and boosted.words == plain.words


def test_refused_boosts(lm):
    for boost, message in ({'': 1}, 'found no words'), ({'a': math.inf}, 'expected a number'), \
                          ({3: 1}, 'expected a word or phrase'), ({'a -': 1}, "word '-': found"):
        with pytest.raises(ValueError, match=message): LexiconBeamDecoder(LEXICON, lm, boost=boost)
    with pytest.raises(ValueError, match='lm_weight is 0 beside a boost'):
        LexiconBeamDecoder(LEXICON, lm, lm_weight=0, boost={'a': 1})
