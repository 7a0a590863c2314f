"The decoders agree with exhaustive enumeration; their scores, faulty input, and real sentences."
import inspect
import itertools
import math
import re
import subprocess
import sys
from dataclasses import astuple
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pandas as pd
import pytest
from ctc_alignment import align
from hypothesis import given, settings
from hypothesis import strategies as st
from kenlm_binary import kenlm_binary
from rapidfuzz.distance import Levenshtein

from b2t_kaggle.config import DecodeConfig
from b2t_kaggle.core.ctc import greedy
from b2t_kaggle.decoding.acoustic import acoustic_scores, pronunciations
from b2t_kaggle.decoding.decoder import LexiconBeamDecoder
from b2t_kaggle.decoding.scorers import AutomatonScorer
from b2t_kaggle.decoding.streaming import Stream
from b2t_kaggle.lm.automaton import Automaton, load_ngram
from b2t_kaggle.lm.ngram import NGram, build_ngram, load_kenlm
from b2t_kaggle.phonemes import BLANK, PHONEMES, SIL, build_lexicon, normalize_sentence, to_class_ids

pytestmark = pytest.mark.filterwarnings('ignore:.*too little text')
TEXT = ['a b', 'b a c', 'aa', 'c aa b', 'd', 'a d a', 'b', 'b b c d']
PRONUNCIATIONS = [p for n in (1, 2, 3) for p in itertools.product(('AA', 'B', 'K'), repeat=n)]


@cache
def ngram(order, folder):
    "An n-gram model whose scores come from KenLM, which is not our code, or from ours if KenLM is not installed."
    path = build_ngram(TEXT, Path(folder)/f'{order}.arpa', order=order)
    return (NGram if find_spec('kenlm') else Automaton).load(path)


def log_softmax(x): return x - np.logaddexp.reduce(x, axis=-1, keepdims=True)


def enumerate_paths(log_probs, classes, blank=BLANK):
    "Every path over some classes, summed by the labels that it spells: labels -> (best, log-sum)."
    out = {}
    for path in itertools.product(classes, repeat=len(log_probs)):
        labels = tuple(k for k, _ in itertools.groupby(path) if k != blank)
        p = float(sum(log_probs[t, k] for t, k in enumerate(path)))
        best, total = out.get(labels, (-math.inf, -math.inf))
        out[labels] = max(best, p), np.logaddexp(total, p)
    return out


def enumerate_sentences(log_probs, lexicon):
    "Every sentence that a path spells: text -> (best, log-sum)."
    used = sorted({p for prons in lexicon.values() for pron in prons for p in pron})
    words = {}
    for w, prons in lexicon.items():
        for pron in prons: words.setdefault(tuple(to_class_ids(pron)), set()).add(w)
    out = {}
    for labels, (best, total) in enumerate_paths(log_probs, [BLANK, SIL, *to_class_ids(used)]).items():
        if labels and labels[-1] != SIL: continue
        spelled = [tuple(g) for is_sil, g in itertools.groupby(labels, lambda k: k == SIL) if not is_sil]
        if labels.count(SIL) != len(spelled): continue
        for sentence in itertools.product(*(words.get(s, ()) for s in spelled)):
            text = ' '.join(sentence)
            b, t = out.get(text, (-math.inf, -math.inf))
            out[text] = max(b, best), np.logaddexp(t, total)
    return out


lexicons = st.dictionaries(
    st.sampled_from(['a', 'aa', 'b', 'c', 'd', 'unknown']),
    st.lists(st.sampled_from(PRONUNCIATIONS).map(list), min_size=1, max_size=2),
    min_size=1,
    max_size=6,
).filter(lambda words: set(words) != {'unknown'})
posteriors = st.builds(
    lambda seed, frames, sharp: log_softmax(sharp * np.random.default_rng(seed).standard_normal((frames, 41))),
    st.integers(0, 2**32 - 1),
    st.integers(0, 6),
    st.sampled_from([0.0, 1.0, 3.0]),
)


@settings(max_examples=40, deadline=None)
@given(
    posteriors,
    lexicons,
    st.sampled_from([1, 2, 3]),
    st.sampled_from(['max', 'sum']),
    st.sampled_from([0.0, 0.7, 2.0]),
    st.sampled_from([-1.0, 0.0, 3.0]),
    st.sampled_from([0.3, 1.0]),
    st.sampled_from([1.0, 90.0]),
)
def test_equals_enumeration(tmp_path_factory, log_probs, lexicon, order, merge, lm_weight, word_score, scale, penalty):
    folder = tmp_path_factory.getbasetemp()/'enumeration'
    folder.mkdir(exist_ok=True)
    lm = ngram(order, folder)
    if len({p for prons in lexicon.values() for pron in prons for p in pron}) > 2:
        log_probs = log_probs[:5]  # 5⁶ paths would take too long
    decoder = LexiconBeamDecoder(lexicon, lm, beam=5000, nbest=2000, lm_weight=lm_weight, word_score=word_score,
                                 acoustic_scale=scale, blank_penalty=penalty, merge=merge)
    penalised = log_probs.copy()
    penalised[:, BLANK] -= math.log(penalty)
    expected = {}
    for text, acoustic in enumerate_sentences(penalised, lexicon).items():
        n = len(text.split())
        a = acoustic[merge == 'sum']
        g = lm.score(text)
        expected[text] = a, g, n, scale*a + lm_weight*g + word_score*n
    found = decoder.decode(log_probs)
    assert {h.text for h in found} == set(expected) and len(found) == len(expected)
    for h in found: np.testing.assert_allclose(astuple(h)[1:], expected[h.text], atol=1e-6)
    assert [h.total for h in found] == sorted((h.total for h in found), reverse=True)
    best = LexiconBeamDecoder(lexicon, lm, beam=5000, nbest=1, lm_weight=lm_weight, word_score=word_score,
                              acoustic_scale=scale, blank_penalty=penalty, merge='max').decode(log_probs)
    if merge == 'max': assert len(best) == 1 and best[0].total == pytest.approx(found[0].total, abs=1e-9)


def texts_held(search, words):
    "Texts of a search's hypotheses, read from its arena of histories."
    hyps, arena = search.state.hyps, search.state.arena
    for i in range(search.state.counters['n_hyps'][0]):
        text = []
        entry = hyps['label_history' if hyps['label'][i] > hyps['blank'][i] else 'blank_history'][i]
        while entry > 0:
            if arena['word'][entry] >= 0: text.append(words[arena['word'][entry]])
            entry = arena['prev'][entry]
        yield ' '.join(reversed(text))


