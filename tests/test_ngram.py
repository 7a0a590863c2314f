"n-gram models: agreement with an example of lmplz, sums of probabilities, faulty files."
import gzip
import math
import random
import re
import time
import tracemalloc

import numpy as np
import pandas as pd
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kenlm_binary import kenlm_binary

from b2t_kaggle.decoding.scorers import KenLMScorer
from b2t_kaggle.lm import kneser_ney
from b2t_kaggle.lm.ngram import NGram, build_ngram, perplexity_report

pytestmark = pytest.mark.filterwarnings('ignore:.*too little text')

SENTENCES = '''i want to go home
i want a glass of water
do you want to go home now
we want to see you
i do not want to go
how are you
how are you now
you and i want water
i am thirsty
are you at home
it is a glass of water
i am not at home now
'''.splitlines()

# Output of KenLM's `lmplz -o 3 --discount_fallback` for SENTENCES: log10 p, words, log10 backoff
KNOWN = '''
-1.751358 | <unk> | 0
-0.92081875 | </s> | 0
-1.1275789 | you | -0.30103
-1.5362427 | thirsty | -0.30103
-0.51071286 | <s> i | -0.0728278
-0.5417056 | i want | -0.16481024
-0.2698052 | are you | -0.16481024
-0.39941442 | i want to | 0
-0.24037887 | <s> how are | 0
'''


def read_arpa(path):
    "All entries of an ARPA file: words -> (log10 p, backoff)."
    out = {}
    text = gzip.decompress(path.read_bytes()).decode() if path.suffix == '.gz' else path.read_text()
    for line in text.splitlines():
        if line[:1] in '-0123456789' and '\t' in line:
            p, words, *b = line.split('\t')
            out[tuple(words.split())] = float(p), float(b[0]) if b else 0.0
    return out


