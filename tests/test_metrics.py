"Error rates agree with an independent computation, on random and on real data."
import json
from pathlib import Path

import jiwer
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from b2t_kaggle.metrics import (
    ErrorCounts,
    bleu,
    character_error_rate,
    count_edits,
    error_table,
    phoneme_error_rate,
    phoneme_errors,
    total,
    word_error_rate,
    word_errors,
)
from b2t_kaggle.phonemes import from_class_ids

NBEST = Path(__file__).resolve().parents[2]/'shared/t15/nbest_val.jsonl'
KEPT = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ -'"


def distance(a, b):
    "Levenshtein distance by the textbook's dynamic programming."
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        above = row
        row = [i]
        for j, y in enumerate(b, 1): row.append(min(above[j] + 1, row[j - 1] + 1, above[j - 1] + (x != y)))
    return row[-1]


def words(text):
    "The metric's normalisation of words, reimplemented."
    s = ''.join(c for c in text if c in KEPT).replace('- ', ' ').lower().replace('--', '').replace(" '", "'")
    return [w for w in s.split(' ') if w]


tokens = st.lists(st.integers(0, 4), max_size=12)
texts = st.text(alphabet="ab B.-'", max_size=20)


@given(tokens, tokens)
def test_counts_agree_with_a_shortest_alignment(ref, hyp):
    c = count_edits(ref, hyp)
    assert c.edits == distance(ref, hyp)
    assert c.length == len(ref) and c.hits + c.substitutions + c.insertions == len(hyp) and min(c) >= 0


@given(st.lists(st.tuples(tokens, tokens), max_size=6))
def test_phoneme_error_rate_is_aggregate(pairs):
    refs = [r for r, _ in pairs]
    hyps = [h for _, h in pairs]
    want = sum(distance(r, h) for r, h in pairs)/max(1, sum(map(len, refs)))
    assert phoneme_error_rate(refs, hyps) == pytest.approx(want)
    arrays = [np.array(h, dtype=np.int32) for h in hyps]
    assert phoneme_error_rate(map(from_class_ids, refs), arrays) == pytest.approx(want)


@given(st.lists(st.tuples(texts, texts), min_size=1, max_size=6))
def test_word_and_character_error_rates_equal_jiwers(pairs):
    clean = [[' '.join(words(t)) for t in side] for side in zip(*pairs)]
    refs, hyps = map(list, zip(*pairs))
    assert word_error_rate(refs, hyps) == pytest.approx(jiwer.wer(*clean))
    assert character_error_rate(refs, hyps) == pytest.approx(jiwer.cer(*clean))
    assert total(word_errors(refs, hyps)).edits == sum(distance(words(r), words(h)) for r, h in pairs)


@given(st.lists(st.tuples(tokens, tokens, st.sampled_from('abc')), max_size=8))
def test_sessions_add_up(trials):
    counts = phoneme_errors([r for r, _, _ in trials], [h for _, h, _ in trials])
    table = error_table(counts, [g for _, _, g in trials])
    assert list(table.index) == [*dict.fromkeys(g for _, _, g in trials), 'all']
    for column in ('trials', 'length', 'edits', 'substitutions', 'insertions', 'deletions'):
        assert table[column][:-1].sum() == table.loc['all', column]
    assert table.loc['all', 'rate'] == pytest.approx(total(counts).rate)


@given(st.lists(texts, max_size=5))
def test_bleu_bounds(refs):
    assert 0 <= bleu(refs, refs[::-1]) <= 1 + 1e-12
    if any(len(words(r)) >= 4 for r in refs): assert bleu(refs, refs) == pytest.approx(1)
    assert bleu(refs, ['']*len(refs)) == 0


def test_empty_sides_are_defined():
    assert word_error_rate([], []) == phoneme_error_rate([], []) == character_error_rate([], []) == 0
    assert word_error_rate(['!?'], ['']) == 0
    assert word_error_rate(['a b', ''], ['', 'c']) == 3/2
    assert word_error_rate([''], ['a b']) == 2
    assert total([]) == ErrorCounts() and error_table([], []).loc['all', 'trials'] == 0


@pytest.mark.parametrize('rate', [word_error_rate, character_error_rate, phoneme_error_rate, bleu])
def test_unpaired_input_is_refused(rate):
    with pytest.raises(ValueError, match='2 references and 1 hypotheses'): rate(['a', 'b'], ['a'])
    with pytest.raises(ValueError, match='expected a list'): rate('a', ['a'])
    with pytest.raises(ValueError, match='expected a list'): rate(['a'], 'a')


@pytest.mark.parametrize('bad, message', [(None, 'found None'), (float('nan'), 'found nan'), (b'a', "found b'a'")])
def test_errors_about_texts_name_the_trial(bad, message):
    with pytest.raises(ValueError, match=f'hypothesis of trial 1: {message}'): word_error_rate(['a', 'b'], ['a', bad])


@pytest.mark.parametrize('bad', [['AH1'], 'DH AH', [None]])
def test_errors_about_phonemes_name_the_trial(bad):
    with pytest.raises(ValueError, match='reference of trial 1'): phoneme_error_rate([[1], bad], [[1], [1]])


@pytest.mark.parametrize('system', ['wfst_5gram', 'lightbeam'])
def test_real_first_hypotheses(system):
    if not NBEST.exists(): pytest.skip('../shared/t15/nbest_val.jsonl is not beside the repository')
    trials = [json.loads(line) for line in NBEST.open()]
    refs = [t['reference'] for t in trials]
    hyps = [t[system][0] for t in trials]
    edits = sum(distance(words(r), words(h)) for r, h in zip(refs, hyps))
    length = sum(len(words(r)) for r in refs)
    counts = total(word_errors(refs, hyps))
    assert (counts.edits, counts.length) == (edits, length)
    assert word_error_rate(refs, hyps) == edits/length
    print(f'{system}: {len(trials)} trials, {edits} edits / {length} words = {edits/length:.2%}')
