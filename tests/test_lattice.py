"Lattices against enumeration of all paths, and Kaldi's text form."
import itertools
import math
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rapidfuzz.distance import Levenshtein

from b2t_kaggle.decoding.decoder import LexiconBeamDecoder
from b2t_kaggle.decoding.lattice.graph import ARC, END, Lattice, fewest_errors, nbest, posteriors
from b2t_kaggle.decoding.lattice.kaldi import read_lattices, write_lattices
from b2t_kaggle.decoding.lattice.trace import push_frames
from b2t_kaggle.lm.automaton import Automaton
from b2t_kaggle.lm.ngram import build_ngram
from b2t_kaggle.phonemes import PHONEMES

pytestmark = pytest.mark.filterwarnings('ignore:.*too little text')
TEXT = ['a b', 'b a c', 'aa', 'c aa b', 'd', 'a d a', 'b', 'b b c d']
PHONES = dict(tokens=PHONEMES, blank='BLANK', word_end='SIL')
LETTERS = dict(tokens=['K', 'SIL', 'AA', 'BLANK', 'B'], blank='BLANK', word_end='SIL')
PIECES = dict(tokens=['AA', 'BLANK', 'B', 'K'], blank='BLANK', word_end=None)
LEXICON = {'a': [['AA']], 'b': [['B']], 'c': [['K', 'AA']], 'd': [['B', 'AA'], ['B']], 'aa': [['AA', 'AA']]}


@pytest.fixture(scope='module')
def lm(tmp_path_factory):
    return Automaton.load(build_ngram(TEXT, tmp_path_factory.mktemp('lattice')/'lm.arpa', order=2, estimator='own'))


def lexicon_of(model): return LEXICON if model['word_end'] else LEXICON | {'d': [['B', 'AA']]}


def log_probs_of(seed, n_frames, model, sharp=1.0):
    tokens = model['tokens']
    x = sharp*np.random.default_rng(seed).standard_normal((n_frames, len(tokens)))
    x[:, [tokens.index(s) for s in ('AA', 'B', 'K', 'BLANK', 'SIL') if s in tokens]] += 2
    return x - np.logaddexp.reduce(x, axis=1, keepdims=True)


def paths_of(lattice):
    "Every path, by going from arc to arc: its words, total and arcs, with the number of the end behind them."
    arc_totals, end_totals = lattice.totals()

    def go_on(state, arcs):
        for i in np.flatnonzero(lattice.ends['state'] == state): yield arcs, int(i)
        for i in np.flatnonzero(lattice.arcs['start'] == state):
            yield from go_on(lattice.arcs['end'][i], (*arcs, int(i)))

    for arcs, end in go_on(0, ()):
        text = ' '.join(lattice.words[w] for w in lattice.arcs['word'][list(arcs)])
        yield text, sum(arc_totals[i] for i in arcs) + end_totals[end], arcs, end


models = st.sampled_from([PHONES, LETTERS, PIECES])


def decoder_of(lm, model, **options):
    return LexiconBeamDecoder(lexicon_of(model), lm, threshold=math.inf, blank_skip=1, **options, **model)


def kept_texts(decoder, x):
    "Sentences that the beam kept to the end, by going back through the search's histories."
    frames, search = decoder.prepare(x), decoder.take_search()
    arena, starts, _ = push_frames(search, frames.scores, frames.skip)
    decoder.return_search(search)

    @cache
    def texts_of(i):
        if i == 0: return {''}
        _, prev, word, alt, *_ = arena[i]
        if word < 0: return texts_of(prev) | texts_of(alt)
        return {f'{text} {decoder.words[word]}'.strip() for text in texts_of(prev)}

    return set().union(*map(texts_of, starts.tolist()))


def everything(lm, model, x, **options):
    "Totals of all sentences that fit into the frames."
    decoder = decoder_of(lm, model, nbest=10**4, **options | dict(beam=3000))
    return {h.text: h.total for h in decoder.decode(x)}


