"The decoders against exhaustive enumeration, their scores, input with faults, and real sentences."
import itertools
import math
import warnings
from dataclasses import astuple
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from b2t_kaggle.decoding.beam import LexiconBeamDecoder, greedy, phoneme_beam
from b2t_kaggle.decoding.ngram import NGram, build_ngram
from b2t_kaggle.phonemes import BLANK, PHONEMES, SIL, build_lexicon, normalize_sentence, to_class_ids

pytestmark = pytest.mark.filterwarnings('ignore:.*too little text')
TEXT = ['a b', 'b a c', 'aa', 'c aa b', 'd', 'a d a', 'b', 'b b c d']
PRONUNCIATIONS = [p for n in (1, 2, 3) for p in itertools.product(('AA', 'B', 'K'), repeat=n)]


@cache
def ngram(order, folder):
    return NGram.load(build_ngram(TEXT, Path(folder)/f'{order}.arpa', order=order, estimator='own'))


def log_softmax(x): return x - np.logaddexp.reduce(x, axis=-1, keepdims=True)


def enumerate_paths(log_probs, classes):
    "Every path over some classes, summed up by the labels it spells: labels -> (best, log-sum)."
    out = {}
    for path in itertools.product(classes, repeat=len(log_probs)):
        labels = tuple(k for k, _ in itertools.groupby(path) if k != BLANK)
        p = float(sum(log_probs[t, k] for t, k in enumerate(path)))
        best, total = out.get(labels, (-math.inf, -math.inf))
        out[labels] = max(best, p), np.logaddexp(total, p)
    return out


def enumerate_sentences(log_probs, lexicon):
    "Every sentence that some path spells: text -> (best, log-sum)."
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


lexicons = st.dictionaries(st.sampled_from(['a', 'aa', 'b', 'c', 'd', 'unknown']), st.lists(st.sampled_from(PRONUNCIATIONS).map(list), min_size=1, max_size=2), min_size=1, max_size=6)
posteriors = st.builds(lambda seed, frames, sharp: log_softmax(sharp*np.random.default_rng(seed).standard_normal((frames, 41))),
                       st.integers(0, 2**32 - 1), st.integers(0, 6), st.sampled_from([0.0, 1.0, 3.0]))


@settings(max_examples=60, deadline=None)
@given(posteriors, lexicons, st.sampled_from([1, 2, 3]), st.sampled_from(['max', 'sum']), st.sampled_from([0.0, 0.7, 2.0]),
       st.sampled_from([-1.0, 0.0, 3.0]), st.sampled_from([0.3, 1.0]), st.sampled_from([1.0, 90.0]))
def test_equals_enumeration(tmp_path_factory, log_probs, lexicon, order, merge, lm_weight, word_score, scale, penalty):
    folder = tmp_path_factory.getbasetemp()/'enumeration'
    folder.mkdir(exist_ok=True)
    lm = ngram(order, folder)
    if len({p for prons in lexicon.values() for pron in prons for p in pron}) > 2: log_probs = log_probs[:5] # 5⁶ paths take too long
    decoder = LexiconBeamDecoder(lexicon, lm, beam=5000, nbest=2000, lm_weight=lm_weight, word_score=word_score,
                                 acoustic_scale=scale, blank_penalty=penalty, merge=merge)
    penalised = log_probs.copy()
    penalised[:, BLANK] -= math.log(penalty)
    expected = {}
    for text, acoustic in enumerate_sentences(penalised, lexicon).items():
        n, a, g = len(text.split()), acoustic[merge == 'sum'], lm.score(text)
        expected[text] = a, g, n, scale*a + lm_weight*g + word_score*n
    found = decoder.decode(log_probs)
    assert {h.text for h in found} == set(expected) and len(found) == len(expected)
    for h in found: np.testing.assert_allclose(astuple(h)[1:], expected[h.text], atol=1e-6)
    assert [h.total for h in found] == sorted((h.total for h in found), reverse=True)
    best = LexiconBeamDecoder(lexicon, lm, beam=5000, nbest=1, lm_weight=lm_weight, word_score=word_score,
                              acoustic_scale=scale, blank_penalty=penalty, merge='max').decode(log_probs)
    if merge == 'max': assert len(best) == 1 and best[0].total == pytest.approx(found[0].total, abs=1e-9)
