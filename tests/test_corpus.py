"Cleaning a corpus: any input gives sentences of words, and memory use is constant."
import itertools
import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from b2t_kaggle.lm.corpus import _split_sentences, clean_sentence, clean_text
from b2t_kaggle.phonemes import normalize_sentence

text = st.lists(st.sampled_from([
    *"abIsx'.!?-:#@,“”’‘…–—0159% \t", "it's", 'U.S.', 'Mr.', 'www.a.org', 'me@b.org', 'the', "boys'", '1984', '3.5',
    ' ', '. A', 'é'])).map(''.join)


@given(text | st.text(), st.booleans())
def test_output_consists_of_words(line, numbers):
    for s in clean_text([line + ' '], numbers):
        assert re.fullmatch(r"[a-z']+( [a-z']+)*", s)
        assert not any(len(w) == 1 and w not in 'ia' for w in s.split())
        assert not any(w.startswith("'") for w in s.split()) and not s.endswith("'")
        assert normalize_sentence(s) == s


@given(text | st.text())
def test_splitting_loses_nothing(line):
    assert ''.join(''.join(_split_sentences(line)).split()) == ''.join(line.split())


def test_streams():
    endless = clean_text('One more. And two more!' for _ in itertools.count())
    assert list(itertools.islice(endless, 3)) == ['one more', 'and two more', 'one more']


@pytest.mark.parametrize('raw, clean', [
    ("It was the boys' year, 'the best'", "it was the boys' year the best"),
    ('"Don\'t," she said', "don't she said"),
    ('A.B.C. news', 'abc news'),
    ('Write to https://a.b/c?d=1 or b@c.org', 'write to httpsabcd httpsabcd or bcorgbcorg'),
    ('50% of 3,000', 'of'),
    ('rock ‘n’ roll', None),
    ("The '90s", None),
])
def test_examples(raw, clean): assert clean_sentence(raw) == clean


@pytest.mark.parametrize('raw, said', [
    ('It began in the 1770s.', 'it began in the seventeen seventies'),
    ('He liked the mid-1990s, not the ’80s.', 'he liked the mid nineteen nineties not the eighties'),
    ('It is 20°C here, or -5 °F.', 'it is twenty degrees celsius here or minus five degrees fahrenheit'),
    ('He ran 5k, then 3.5km in 1h.', 'he ran five thousand then three point five kilometers in one hour'),
    ('From 1990-1995 we were here.', 'from nineteen ninety nineteen ninety five we were here'),
    ('Wait 5–10 minutes at 7:00 or 7.05 p.m.', 'wait five to ten minutes at seven or seven oh five pm'),
    ('The 2nd costs $3.50, the 21st £20k, a $1-2 million deal.', 'the second costs three dollars and fifty cents the '
     'twenty first twenty thousand pounds a one to two million dollars deal'),
    ('Add 1 1/2 cups or ¾ of it, for 20 € or 99¢.', 'add one and one half cups or three quarters of it for twenty '
     'euros or ninety nine cents'),
    ('He is 6\'2" & calls (555) 123-4567 on Jan. 5.', 'he is six foot two and calls five five five one two three '
     'four five six seven on jan five'),
    ('The 5th–7th of the pre-1960 rules, 9am-5pm, .5 of 5M.', 'the fifth to seventh of the pre nineteen sixty rules '
     'nine am to five pm zero point five of five million'),
    ('A 747 and two 747s weigh 1kg?', 'a seven hundred forty seven and two seven hundred forty sevens weigh one '
     'kilogram'),
])
def test_numbers_are_written_as_spoken(raw, said): assert clean_sentence(raw, numbers=True) == said


def test_sentences_left_out_are_counted():
    left_out = Counter()
    text = ['He went home. Let x be 3. Room 3B. He said so. *** ... 5']
    assert [*clean_text(text, lexicon='he went home'.split(), left_out=left_out)] == ['he went home']
    assert left_out == {'single letters or no words': 3, 'words outside the vocabulary': 1}
    assert [*clean_text(['Jan. 5 and Gov. Doe came.'], True)] == ['jan five and gov doe came']


@pytest.mark.parametrize('numbers', [False, True])
@pytest.mark.parametrize('word', [
    'x'*100_000, '.'*100_000, '1-'*50_000, '$1'*50_000, '1:'*50_000, '1°'*50_000, "1s'"*40_000, '1.'*50_000,
    '."'*50_000, 'a.'*50_000, '7'*100_000, '1,'*50_000, 'x@'*50_000, '1/2 '*30_000, "6'"*50_000, '1¢'*50_000,
])
def test_a_long_word_is_read_once(word, numbers):
    "The test would take minutes if the time grew with the square of the word's length."
    assert list(clean_text([f'So it was {word} and no more. He went.'], numbers))[-1] == 'he went'