@settings(max_examples=60, deadline=None)
@given(posteriors, lexicons, st.sampled_from([2, 5, 20, 5000]), st.integers(2, 6))
def test_length_of_the_list(tmp_path_factory, log_probs, lexicon, beam, nbest):
    "The list has the requested length if the frames and the final hypotheses contain enough sentences."
    folder = tmp_path_factory.getbasetemp()/'as_many'
    folder.mkdir(exist_ok=True)
    log_probs = log_probs[:5]
    decoder = LexiconBeamDecoder(lexicon, ngram(2, folder), beam=beam, nbest=nbest, threshold=math.inf)
    frames = decoder.prepare(log_probs)
    search = decoder.take_search()
    search.push(frames.scores, frames.skip)
    possible = enumerate_sentences(log_probs, lexicon)
    held = possible.keys() if beam == 5000 else possible.keys() & set(texts_held(search, decoder.words))
    found = decoder.decode(log_probs)
    assert min(nbest, len(held)) <= len(found) <= nbest and {h.text for h in found} <= set(possible)
    assert len({h.text for h in found}) == len(found)


@settings(max_examples=100, deadline=None)
@given(posteriors, lexicons, st.integers(1, 3))
def test_never_empty(tmp_path_factory, log_probs, lexicon, beam):
    "However few hypotheses a narrow beam keeps, at least one with a finite score is returned, and none twice."
    folder = tmp_path_factory.getbasetemp()/'never_empty'
    folder.mkdir(exist_ok=True)
    for nbest in (1, 4):
        decoder = LexiconBeamDecoder(lexicon, ngram(2, folder), beam=beam, nbest=nbest)
        found = decoder.decode(log_probs)
        assert 1 <= len(found) <= nbest and all(math.isfinite(h.total) for h in found)
        assert len({h.text for h in found}) == len(found)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(0, 6))
def test_greedy_and_align_follow_the_best_path(seed, frames):
    x = log_softmax(3*np.random.default_rng(seed).standard_normal((frames, 5)))
    path = x.argmax(1)
    labels = [k for k, _ in itertools.groupby(path.tolist()) if k != BLANK]
    assert greedy(x).tolist() == labels
    spans = align(x, labels)  # The greedy path is the best path of its own labels
    assert [path[a : b + 1].tolist() for a, b in spans] == [
        [k] * len(list(g)) for k, g in itertools.groupby(path.tolist()) if k != BLANK
    ]


@pytest.fixture
def lm(tmp_path): return ngram(2, tmp_path)


LEXICON = {'a': [['AA']], 'b': [['B']], 'c': [['K', 'AA']], 'd': [['B', 'AA'], ['B']], 'aa': [['AA', 'AA']]}


def noisy(ids, seed=0, sharp=5.0):
    x = np.random.default_rng(seed).standard_normal((len(ids), 41))
    x[np.arange(len(ids)), ids] += sharp
    return log_softmax(x)


def spoken(n_words, seed):
    rng = np.random.default_rng(seed)
    ids = [BLANK]
    for w in rng.choice(sorted(LEXICON), n_words):
        ids += [k for p in LEXICON[w][0] for k in (*to_class_ids([p]), BLANK)] + [SIL, SIL, BLANK]
    return noisy(ids, seed)


def ctc_best(log_probs, labels):
    "Log-probability of the best path by the textbook's recursion over all states and frames."
    states = np.zeros(2*len(labels) + 1, int)
    states[1::2] = labels
    may_skip = np.zeros(len(states), bool)
    may_skip[3::2] = states[3::2] != states[1:-2:2]
    score = np.full(len(states), -np.inf)
    score[0] = 0
    for frame in log_probs:
        best = score.copy()
        best[1:] = np.maximum(best[1:], score[:-1])
        best[2:] = np.where(may_skip[2:], np.maximum(best[2:], score[:-2]), best[2:])
        score = best + frame[states]
    return score[-2:].max()


def by_all_spellings(log_probs, text, spellings):
    "The best score among all spellings of a text."
    spelled = itertools.product(*(spellings[w] for w in text))
    return max(ctc_best(log_probs, [k for pron in prons for k in (*pron, SIL)]) for prons in spelled)