def bonus_of(text): return 2.0*text.split().count('b') + 3.0*f' {text} '.replace(' ', '  ').count(' a  aa ')


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(0, 6),
    models,
    st.sampled_from([3, 30, 3000]),
    st.sampled_from([0, 2]),
    st.booleans(),
)
def test_paths_are_what_the_beam_kept(lm, seed, n_frames, model, beam, word_score, boosted):
    """Each path spells its words in its frames, and its scores are those of these frames and of the n-gram, no better
    than the sentence's. What `decode` finds has the same scores, what the beam kept is there and no better than what
    `decode` finds, and nothing is left out where nothing is pruned."""
    x = log_probs_of(seed, n_frames, model)
    options = dict(beam=beam, word_score=word_score, boost={'b': 2.0, 'a aa': 3.0} if boosted else None)
    decoder = decoder_of(lm, model, nbest=5, **options)
    hyps = decoder.decode(x)
    lattice = decoder.lattice(x)
    assert decoder.decode(x) == hyps
    end = [] if model['word_end'] is None else [model['word_end']]
    spelled = {w: [[*pron, *end] for pron in prons] for w, prons in lexicon_of(model).items()}
    best = {}
    for text, total, arcs, e in paths_of(lattice):
        frames = [k for i in (*arcs, len(lattice.arcs) + e) for k in lattice.frames[i]]
        labels = [model['tokens'][k] for k, _ in itertools.groupby(frames)]
        ways = itertools.product(*(spelled[w] for w in text.split()))
        assert [s for s in labels if s != 'BLANK'] in [list(itertools.chain(*way)) for way in ways]
        acoustic = sum(x[t, k] for t, k in enumerate(frames))
        assert len(frames) == n_frames
        ngram = lm.score(text) + boosted*bonus_of(text)
        assert total == pytest.approx(0.8*acoustic + ngram + word_score*len(arcs), abs=1e-6)
        best[text] = max(best.get(text, -math.inf), total)
    for h in hyps: assert best[h.text] == pytest.approx(h.total, abs=1e-6)
    exact, kept = everything(lm, model, x, **options), kept_texts(decoder, x)
    assert all(total <= exact[text] + 1e-6 for text, total in best.items())
    assert kept <= best.keys() and all(exact[text] <= hyps[0].total + 1e-6 for text in kept)
    if best.keys() <= kept | {h.text for h in hyps}: # None arose where paths meet
        assert max(best.values()) == pytest.approx(hyps[0].total, abs=1e-6)
    if beam == 3000: assert best == pytest.approx(exact, abs=1e-6)
    listed = nbest(lattice, 10**6)
    assert {h.text: h.total for h in listed} == pytest.approx(best, abs=1e-9) and len(listed) == len(best)
    assert [h.total for h in listed] == sorted((h.total for h in listed), reverse=True)
    assert nbest(lattice, 3) == listed[:3]


def test_sentences_that_the_beam_dropped_arise_where_paths_meet(lm):
    """'b b' has its best path where the beam dropped it. This path meets the history 'b b' that was kept, and so there
    is 'b b b', which no history holds: it is better than what a beam of three finds, and a beam of eight finds it."""
    x = log_probs_of(0, 6, PHONES)
    options = dict(word_score=2, boost={'b': 2.0})
    decoder = decoder_of(lm, PHONES, nbest=5, beam=3, **options)
    hyps, kept, exact = decoder.decode(x), kept_texts(decoder, x), everything(lm, PHONES, x, **options)
    assert kept == {'b', 'b b'} == {h.text for h in hyps}
    best = nbest(decoder.lattice(x), 1)[0]
    assert (hyps[0].text, best.text) == ('b b', 'b b b')
    assert hyps[0].total == pytest.approx(exact['b b']) and best.total == pytest.approx(exact['b b b'])
    assert hyps[0].total == max(exact[text] for text in kept) < best.total == pytest.approx(max(exact.values()))
    assert decoder.with_beam(8).decode(x)[0].text == 'b b b'