def zipf_sentences(n, vocab, seed):
    "Text from which discounts can be estimated: frequent and rare words, repeated phrases."
    rng = np.random.default_rng(seed)
    letters = str.maketrans('0123456789', 'abcdefghij')
    draw = lambda k: [str(i).translate(letters) for i in np.minimum(rng.zipf(1.3, k), vocab)]
    phrases = [draw(4) for _ in range(n//2)]
    def sentence():
        before = draw(rng.integers(0, 6))
        phrase = phrases[int(rng.integers(len(phrases))**.8)]
        return ' '.join(before + phrase + draw(rng.integers(0, 6)))
    return [sentence() for _ in range(n)]


def test_known_example(tmp_path):
    ours = read_arpa(build_ngram(SENTENCES, tmp_path/'lm.arpa', order=3))
    for line in KNOWN.strip().splitlines():
        p, words, b = (x.strip() for x in line.split('|'))
        np.testing.assert_allclose(ours[tuple(words.split())], (float(p), float(b)), atol=1e-4, rtol=0, err_msg=words)


sentence = st.lists(st.sampled_from('abcdef'), min_size=1, max_size=6).map(' '.join)


@settings(max_examples=40, deadline=None)
@given(st.lists(sentence, min_size=1, max_size=12), st.integers(1, 3), st.sampled_from([(0,), (0, 1), (0, 0, 1)]),
       st.booleans(), st.randoms())
@example(['a a d a b', 'a d a b c', 'a d a b c'], 2, (0,), False, random.Random(0)) # A discount of 0
def test_probabilities_sum_to_one(tmp_path_factory, sentences, order, prune, restrict, chosen):
    "After any context, seen or not, the probabilities of all words, <unk> and </s> sum to one."
    vocab = 'abcd' if restrict else None
    path = tmp_path_factory.mktemp('lm')/'lm.arpa'
    build_ngram(sentences, path, order=order, prune=prune, vocab=vocab)
    lm = NGram.load(path)
    words = sorted({w for s in sentences for w in s.split() if not restrict or w in vocab})
    assert all(w in lm for w in words) or restrict or prune != (0,)
    for context in ([], [chosen.choice('abcdef')], chosen.choices('abcdef', k=2)):
        before = lm.score(context, eos=False)
        after = [lm.score([*context, w], eos=False) for w in (*words, 'unknown')] + [lm.score(context)]
        total = sum(math.exp(s - before) for s in after)
        assert total == pytest.approx(1, abs=1e-4)


def test_options(tmp_path):
    lm = NGram.load(build_ngram(SENTENCES, tmp_path/'a.arpa', order=3, vocab=['i', 'want', 'water']))
    assert 'want' in lm and 'home' not in lm
    full = read_arpa(build_ngram(SENTENCES, tmp_path/'b.arpa', order=3))
    pruned = read_arpa(build_ngram(SENTENCES, tmp_path/'c.arpa.gz', order=3, prune=(0, 0, 1)))
    assert {k for k in full if len(k) < 3} == {k for k in pruned if len(k) < 3} and len(pruned) < len(full)
    unigrams = NGram.load(build_ngram(SENTENCES, tmp_path/'d.arpa', order=1))
    assert unigrams.score('i want', eos=False) == pytest.approx(unigrams.score('want i', eos=False), abs=1e-6)


def test_files_and_sentences_are_the_same(tmp_path):
    (tmp_path/'a.txt').write_text('\n'.join(SENTENCES[:6]).upper() + '\n\n')
    with gzip.open(tmp_path/'b.txt.gz', 'wt') as f: f.write('\n'.join(SENTENCES[6:]))
    build_ngram(SENTENCES, tmp_path/'1.arpa')
    build_ngram([str(tmp_path/'a.txt'), tmp_path/'b.txt.gz'], tmp_path/'2.arpa')
    build_ngram([tmp_path/'a.txt', *SENTENCES[6:]], tmp_path/'3.arpa.gz')
    assert read_arpa(tmp_path/'1.arpa') == read_arpa(tmp_path/'2.arpa') == read_arpa(tmp_path/'3.arpa.gz')


@pytest.mark.parametrize('call, error, words', [
    (dict(texts=[]), ValueError, 'no words'),
    (dict(texts='there_is_no_such.txt'), FileNotFoundError, 'there_is_no_such.txt'),
    (dict(texts=SENTENCES, order=0), ValueError, 'order is 0'),
    (dict(texts=SENTENCES, order=12), ValueError, 'at most 9'),
    (dict(texts=SENTENCES, prune=(1, 0)), ValueError, 'do not fall'),
])
def test_build_refuses(call, error, words, tmp_path):
    (tmp_path/'lm.arpa').write_text('precious')
    with pytest.raises(error, match=words): build_ngram(**call, out_path=tmp_path/'lm.arpa')
    assert [p.name for p in tmp_path.iterdir()] == ['lm.arpa'] and (tmp_path/'lm.arpa').read_text() == 'precious'


def test_warns_of_small_text(tmp_path):
    with pytest.warns(UserWarning, match='too little text'): build_ngram(['a b'], tmp_path/'lm.arpa', order=2)


def broken(text, old, new): return text.replace(old, new, 1)


@pytest.mark.parametrize('old, new, line', [
    ('\\data\\', '\\date\\', 'line 1: found'),
    ('ngram 2=', 'ngram two=', 'line 3: found'),
    ('ngram 3=', 'ngram 3=9', 'entries, expected'),
    ('\\2-grams:', '\\4-grams:', 'expected .*2-grams:'),
    ('\ti want\t', '\ti i want to go\t', 'fields, expected'),
    ('\ti want\t', '\ti wantt\t', "the word 'wantt'"),
    ('\n-1.1275', '\nx1.1275', "found 'x1.1275"),
    ('\n-1.1275', '\n+1.1275', 'at most 0'),
    ('\\end\\', '\\en', 'found .*, expected .*end'),
])
@pytest.mark.parametrize('suffix', ['.arpa', '.arpa.gz'])
def test_broken_files_name_the_line(old, new, line, suffix, tmp_path):
    text = build_ngram(SENTENCES, tmp_path/'good.arpa').read_text()
    bad = tmp_path/f'bad{suffix}'
    bad.write_bytes((gzip.compress if suffix.endswith('gz') else bytes)(broken(text, old, new).encode()))
    with pytest.raises(ValueError, match=f'(?s)bad.*{line}'): NGram.load(bad)


def test_other_files(tmp_path):
    with pytest.raises(FileNotFoundError, match='no such file'): NGram.load(tmp_path/'nothing.arpa')
    (tmp_path/'noise.bin').write_bytes(bytes(range(256))*20)
    with pytest.raises(ValueError, match='noise.bin'): NGram.load(tmp_path/'noise.bin')
    whole = gzip.compress(b'\\data\\\n'*1000)
    (tmp_path/'cut.arpa.gz').write_bytes(whole[:len(whole)//2])
    with pytest.raises(ValueError, match='cut.arpa.gz'): NGram.load(tmp_path/'cut.arpa.gz')


@pytest.mark.parametrize('kind, bits, suffix', [
    ('probing', None, '.arpa'), ('trie', None, '.arpa'), ('trie', 8, '.arpa'),
])
def test_kenlm_binaries(kind, bits, suffix, tmp_path):
    arpa = build_ngram(zipf_sentences(300, 300, 0), tmp_path/f'lm{suffix}')
    lm, binary = NGram.load(arpa), NGram.load(kenlm_binary(arpa, tmp_path/'lm.bin', kind, bits))
    ours, theirs = ([m.score(s) for s in [*zipf_sentences(50, 300, 1), 'unknown words here', '']] for m in (lm, binary))
    np.testing.assert_allclose(ours, theirs, rtol=.02 if bits else 0, atol=1e-4) # Quantized to 256 values
    assert (ours != theirs) == bool(bits)


def test_perplexity_report(tmp_path):
    lm = NGram.load(build_ngram(SENTENCES, tmp_path/'lm.arpa'))
    r = perplexity_report(lm, {'seen': SENTENCES, 'new': ['i want pizza', 'pizza']})
    assert r.loc['new', ['sentences', 'words', 'oov', 'frequent_oov']].tolist() == [2, 4, 2, 'pizza']
    assert r.loc['seen', 'oov'] == 0
    log_prob = sum(lm.score(s) for s in SENTENCES)
    n = sum(len(s.split()) + 1 for s in SENTENCES)
    assert r.loc['seen', 'perplexity'] == pytest.approx(math.exp(-log_prob/n), rel=1e-5)


@pytest.mark.parametrize('suffix', ['.arpa', '.arpa.gz'])
def test_capitals(suffix, tmp_path):
    "A 5-gram in capitals can be queried in lower case, with whole sentences and word by word."
    text = build_ngram(SENTENCES, tmp_path/'lower.arpa', order=5).read_text()
    upper = tmp_path/f'upper{suffix}'
    capitals = '\n' + re.sub(r'(?<=[\t ])(?!<)\S+', lambda m: m[0].upper(), text)
    upper.write_bytes((gzip.compress if suffix.endswith('gz') else bytes)(capitals.encode()))
    lm, same = NGram.load(tmp_path/'lower.arpa'), NGram.load(upper)
    for s in [*SENTENCES, 'an unknown word', '']: assert same.score(s) == pytest.approx(lm.score(s), abs=1e-5)
    assert 'want' in same and 'pizza' not in same and same.order == 5
    reports = [perplexity_report(m, {'text': SENTENCES}) for m in (lm, same)]
    pd.testing.assert_frame_equal(*reports, rtol=1e-5)
    scores = []
    for m in (lm, same):
        scorer = KenLMScorer(m, ['i', 'pizza'])
        scorer.resolve(np.arange(4)) # At the beginning of a sentence
        scores.append(scorer.arcs['log_prob'][scorer.arcs['key'] >= 0])
    np.testing.assert_allclose(*scores, atol=1e-5)


def test_written_text_is_cleaned(tmp_path):
    text = ['Mr. Doe said: “I’m 30.” See www.x.org! Let x be 1.']
    path = build_ngram(text, tmp_path/'lm.arpa', order=2, clean=True, numbers=True)
    lm = NGram.load(path)
    assert all(w in lm for w in "mr doe said i'm thirty see wwwxorgwwwxorg".split()) and 'x' not in lm


def test_parts_change_nothing():
    "The tables do not depend on how much is sorted at a time."
    tokens, words = kneser_ney._tokenize(zipf_sentences(200, 50, 0))
    whole = kneser_ney._count_ngrams(tokens, len(words), 4)
    for part in (1, 7, 1000):
        for a, b in zip(whole, kneser_ney._count_ngrams(tokens, len(words), 4, part)):
            for x, y in zip(a, b): np.testing.assert_array_equal(x, y)


def test_scales(tmp_path):
    """200,000 words take seconds of CPU time, and so little memory that 50 million words would fit into 8 GB.

    The model's perplexity is far below chance."""
    sentences = zipf_sentences(20_000, 5000, 1)
    start = time.process_time()
    tracemalloc.start()
    tokens, words = kneser_ney._tokenize(sentences)
    tables = kneser_ney._count_ngrams(tokens, len(words), 4, part=20_000)
    for _ in kneser_ney.kneser_ney(tables, [np.ones(len(t.first), bool) for t in tables]): pass
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak/len(tokens) < 80 # Bytes: 4 GB
    lm = NGram.load(build_ngram(sentences, tmp_path/'lm.arpa', order=3))
    assert time.process_time() - start < 30
    r = perplexity_report(lm, {'seen': sentences[:500]})
    assert r.loc['seen', 'perplexity'] < len({w for s in sentences for w in s.split()})/10