@given(st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_acoustic_scores_agree_with_all_paths(seed):
    "Scores are equal to the last digit, whether words sound alike or not, and whether any of them fit the frames."
    rng = np.random.default_rng(seed)
    spellings = [[tuple(rng.integers(1, 4, rng.integers(1, 4))) for _ in range(rng.integers(1, 3))] for _ in range(4)]
    common = rng.integers(0, 4, 3)
    texts = [np.append(common[:rng.integers(0, 4)], rng.integers(0, 4, rng.integers(0, 3))) for _ in range(5)]
    x = rng.choice([1., 4., 1e3])*rng.standard_normal((rng.integers(0, 80), 41))
    x = x - np.logaddexp.reduce(x, axis=1, keepdims=True)
    starts = np.cumsum([0, *map(len, texts)])
    words = np.concatenate(texts).astype(np.int64)
    expected = [by_all_spellings(x, text, spellings) for text in texts]
    for much in (math.inf, -1): # Nodes from which on a list has bounds: never or always
        with patch('b2t_kaggle.decoding.acoustic._MUCH', much):
            assert acoustic_scores(x, words, starts, pronunciations(spellings), False).tolist() == expected


@pytest.mark.parametrize('fits', [True, False])
def test_acoustic_scores_of_long_trials(fits):
    "Most paths are skipped, which does not change the scores."
    rng = np.random.default_rng(0)
    spellings = [[tuple(rng.integers(1, 39, 3))] for _ in range(50)]
    spoken = rng.integers(0, 50, 200)
    texts = [spoken.copy() for _ in range(4)]
    for i, text in enumerate(texts): text[rng.integers(0, 200, i)] = 0
    labels = [k for w in spoken for k in (*spellings[w][0], SIL)]
    ids = np.repeat(np.insert(labels, range(len(labels)), BLANK), rng.integers(1, 3, 2*len(labels)))
    x = 1.5*rng.standard_normal((len(ids), 41))
    if fits: x[np.arange(len(ids)), ids] += 6
    x = x - np.logaddexp.reduce(x, axis=1, keepdims=True)
    starts = np.cumsum([0, *map(len, texts)])
    found = acoustic_scores(x, np.concatenate(texts), starts, pronunciations(spellings), False)
    assert found.tolist() == [by_all_spellings(x, text, spellings) for text in texts]


def test_recombination_keeps_the_nbest(lm):
    "A beam that prunes nothing important finds the same n-best as a much wider one, although histories are merged."
    for seed in range(5):
        x = spoken(8, seed)
        narrow, wide = (LexiconBeamDecoder(LEXICON, lm, beam=b, nbest=20).decode(x) for b in (200, 3000))
        assert [h.text for h in narrow[:10]] == [h.text for h in wide[:10]]
        assert len({h.text for h in wide}) == 20


def test_beam_width(lm):
    """As the beam grows, the best score falls by little at most, and the widest beam has the highest; even a beam of
    one gives a sentence."""
    x = spoken(12, 3)
    totals = [LexiconBeamDecoder(LEXICON, lm, beam=b, nbest=1).decode(x)[0].total for b in (1, 4, 16, 64, 256, 1024)]
    assert max(totals) == pytest.approx(totals[-1], abs=1e-9) and totals[0] < totals[-1]


def test_clear_frames_also_have_a_list(lm):
    """If the threshold leaves fewer sentences than requested, the list is completed, also in streams. A wide search
    without a threshold finds the same best sentence."""
    n_left = []
    for seed in range(5):
        x = log_softmax(2.5*spoken(3, seed))
        decoder = LexiconBeamDecoder(LEXICON, lm, beam=40, nbest=5, threshold=6.0)
        frames = decoder.prepare(x)
        search = decoder.take_search()
        search.push(frames.scores, frames.skip)
        n_left.append(len(search.texts(10)[1]) - 1)
        found = decoder.decode(x)
        assert len({h.text for h in found}) == 5
        assert found[0] == LexiconBeamDecoder(LEXICON, lm, beam=3000, nbest=1, threshold=math.inf).decode(x)[0]
        stream = Stream(decoder)
        for part in np.array_split(x, 3): stream.push(part)
        assert stream.finish() == found
    assert min(n_left) < 5, n_left


def test_streams_equal_the_offline_result(lm):
    "Frame by frame, in pieces, in several simultaneous streams, after an unfinished stream, and after a refused push."
    decoder = LexiconBeamDecoder(LEXICON, lm, beam=30)
    trials = [spoken(n, n) for n in (10, 7, 0)]
    expected = [decoder.decode(x) for x in trials]
    rng = np.random.default_rng(0)
    Stream(decoder).push(trials[1])
    streams = [Stream(decoder) for _ in trials]
    bits = [np.split(x, np.sort(rng.integers(0, len(x) + 1, 20))) for x in trials]
    for parts in zip(*bits):
        for stream, part in zip(streams, parts): stream.push(part)
    with pytest.raises(ValueError, match='nan'): streams[0].push(np.full((1, 41), np.nan))
    assert [s.partial() for s in streams][2] == ''
    assert [s.finish() for s in streams] == expected
    one_by_one = Stream(decoder)
    for frame in trials[0]: one_by_one.push(frame[None])
    assert one_by_one.partial() in {h.text for h in expected[0]} and one_by_one.finish() == expected[0]
    assert Stream(decoder).finish() == decoder.decode(np.zeros((0, 41)))
    with pytest.raises(ValueError, match='finished'): one_by_one.finish()


def test_unfinished_streams(lm):
    "The search of an unfinished stream returns to the decoder, unless the stream was interrupted."
    decoder = LexiconBeamDecoder(LEXICON, lm, beam=30)
    x = spoken(7, 1)
    expected = decoder.decode(x)
    search, = decoder._idle
    stream = Stream(decoder)
    stream.push(spoken(5, 2))
    assert decoder._idle == []
    del stream
    assert decoder._idle == [search] and decoder.decode(x) == expected

    def interrupted(*args): raise KeyboardInterrupt
    stream = Stream(decoder)
    search.push = interrupted
    with pytest.raises(KeyboardInterrupt): stream.push(x)
    with pytest.raises(ValueError, match='finished'): stream.partial()
    del stream
    assert decoder._idle == [] and decoder.decode(x) == expected


def test_processes_and_order(lm):
    trials = [spoken(n % 7, n) for n in range(40)]
    one = LexiconBeamDecoder(LEXICON, lm, beam=20).decode_all(trials, n_jobs=1, progress=False)
    assert LexiconBeamDecoder(LEXICON, lm, beam=20).decode_all(trials, n_jobs=4, progress=False) == one
    assert LexiconBeamDecoder(LEXICON, lm, beam=20).decode_all(trials, progress=False) == one


def without_file(lm):
    "The same model without its file's name, so that the decoder queries KenLM."
    return NGram(load_kenlm(lm.path), 'nowhere.arpa')


def test_kenlm_and_automaton_agree(tmp_path):
    """The n-gram as arrays and KenLM queried from Python give the same n-best, also streamed, in processes, and after
    the table of answers has been cleared."""
    lm = ngram(3, tmp_path)
    trials = [spoken(n, n) for n in (0, 3, 9, 12)]
    known, asked = LexiconBeamDecoder(LEXICON, lm, beam=40), LexiconBeamDecoder(LEXICON, without_file(lm), beam=40)
    assert isinstance(known.vocabulary.ngram, AutomatonScorer) and isinstance(asked.vocabulary.ngram, NGram)
    expected, found = known.decode_all(trials, progress=False), asked.decode_all(trials, n_jobs=2, progress=False)
    for a, b in zip(expected, found):
        assert [h.text for h in a] == [h.text for h in b]
        np.testing.assert_allclose([astuple(h)[1:] for h in a], [astuple(h)[1:] for h in b], atol=1e-5)
    asked.decode(trials[2])
    asked._idle[0].scorer.MAX_STATES = 1
    stream = Stream(asked)
    for frame in trials[2]: stream.push(frame[None])
    assert stream.finish() == found[2]
    assert LexiconBeamDecoder(LEXICON, Automaton.load(lm.path), beam=40).decode(trials[3]) == expected[3]


@pytest.mark.parametrize('kind', ['probing', 'trie'])
def test_kenlm_binaries(kind, tmp_path):
    "A KenLM binary decodes like the ARPA file from which it was built."
    lm = load_ngram(ngram(3, tmp_path).path)
    binary = load_ngram(kenlm_binary(lm.path, tmp_path/'lm.bin', kind))
    assert (type(lm), type(binary)) == (Automaton, NGram)
    known, asked = (LexiconBeamDecoder(LEXICON, m, beam=40) for m in (lm, binary))
    assert isinstance(known.vocabulary.ngram, AutomatonScorer) and isinstance(asked.vocabulary.ngram, NGram)
    for x in (spoken(n, n) for n in (0, 4, 9)):
        a, b = known.decode(x), asked.decode(x)
        assert [h.text for h in a] == [h.text for h in b]
        np.testing.assert_allclose([astuple(h)[1:] for h in a], [astuple(h)[1:] for h in b], atol=1e-5)


def test_a_run_reads_its_ngram_once(tmp_path, monkeypatch):
    "The decoder of a run converts the ARPA file into an automaton, which scores sentences as KenLM does."
    from b2t_kaggle.pipeline.decoder import open_decoder
    from b2t_kaggle.pipeline.run import Run
    run = Run(tmp_path/'run', tmp_path)
    (run.dir/'lm').mkdir()
    (run.dir/'lm'/'words.txt').write_text('how are you')
    score = NGram.load(build_ngram(['how are you', 'you are'], run.lm_path, order=2)).score(
        'how are you'
    )
    monkeypatch.setattr(NGram, 'load', None)
    decoder = open_decoder(run, nbest=3)
    assert decoder.options.nbest == 3 and decoder.lm.score('how are you') == pytest.approx(score, abs=1e-5)


@pytest.mark.parametrize(('size', 'stride', 'first_bin', 'begin', 'step'), [
    (14, 4, 0, 100, 80),  # The first patch is bins 0 to 13, with its middle at 140 ms; it covers the 80 ms around it
    (14, 4, 4, 180, 80),  # The same without the four bins that smoothing removed
    (4, 4, 0, 0, 80),
    (20, 10, 2, 140, 200),
    (0, 0, 0, 0, 20),     # No patches: each frame is one bin
])
def test_times_of_a_run(tmp_path, size, stride, first_bin, begin, step):
    "Words start and end with the bins that their frames cover."
    from b2t_kaggle.logits import LogitStore
    from b2t_kaggle.pipeline.decoder import open_decoder
    from b2t_kaggle.pipeline.run import Run
    run = Run(tmp_path/'run', tmp_path, {'model.patch_size': size, 'model.patch_stride': stride})
    for name in ('lm', 'logits'): (run.dir/name).mkdir()
    (run.dir/'lm'/'words.txt').write_text('a i')
    build_ngram(['i a', 'a'], run.lm_path, order=2)
    x = noisy([BLANK, *to_class_ids(['AY']), SIL, BLANK, BLANK, *to_class_ids(['AH', 'AH']), SIL], sharp=12)
    expected = [('i', begin + step, begin + 2*step), ('a', begin + 5*step, begin + 7*step)]
    own = open_decoder(run).decode(x)[0] # A server's client may smooth in its own way, so no bins are subtracted
    assert [w[:3] for w in own.words] == [(w, a - 20*first_bin, b - 20*first_bin) for w, a, b in expected]
    index = pd.DataFrame(dict(session=['t15.2023.08.11'], key=['trial_0000']))
    store = LogitStore.write(run.logits('test'), [x], index, dict(config=run.cfg.dump(), first_bin=first_bin))
    assert [w[:3] for w in open_decoder(run).decode(store[0])[0].words] == expected
    LogitStore.write(run.logits('test'), [x], index, {})
    assert open_decoder(run).options.frame_ms is None # Another program's output, whose times are unknown


def test_kenlm_from_several_threads(lm):
    trials = [spoken(n % 7, n) for n in range(40)]
    decoder = LexiconBeamDecoder(LEXICON, without_file(lm), beam=20)
    assert decoder.decode_all(trials, n_jobs=3, progress=False) == decoder.decode_all(trials, n_jobs=1, progress=False)
    with pytest.raises(ValueError, match='trial 40: .*nan'):
        decoder.decode_all([*trials, np.full((2, 41), np.nan)], n_jobs=3, progress=False)


def test_pruning_changes_little(lm):
    """Without threshold and blank skipping, most best sentences of clear trials stay the same; a threshold near zero
    makes the search greedy; skipping certain blanks changes nothing."""
    trials = [spoken(8, seed) for seed in range(20)]
    decode = lambda **options: [
        h[0].text for h in LexiconBeamDecoder(LEXICON, lm, **options).decode_all(trials, progress=False)
    ]
    complete, pruned = decode(threshold=math.inf, blank_skip=1, beam=2000), decode()
    assert sum(a == b for a, b in zip(complete, pruned)) >= 19
    assert sum(a == b for a, b in zip(complete, decode(threshold=0.1, beam=20))) < 20
    x = trials[0]
    certain = np.full((3, 41), -40.0)
    certain[:, BLANK] = 0
    with_blanks = np.concatenate([certain, x[:9], certain, x[9:], certain])
    a, b = (LexiconBeamDecoder(LEXICON, lm, blank_skip=s).decode(with_blanks) for s in (0.999, 1))
    assert a == b


def test_penalty_decides_which_blanks_are_skipped(lm):
    "A blank of 0.999 is certain, but not after a penalty of 90."
    x = noisy([1, BLANK, SIL], sharp=12)
    searched = lambda penalty: (
        (d := LexiconBeamDecoder(LEXICON, lm, blank_penalty=penalty)).decode(x)
        and d._idle[0].counts()['searched frames']
    )
    assert (searched(1.0), searched(90.0)) == (2, 3)


def test_word_frames(lm):
    decoder = LexiconBeamDecoder(LEXICON | {'a': [['AA'], ['IY', 'B']]}, lm)
    x = noisy(
        [
            BLANK,
            *to_class_ids(['IY', 'IY', 'B']),
            SIL,
            SIL,
            BLANK,
            *to_class_ids(['K']),
            BLANK,
            *to_class_ids(['AA']),
            SIL,
            BLANK,
        ],
        sharp=12,
    )
    best = decoder.decode(x)[0]
    assert best.text == 'a c' and decoder.word_frames(x, best.text).tolist() == [[1, 3], [7, 9]]
    single = LexiconBeamDecoder({w: p[:1] for w, p in LEXICON.items()}, lm)
    for seed in range(5): # With one pronunciation per word, spans equal the alignment of the labels
        x = spoken(6, seed)
        h = single.decode(x)[0]
        labels = np.array([k for w in h.text.split() for k in (*to_class_ids(LEXICON[w][0]), SIL)])
        spans = align(x, labels)
        ends = np.flatnonzero(labels == SIL)
        assert (
            single.word_frames(x, h.text).tolist()
            == np.stack([spans[np.append(0, ends[:-1] + 1), 0], spans[ends - 1, 1]], axis=1).tolist()
        )
    with pytest.raises(ValueError, match="'x' is not in the lexicon"):
        decoder.word_frames(x, 'x')
    x = np.full((4, 41), 1e-4) # The blank of the second frame is more probable than AA, but not after the penalty
    for t, k, p in (0, 1, .99), (1, BLANK, .8), (1, 1, .19), (2, SIL, .99), (3, BLANK, .99): x[t, k] = p
    spans = [
        penalised.word_frames(penalised.prepare(np.log(x)).log_probs, 'a').tolist()
        for penalised in (LexiconBeamDecoder(LEXICON, lm, blank_penalty=p) for p in (1, 90))
    ]
    assert spans == [[[0, 0]], [[0, 1]]]


def test_times_of_words(lm):
    "Times are within one frame of the simulated phonemes, also in streams."
    options = dict(beam=300, frame_ms=80.0, frame_offset_ms=100.0)
    decoder = LexiconBeamDecoder(LEXICON, lm, **options)
    text = ['c', 'd', 'aa', 'a']
    rng = np.random.default_rng(5)
    for _ in range(3):
        ids, spans = [BLANK], []
        for word in text:
            ids += [BLANK]*rng.integers(0, 4)
            begin = len(ids)
            for k in to_class_ids(LEXICON[word][0]):
                ids += [BLANK]*int(ids[-1] == k) + [k]*rng.integers(1, 4)
            spans.append((begin, len(ids)))
            ids += [SIL]*rng.integers(1, 3)
        x = noisy(ids, sharp=12)
        best = decoder.decode(x)[0]
        assert [w.text for w in best.words] == text == best.text.split()
        found = np.array([(w.start_ms, w.end_ms) for w in best.words])
        assert abs(found - 100 - 80*np.array(spans)).max() <= 80
        stream = Stream(decoder)
        for row in x:
            stream.push(row[None])
            partial = stream.partial_words()
            assert ' '.join(w.text for w in partial) == stream.partial()
            of_partial = np.array([(w.start_ms, w.end_ms) for w in partial]).reshape(-1, 2)
            if [w.text for w in partial] == text[:len(partial)]:
                assert (abs(of_partial - 100 - 80*np.array(spans)[:len(partial)]) <= 80).all()
        assert len(partial) == len(text) and (of_partial == found).all()
        assert stream.finish()[0].words == best.words


def alignments(a, b):
    "Pairs of equal words in every alignment with the fewest edits of two lists of words, by enumeration."
    best = {}
    for n in range(min(len(a), len(b)) + 1):
        for left in itertools.combinations(range(len(a)), n):
            for right in itertools.combinations(range(len(b)), n):
                equal = {i for i, j in zip(left, right) if a[i] == b[j]}
                best.setdefault(len(a) + len(b) - n - len(equal), []).append(equal)
    return best[min(best)]


def test_confidences_agree_with_all_paths(lm):
    """If the list has every sentence, posteriors equal those of the sum over all paths. A word's confidence is the
    total posterior of the sentences that have it at its place in an alignment with the fewest edits."""
    lexicon = {'a': [['AA']], 'b': [['B']], 'c': [['K']]}
    likely = [BLANK, SIL, *to_class_ids(['AA', 'B', 'K'])]
    x = np.random.default_rng(3).standard_normal((6, 41))
    x[:, likely] += 3
    x = log_softmax(x)
    decoder = LexiconBeamDecoder(lexicon, lm, 5000, acoustic_scale=1.0, nbest=2000, merge='sum', threshold=math.inf,
                                 blank_skip=1, frame_ms=80.0)
    paths = enumerate_sentences(x, lexicon)
    weights = {text: math.exp(total + lm.score(text)) for text, (_, total) in paths.items()}
    posterior = {text: w/sum(weights.values()) for text, w in weights.items()}
    found = decoder.decode(x)
    assert {h.text: h.posterior for h in found} == pytest.approx(posterior, rel=1e-4)
    for h in found:
        low, high = np.zeros((2, h.n_words))
        for text, p in posterior.items():
            equal = np.array([[i in e for i in range(h.n_words)] for e in alignments(h.text.split(), text.split())])
            low += p*equal.all(0)
            high += p*equal.any(0)
        confidence = np.array([w.confidence for w in h.words])
        assert (low - 1e-4 <= confidence).all() and (confidence <= high + 1e-4).all() and (confidence <= 1).all()
    one_place = decoder.with_words(x, [h for h in found if h.n_words == 1])
    assert sum(h.words[0].confidence for h in one_place) == pytest.approx(1)
    assert decoder.with_words(x, found, temperature=2.0)[0].posterior < found[0].posterior


def test_confidences_of_partial_results(tmp_path):
    """Partial words are those of the best path so far. Their confidences are the shares of the texts that contain them,
    each scored by its best path, the n-gram and the look-ahead, by enumeration of paths."""
    kenlm = pytest.importorskip('kenlm')
    words = {'AA': 'a', 'B': 'b', 'K': 'c'}
    texts = [' '.join(w) for n in (1, 2, 3) for w in itertools.product('abc', repeat=n)] # The n-gram tells them apart
    lm = build_ngram([*texts, 'a b a', 'b c b a', 'a a'], tmp_path/'lm.arpa', order=4)
    model = kenlm.Model(str(lm))
    def score_of(text, bos): return math.log(10)*model.score(text, bos=bos, eos=False) if text else 0.
    ahead = {w: score_of(w, bos=False) for w in words.values()}
    ahead[''] = max(ahead.values())
    lexicon = {w: [[p]] for p, w in words.items()}
    name = dict(zip([BLANK, SIL, *to_class_ids(list(words))], ['', '|', *words.values()]))
    x = np.random.default_rng(8).standard_normal((6, 41))
    x[:, list(name)] += 3
    x[range(6), [*to_class_ids(['AA']), SIL, BLANK, *to_class_ids(['B']), SIL, SIL]] += 4
    x = log_softmax(x)
    decoder = LexiconBeamDecoder(lexicon, load_ngram(lm), 5000, acoustic_scale=1.0, threshold=math.inf, blank_skip=1,
                                 frame_ms=80.0, temperature=2.0)
    stream = Stream(decoder)
    for t in range(1, len(x) + 1):
        stream.push(x[t - 1:t])
        best = {}
        for path in itertools.product(name, repeat=t):
            said = ''.join(name[k] for k, _ in itertools.groupby(path))
            if not re.fullmatch(r'([abc]\|)*[abc]?', said): continue
            *complete, begun = said.split('|')
            score = sum(x[i, k] for i, k in enumerate(path)) + score_of(' '.join(complete), bos=True) + ahead[begun]
            best[tuple(complete)] = max(best.get(tuple(complete), -math.inf), score)
        p = {text: math.exp(score/2) for text, score in best.items()}
        found = stream.partial_words()
        text = max(best, key=best.get)
        assert tuple(w.text for w in found) == text
        low, high = np.zeros((2, len(text)))
        for other in p:
            equal = np.array([[i in e for i in range(len(text))] for e in alignments(text, other)])
            low += p[other]/sum(p.values())*equal.all(0)
            high += p[other]/sum(p.values())*equal.any(0)
        confidence = np.array([w.confidence for w in found])
        assert (low - 1e-4 <= confidence).all() and (confidence <= high + 1e-4).all()
    assert len(found) > 1 and confidence.min() < 0.95


def test_homophones_without_limit(lm):
    "Thousands of words have one pronunciation: the n-gram scores all, none is dropped, and buffers grow."
    lexicon = {f'x{i}': [['AA']] for i in range(3000)} | {'b': [['AA']]}
    found = LexiconBeamDecoder(lexicon, lm, beam=50, nbest=4000).decode(noisy([*to_class_ids(['AA']), SIL]))
    assert found[0].text == 'b' and sum(h.n_words == 1 for h in found) == 3001


def test_long_trials(lm):
    "Histories grow with the trial, and their number has no limit."
    x = spoken(400, 2)
    found = LexiconBeamDecoder(LEXICON, lm, beam=60).decode(x)
    assert len(found) == 10 and found[0].n_words > 350


def test_final_sil_may_be_missing(lm):
    """The last word is found without its SIL, at the cost of a missing SIL; if no hypothesis in the beam is complete,
    the word is completed."""
    ids = [*to_class_ids(['AA']), SIL, *to_class_ids(['K', 'AA'])]
    # There are too few frames for the last word and its SIL, so the best compromise depends on the weights
    assert LexiconBeamDecoder(LEXICON, lm, beam=50, acoustic_scale=0.6).decode(noisy(ids, sharp=12))[0].text in (
        'a',
        'a c',
    )
    narrow = LexiconBeamDecoder(LEXICON, lm, beam=1).decode(noisy(ids, sharp=12))
    assert {h.text for h in narrow} <= {'a', 'a c'} and all(math.isfinite(h.total) for h in narrow)
    single, several = (LexiconBeamDecoder(LEXICON, lm, beam=1, nbest=n) for n in (1, 10))
    b = to_class_ids(['B']).tolist() # The pronunciation of two homophones, and the beginning of a third one
    assert [h.text for h in single.decode(noisy(b, sharp=12))] == ['']     # One frame cannot hold a word and its SIL
    assert single.decode(noisy(b*2, sharp=12)) == several.decode(noisy(b*2, sharp=12))[:1]
    assert {h.text for h in several.decode(noisy(b*2, sharp=12))} == {'', 'b', 'd'}


def test_unusual_input(lm):
    decoder = LexiconBeamDecoder(LEXICON, lm, word_score=2.0)
    empty, = decoder.decode(np.zeros((0, 41), np.float32))
    assert astuple(empty) == pytest.approx(('', 0.0, lm.score(''), 0, lm.score('')))
    assert decoder.decode(noisy([BLANK]*5, sharp=20))[0].text == ''
    assert [h.text for h in decoder.decode(noisy([3]))] == ['']        # One frame cannot hold a word and its SIL
    x = noisy([1, SIL], sharp=3).astype(np.float16)
    before = x.copy()
    assert decoder.decode(x)[0].text == 'a' and (x == before).all()
    assert decoder.decode_all([], progress=False) == []


@pytest.mark.parametrize('change, words', [
    (lambda x: x[:, :40], r"shape \(6, 40\), expected \[T', 41\]"),
    (lambda x: x[0], r'shape \(41,\)'),
    (lambda x: np.where(np.arange(6)[:, None] == 2, np.inf, x), 'frame 2, class 0: found inf'),
    (lambda x: np.where(np.arange(6)[:, None] == 4, -np.inf, x), 'frame 4: found -inf for every class'),
    (lambda x: np.where((np.arange(6)[:, None] == 5), np.nan, x), 'frame 5, class 0: found nan'),
    (lambda x: x + np.where(np.arange(6)[:, None] == 3, 1.0, 0.0), r'frame 3: the probabilities sum to 2\.7'),
    (lambda x: np.exp(x), 'log_softmax'),
])
def test_refused_input(change, words, lm):
    decoder = LexiconBeamDecoder(LEXICON, lm)
    x = noisy([BLANK]*6)
    with pytest.raises(ValueError, match=words): decoder.decode(change(x))
    with pytest.raises(ValueError, match=f'trial 1: .*{words}'): decoder.decode_all([x, change(x)], progress=False)
    assert decoder.decode(x)


@pytest.mark.parametrize(
    'args, words',
    [
        (dict(lexicon={}), 'lexicon is empty'),
        (dict(lexicon={'a': []}), "word 'a'"),
        (dict(lexicon={'a': [[]]}), "word 'a'"),
        (dict(lexicon={'a b': [['AA']]}), "'a b' is not one word"),
        (dict(lexicon={'a': [['AA', 'SIL']]}), "found 'SIL'"),
        (dict(lexicon={'a': [['AA1']]}), "found 'AA1'"),
        (dict(beam=0), 'beam is 0'),
        (dict(nbest=0), 'nbest is 0'),
        (dict(lm_weight=-1), 'lm_weight is -1'),
        (dict(lm_weight=math.nan), 'lm_weight is nan'),
        (dict(acoustic_scale=0), 'acoustic_scale is 0'),
        (dict(blank_penalty=-90), 'blank_penalty is -90'),
        (dict(merge='mean'), "merge is 'mean'"),
        (dict(word_score=math.inf), 'word_score is inf'),
        (dict(threshold=0), 'threshold is 0'),
        (dict(blank_skip=0.3), 'blank_skip is 0.3'),
        (
            dict(lexicon={'A': [['AA']]}),
            "knows none of the 1 words to be decoded, such as 'A'; give a model of whole words in the same language",
        ),
    ],
)
def test_refused_parameters(args, words, lm):
    with pytest.raises(ValueError, match=words): LexiconBeamDecoder(**dict(lexicon=LEXICON, lm=lm) | args)


def test_model_without_unk(tmp_path):
    "Without <unk> in the model, KenLM gives an unknown word 10^-100, so it is possible but least probable."
    (tmp_path / 'lm.arpa').write_text(
        '\\data\\\nngram 1=3\nngram 2=1\n\n'
        '\\1-grams:\n0\t<s>\t0\n-1\t</s>\t0\n-1\ta\t0\n\n\\2-grams:\n-0.1\t<s> a\n\n\\end\\\n'
    )
    lm = NGram.load(tmp_path/'lm.arpa')
    found = LexiconBeamDecoder({'a': [['AA']], 'b': [['AA']]}, lm).decode(noisy([*to_class_ids(['AA']), SIL], sharp=12))
    assert [h.text for h in found][0] == 'a' and 'b' in [h.text for h in found]
    assert next(h for h in found if h.text == 'b').ngram == pytest.approx(-101*math.log(10), abs=0.01)


def test_needs_no_torch():
    "Decoding works without any deep learning framework."
    code = (
        'import sys; sys.modules.update(dict.fromkeys(["torch", "tensorflow", "transformers", "IPython"])); '
        'import b2t_kaggle.decoding.decoder'
    )
    subprocess.run([sys.executable, '-c', code], check=True)


def test_real_sentences(tmp_path):
    """Real sentences with simulated posteriors, a lexicon of all their words, and a trigram of the other half: the word
    error rate is below the phoneme error rate."""
    labels = Path(__file__).parents[2]/'shared'/'t15'/'phoneme_labels.csv'
    if not labels.exists(): pytest.skip(f'the real sentences are not here: {labels}')
    rows = pd.read_csv(labels)
    rows = rows[~rows.sentence_label.str.startswith('[')]
    sentences = rows.sentence_label.map(normalize_sentence).tolist()
    lm = NGram.load(build_ngram(sentences[::2], tmp_path/'lm.arpa', order=3))
    decoder = LexiconBeamDecoder(
        build_lexicon(sorted({w for s in sentences for w in s.split()})), lm, acoustic_scale=1.0
    )
    rng = np.random.default_rng(0)
    edits = 0
    words = 0
    phoneme_edits = 0
    phonemes = 0
    chosen = range(1, 200, 2)
    trials = []
    for i in chosen:
        ids = to_class_ids(['SIL' if p == '|' else p for p in rows.true_phonemes.iloc[i].split()])
        frames = np.concatenate([[k]*rng.integers(1, 3) + [BLANK]*rng.integers(0, 4) for k in ids])
        x = (
            0.4 * rng.standard_normal((len(frames), 41))
            + 1.3 * rng.standard_normal((len(frames), 41)) * (frames > 0)[:, None]
        )
        x[np.arange(len(frames)), frames] += np.where(frames > 0, 5.0, 9.0)
        trials.append(log_softmax(x))
        phoneme_edits += Levenshtein.distance(ids.tolist(), greedy(trials[-1]).tolist())
        phonemes += len(ids)
    for i, nbest in zip(chosen, decoder.decode_all(trials, progress=False)):
        edits += Levenshtein.distance(sentences[i].split(), nbest[0].text.split())
        words += len(sentences[i].split())
    print(f'PER {phoneme_edits/phonemes:.1%}, WER {edits/words:.1%}')
    assert 0.05 < phoneme_edits/phonemes < 0.2 and edits/words < 0.1 and edits/words < phoneme_edits/phonemes


def test_probabilities_of_zero(lm):
    "One-hot rows can be decoded: excluded classes score like e^-10000, and totals stay finite."
    with np.errstate(divide='ignore'):
        x = np.log(np.eye(41))[[*to_class_ids(['AA']), SIL, BLANK, *to_class_ids(['K', 'AA']), SIL]]
    assert np.isneginf(x).any()
    decoder = LexiconBeamDecoder(LEXICON, lm, blank_penalty=1.0)
    hyps = decoder.decode(x)
    floored = decoder.decode(np.maximum(x, -1e4))
    assert hyps == floored and hyps[0].text == 'a c' and hyps[0].acoustic == 0 and len(hyps) > 1
    assert all(math.isfinite(h.total) and h.acoustic <= -1e4 for h in hyps[1:] if h.text != 'a c' and h.acoustic)
    labels = greedy(x)
    assert labels.tolist() == [*to_class_ids(['AA']), SIL, *to_class_ids(['K', 'AA']), SIL]
    assert len(align(x, labels)) == len(labels)
    partly = np.where((np.arange(6)[:, None] == 4) & (np.arange(41) == 7), -np.inf, noisy([BLANK]*6))
    assert decoder.decode(partly) and np.isneginf(partly).sum() == 1


def test_defaults_equal_the_configurations():
    of_decoder = {
        name: p.default
        for name, p in inspect.signature(LexiconBeamDecoder).parameters.items()
        # The first three are not keys of a run, and the last six belong to the model
        if name not in ('lexicon', 'lm', 'fusion', 'merge', 'frame_ms', 'frame_offset_ms',
                        'temperature', 'tokens', 'blank', 'word_end')
    }
    of_config = DecodeConfig().model_dump(exclude={'tune'})  # A key of `tuning`
    of_config = {k: v for k, v in of_config.items() if not k.startswith('llm')}  # Compared in test_fusion
    assert of_decoder.keys() == of_config.keys()
    assert {k for k in of_config if of_decoder[k] != of_config[k]} <= {
        'nbest'
    }  # A run may keep more, for an LLM to rerank


def test_arrays_of_any_library(lm):
    "Tensors with gradients, in half precision and bfloat16, and JAX arrays give the same numbers in float64."
    torch = pytest.importorskip('torch')
    ml_dtypes = pytest.importorskip('ml_dtypes')
    decoder = LexiconBeamDecoder(LEXICON, lm, beam=30)
    trials = [spoken(3, 1), spoken(2, 2), spoken(0, 3)]
    lengths = [len(x) for x in trials]
    padded = np.full((3, max(lengths), 41), np.nan)
    for row, x in zip(padded, trials): row[:len(x)] = x
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        batch = torch.tensor(padded, dtype=dtype, requires_grad=True)
        exact = [x[:n] for x, n in zip(batch.detach().double().numpy(), lengths)]
        expected = [decoder.decode(x) for x in exact]
        assert decoder.decode_batch(batch, torch.tensor(lengths)) == expected
        assert decoder.decode_batch([batch[i, :n] for i, n in enumerate(lengths)]) == expected
        assert decoder.decode(list(batch[0, :lengths[0]])) == expected[0] == decoder.decode(exact[0].tolist())
        if dtype == torch.bfloat16: assert decoder.decode_batch(padded.astype(ml_dtypes.bfloat16), lengths) == expected
        with pytest.raises(ValueError, match='trial 0: .*found probabilities, expected their logarithms; use np.log'):
            decoder.decode_batch(batch[:, :lengths[2]].exp())
        with pytest.raises(ValueError, match='trial 0: .*these are logits, use log_softmax'):
            decoder.decode_batch(batch[:, :lengths[2]] + 4)


def sentences_of_tokens(log_probs, tokens, lexicon, blank, word_end):
    "Every sentence that a path over the tokens spells, by enumeration of all paths: text -> (best, log-sum)."
    ends = [] if word_end is None else [word_end]
    spellings = {w: [[*pron, *ends] for pron in prons] for w, prons in lexicon.items()}
    used = sorted({blank, *(s for prons in spellings.values() for pron in prons for s in pron)})
    n_frames = len(log_probs)
    said = {(): {''}}  # Labels -> texts with this spelling
    for _ in range(n_frames):  # In each round, texts grow by one word
        for labels, texts in list(said.items()):
            for w, prons in spellings.items():
                for pron in prons:
                    if len(labels) + len(pron) > n_frames: continue
                    said.setdefault((*labels, *pron), set()).update(f'{t} {w}'.strip() for t in texts)
    columns = [tokens.index(s) for s in used]
    out = {}
    for labels, (best, total) in enumerate_paths(log_probs, columns, blank=tokens.index(blank)).items():
        for text in said.get(tuple(tokens[k] for k in labels), ()):
            b, s = out.get(text, (-math.inf, -math.inf))
            out[text] = max(b, best), np.logaddexp(s, total)
    return out


LETTERS = dict(tokens=['b', ' ', '-', 'a'], blank='-', word_end=' ')
PIECES = dict(tokens=['a', 'ab', '<b>', 'b'], blank='<b>', word_end=None)
MANY = dict(tokens=['b', *map(str, range(100)), '<b>', 'a', '|'], blank='<b>', word_end='|')
PIECES_OF_MANY = dict(tokens=['a', *map(str, range(100)), 'ab', '<b>', 'b'], blank='<b>', word_end=None)
SPELLED = {
    ' ': {'a': ['a'], 'aa': ['aa'], 'b': ['b', 'ab'], 'd': ['b'], 'c': ['ba']},
    None: {'a': [['a']], 'aa': [['a', 'a']], 'b': [['b']], 'c': [['ab']], 'd': [['a', 'b']]},
}


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(0, 6),
    st.sampled_from([LETTERS, PIECES, MANY, PIECES_OF_MANY]),
    st.sampled_from(['max', 'sum']),
    st.sampled_from([-1.0, 0.0, 3.0]),
    st.sampled_from([1, 2, 3]),
    st.booleans(),
)
def test_other_models_equal_enumeration(tmp_path_factory, seed, frames, model, merge, word_score, order, one_by_one):
    """Characters with a space, word pieces without a separator, and many classes: all sentences and their scores, also
    in a stream. Classes that no word uses take probability away."""
    folder = tmp_path_factory.getbasetemp()/'other_models'
    folder.mkdir(exist_ok=True)
    lm = ngram(order, folder)
    lexicon = SPELLED[' ' if model['word_end'] else None]
    x = np.random.default_rng(seed).standard_normal((frames, len(model['tokens'])))
    x[:, [0, 1, -1, -2, -3]] += 2
    x = log_softmax(x)
    decoder = LexiconBeamDecoder(lexicon, lm, beam=5000, nbest=5000, merge=merge, word_score=word_score, **model)
    expected = sentences_of_tokens(x, lexicon=lexicon, **model)
    found = decoder.decode(x)
    assert {h.text for h in found} == set(expected) and len(found) == len(expected)
    for h in found:
        acoustic, n = expected[h.text][merge == 'sum'], len(h.text.split())
        total = 0.8*acoustic + lm.score(h.text) + word_score*n
        np.testing.assert_allclose(astuple(h)[1:], (acoustic, lm.score(h.text), n, total), atol=1e-6)
    assert [h.total for h in found] == sorted((h.total for h in found), reverse=True)
    stream = Stream(decoder)
    for row in x if one_by_one else [x]: stream.push(np.atleast_2d(row))
    assert stream.finish() == found
    narrow = LexiconBeamDecoder(lexicon, lm, beam=3, nbest=2, **model).decode(x)
    assert 1 <= len(narrow) <= 2 and {h.text for h in narrow} <= set(expected)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_the_order_of_classes_makes_no_difference(tmp_path_factory, seed):
    "Results are equal to the last digit; a token may be given by name or number."
    folder = tmp_path_factory.getbasetemp()/'order_of_classes'
    folder.mkdir(exist_ok=True)
    lm = ngram(2, folder)
    x = spoken(4, seed)
    # Blank, word end and tokens are found by name; the others keep their order, which decides ties
    order = np.insert(np.arange(1, 40), [5, 20], [BLANK, SIL]) if seed % 2 else np.array([*range(1, 41), BLANK])
    expected = LexiconBeamDecoder(LEXICON, lm, beam=30).decode(x)
    for blank in ('BLANK', int(np.flatnonzero(order == BLANK)[0])):
        tokens = [PHONEMES[k] for k in order]
        found = LexiconBeamDecoder(LEXICON, lm, tokens=tokens, blank=blank, beam=30).decode(x[:, order])
        assert found == expected


def test_models_that_are_refused(lm):
    "A one-line error says what to pass."
    with pytest.raises(TypeError, match='^lexicon: found a NoneType, expected a dict of words and their pron.*$'):
        LexiconBeamDecoder(None, lm, **LETTERS)
    for options, words in [
        (LETTERS | dict(blank='_'), "blank: found '_', expected one of the 4 tokens, such as 'b', or its number"),
        (LETTERS | dict(word_end='|'), r"word_end: found '\|', expected one of the 4 tokens"),
        (LETTERS | dict(blank=4), 'blank: found 4, expected one of the 4 tokens'),
        (LETTERS | dict(tokens=['a', ' ', '-', 'a']), "tokens: found 'a' twice"),
    ]:
        with pytest.raises(ValueError, match=words): LexiconBeamDecoder(SPELLED[' '], lm, **options)
    with pytest.raises(ValueError, match="word 'b': found 2 spellings, expected one, since no word_end follows it"):
        LexiconBeamDecoder({'b': [['b'], ['a', 'b']]}, lm, **PIECES)