@st.composite
def lattices(draw):
    "Small ones with words that occur several times, scores with ties, and states that lead nowhere."
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    n_states, n_arcs = rng.integers(2, 7), rng.integers(0, 12)
    start = np.sort(rng.integers(0, n_states - 1, n_arcs))
    arcs = np.zeros(n_arcs, ARC)
    arcs['start'], arcs['word'] = start, rng.integers(0, 3, n_arcs)
    arcs['end'] = rng.integers(start + 1, n_states)
    ends = np.zeros(rng.integers(1, 4), END)
    ends['state'] = rng.choice(n_states, len(ends))
    for x in (arcs, ends):
        for name in ('acoustic', 'ngram'): x[name] = rng.integers(-4, 1, len(x))/2
    frames = [rng.integers(0, 9, rng.integers(0, 3)).tolist() for _ in range(n_arcs + len(ends))]
    return Lattice(['a', 'b', 'c'], arcs, ends, frames, 0.5, 1.5, draw(st.sampled_from([0.0, 2.0])))


@settings(max_examples=150, deadline=None)
@given(lattices(), st.sampled_from([1.0, 3.0]), st.lists(st.sampled_from('abc'), max_size=5).map(' '.join))
def test_lists_posteriors_and_errors_equal_enumeration(lattice, temperature, reference):
    paths = list(paths_of(lattice))
    best = {}
    for text, total, *_ in paths: best[text] = max(best.get(text, -math.inf), total)
    found = nbest(lattice, 10**6)
    assert {h.text: h.total for h in found} == pytest.approx(best) and len(found) == len(best)
    assert [h.total for h in found] == sorted((h.total for h in found), reverse=True)
    for h in found:
        assert h.n_words == len(h.text.split())
        assert h.total == pytest.approx(0.5*h.acoustic + 1.5*h.ngram + lattice.word_score*h.n_words)
    if not paths: return
    weights = np.exp([total/temperature for _, total, *_ in paths])
    through = np.array([[i in arcs for _, _, arcs, _ in paths] for i in range(len(lattice.arcs))])
    expected = through.reshape(-1, len(paths)) @ weights/weights.sum()
    np.testing.assert_allclose(posteriors(lattice, temperature), expected, atol=1e-12)
    errors = [Levenshtein.distance(text.split(), reference.split()) for text in best]
    assert fewest_errors(lattice, reference) == min(errors)


@settings(max_examples=50, deadline=None)
@given(st.lists(lattices(), max_size=3))
def test_text_for_kaldi_is_read_as_it_was_written(tmp_path_factory, written):
    "And its lines are those of `lattice-copy ark,t:-`: costs are negative logs, a number above 0 for each frame."
    path = tmp_path_factory.getbasetemp()/'lattices.txt'
    write_lattices(path, {f'trial_{i}': lattice for i, lattice in enumerate(written)})
    for lattice in written:
        assert len(path.read_text().split('\n\n')) == len(written) + 1
    found = read_lattices(path, 0.5, 1.5, 2.0)
    assert list(found) == [f'trial_{i}' for i in range(len(written))]
    for lattice, again in zip(written, found.values()):
        assert [again.words[w] for w in again.arcs['word']] == [lattice.words[w] for w in lattice.arcs['word']]
        for name in ('start', 'end', 'acoustic', 'ngram'): assert (again.arcs[name] == lattice.arcs[name]).all()
        assert (again.ends == lattice.ends).all() and again.frames == lattice.frames


@pytest.mark.parametrize('options, words', [
    (dict(merge='sum'), "merge is 'sum'; a lattice needs a decoder where it is 'max'"),
    (dict(oov_penalty=1.0), 'oov_penalty is 1.0; a lattice needs a decoder where it is None'),
])
def test_decoders_without_a_lattice(lm, options, words):
    with pytest.raises(ValueError, match=words): decoder_of(lm, PHONES, **options).lattice(np.zeros((0, 41)))
