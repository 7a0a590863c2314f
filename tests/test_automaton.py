"The automaton agrees with KenLM in a million queries, in its states, and for models with missing n-grams."
import errno
import gzip
import math
import os
import re
import resource
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from kenlm_binary import kenlm_binary
from numba import njit

from b2t_kaggle.lm import automaton
from b2t_kaggle.lm.arpa import ArpaError, Grams, read_arpa, write_arpa
from b2t_kaggle.lm.automaton import Automaton, check_words, find, step
from b2t_kaggle.lm.ngram import NGram, build_ngram, load_kenlm, perplexity_report

pytestmark = pytest.mark.filterwarnings('ignore:.*too little text')


def zipf_text(n, seed):
    "Sentences of 1 to 12 words from a vocabulary of about 700 words with Zipf's law."
    rng = np.random.default_rng(seed)
    names = np.array([a + b + c for a in 'bcdfghjlm' for b in 'aeiou' for c in 'bcdfghjklmnpqrst'])
    return [' '.join(names[np.minimum(rng.zipf(1.3, rng.integers(1, 13)), len(names) - 1)]) for _ in range(n)]


@njit
def scores_along(lm, begin, end, words, starts):
    "log10 probabilities of the words of sentences and of `</s>`."
    out = np.empty(len(words) + len(starts) - 1, np.float32)
    n = 0
    for i in range(len(starts) - 1):
        state = begin
        for k in range(starts[i], starts[i + 1]):
            out[n], state = step(lm, state, words[k])
            n += 1
        out[n], _ = step(lm, state, end)
        n += 1
    return out


def compare(automaton, lm, sentences):
    "Largest difference of log10 probabilities, and their number."
    words = [s.split() for s in sentences]
    starts = np.cumsum([0, *map(len, words)])
    ids = automaton.ids([w for ws in words for w in ws])
    ours = scores_along(automaton.arrays, automaton.begin, automaton.end, ids, starts)
    theirs = np.fromiter((score for s in sentences for score, _, _ in lm._full_scores(s)), np.float32, len(ours))
    return np.abs(ours - theirs).max(), len(ours)


@pytest.fixture(scope='module')
def model(tmp_path_factory):
    text = zipf_text(30_000, 0)
    path = tmp_path_factory.mktemp('lm')/'lm.arpa'
    return text, build_ngram(text, path, order=4, prune=(0, 0, 1))


def test_a_million_queries(model):
    text, path = model
    rng = np.random.default_rng(1)
    automaton = Automaton.load(path)
    mixed_up = [' '.join(rng.permutation((a + ' ' + b).split())) for a, b in zip(text, text[1:])]
    seen = text + mixed_up # n-grams of the model, and other n-grams of the same words
    new = zipf_text(60_000, 2) + ['unknown ' + s + ' words of others' for s in text[:2000]]
    worst, n = compare(automaton, NGram.load(path), seen + new)
    assert n > 1_000_000 and worst < 1e-5


def test_words_one_by_one(tmp_path):
    "Word scores and unknown words agree with KenLM, also for a model in capitals and for an empty text."
    unigrams(tmp_path/'lm.arpa', ['<unk>', '<s>', '</s>', 'THE', 'YES', 'NO', "IT'S"])
    (tmp_path/'gaps.arpa').write_text(model_with_gaps())
    texts_of = {'lm.arpa': ["the dog it's", 'x'], 'gaps.arpa': ['a b c b', 'a x <unk>']}
    for name, sentences in texts_of.items():
        models = Automaton.load(tmp_path/name), NGram.load(tmp_path/name)
        for s in (*sentences, ''):
            (ours, our_unknown), (theirs, their_unknown) = (m.word_scores(s) for m in models)
            np.testing.assert_allclose(ours, theirs, atol=1e-5)
            assert our_unknown.tolist() == their_unknown.tolist() and len(ours) == len(s.split()) + 1
        texts = {'all': sentences, 'none': []}
        pd.testing.assert_frame_equal(*(perplexity_report(m, texts) for m in models), rtol=1e-5)


def test_states_merge_histories_as_kenlm_does(model):
    "There are as many states as KenLM distinguishes, so the search recombines equally often."
    import kenlm
    text, path = model
    automaton = Automaton.load(path)
    lm = load_kenlm(path)
    pairs = set()
    for s in text[:3000]:
        ours = automaton.begin
        before = kenlm.State()
        lm.BeginSentenceWrite(before)
        for word, w in zip(s.split(), automaton.ids(s.split())):
            after = kenlm.State()
            lm.BaseScore(before, word, after)
            before = after
            _, ours = step(automaton.arrays, ours, w)
            pairs.add((ours, before))
    assert len(pairs) == len({o for o, _ in pairs}) == len({k for _, k in pairs}) > 1000


def model_with_gaps():
    """A pruned model without <unk>, some backoffs, and some suffixes of its n-grams.

    One backoff weight is above 1."""
    pairs = ['<s> a\t-0.1', 'a c\t0.05', 'c b\t-0.7', *(f'{x} {y}\t-0.2' for x in 'bdef' for y in 'acdef')]
    head = ['\\data\\', 'ngram 1=8', f'ngram 2={len(pairs)}', 'ngram 3=3']
    unigrams = ['-99\t<s>\t-0.5', '-1.0\t</s>', '-0.9\ta\t-0.25', '-1.1\tb', '-2e0\tc\t-0.125',
                *(f'-1.{i}\t{w}\t-0.{i}' for i, w in enumerate('def', 1))]
    bigrams = [f'-0.{i % 7 + 3}\t{p}' for i, p in enumerate(pairs)]
    trigrams = ['-0.01\t<s> a b', '-0.02\ta c a', '-0.5\tb c b']
    return '\n'.join([*head, '', '\\1-grams:', *unigrams, '', '\\2-grams:', *bigrams, '', '\\3-grams:', *trigrams, '',
                      '\\end\\', ''])


def test_pruned_files(tmp_path):
    (tmp_path/'lm.arpa').write_text(model_with_gaps())
    with gzip.open(tmp_path/'lm.arpa.gz', 'wt') as f: f.write(model_with_gaps())
    lm = NGram.load(tmp_path/'lm.arpa')
    rng = np.random.default_rng(0)
    sentences = [' '.join(rng.choice(['a', 'b', 'c', 'd', 'x'], rng.integers(0, 7))) for _ in range(2000)]
    for name in ('lm.arpa', 'lm.arpa.gz'): assert compare(Automaton.load(tmp_path/name), lm, sentences)[0] < 1e-5
    assert Automaton.load(tmp_path/'lm.arpa').score('x', eos=False) == pytest.approx(-100.5*math.log(10), abs=1e-3)


@pytest.mark.parametrize('order', [1, 2, 6])
def test_orders(order, tmp_path):
    text = zipf_text(300, 3)
    path = build_ngram(text, tmp_path/'lm.arpa', order=order)
    assert compare(Automaton.load(path), NGram.load(path), text + zipf_text(300, 4))[0] < 1e-5


class Cached(Automaton): MIN_CACHED_BYTES = 0


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    "The user's cache, for arrays that cannot be stored next to their model."
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path/'cache'))
    return tmp_path/'cache'/'b2t_kaggle'/'automata'


@pytest.fixture
def cached(model, tmp_path):
    "Cached arrays next to a copy of the model."
    path = tmp_path/'lm.arpa'
    path.write_bytes(model[1].read_bytes())
    Cached.load(path)
    return tmp_path/'lm.arpa.automaton'


def test_cached_files(cached, tmp_path):
    "Cached arrays are used while the file's content stays the same, and rebuilt if it changes or they are damaged."
    path = tmp_path/'lm.arpa'
    written = cached.stat().st_mtime_ns
    os.utime(path, (0, 0))
    Cached.load(path)
    assert cached.stat().st_mtime_ns == written
    build_ngram(['a b'], path, order=2)
    assert Cached.load(path).order == 2 and cached.stat().st_mtime_ns != written
    whole = cached.read_bytes()
    for damage in (b'', b'{}\n', whole[:-1], b'[]\n', b'['*70_000):
        cached.write_bytes(damage)
        assert Cached.load(path).order == 2 and cached.read_bytes() == whole


def test_each_damaged_byte_is_detected(model, cached, tmp_path):
    "If any byte of the cached arrays is changed, scores stay the same and the cache is rewritten."
    path = tmp_path/'lm.arpa'
    expected = [Cached.load(path).score(s) for s in model[0][:20]]
    whole = cached.read_bytes()
    rng = np.random.default_rng(0)
    first_line = whole.index(b'\n')
    for at in (0, first_line - 70, first_line, len(whole) - 1, *rng.integers(0, len(whole), 4)):
        cached.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << rng.integers(8)]) + whole[at + 1:])
        assert [Cached.load(path).score(s) for s in model[0][:20]] == expected and cached.read_bytes() == whole


def test_arrays_of_another_user_are_not_used(model, cached, tmp_path):
    "Without this user's secret, a cache file cannot have the right checksum."
    path = tmp_path/'lm.arpa'
    expected = Cached.load(path).score(model[0][0])
    whole = cached.read_bytes()
    facts, arrays = automaton._build(path)
    arrays['first']['next'].fill(2**31 - 1)
    automaton._write_cache(cached, bytes(32), facts, arrays)
    assert cached.read_bytes() != whole
    assert Cached.load(path).score(model[0][0]) == expected and cached.read_bytes() == whole


def test_a_pipe_next_to_a_model_does_not_block(cache, tmp_path):
    path = build_ngram(['a b'], tmp_path/'lm.arpa', order=2)
    os.mkfifo(tmp_path/'lm.arpa.automaton')
    assert Cached.load(path).order == 2 and len(list(cache.iterdir())) == 1


def test_folders_that_cannot_be_written_to(cache, tmp_path, monkeypatch):
    "For models in read-only folders, the user's cache stores the arrays, separately for each file."
    write_cache = automaton._write_cache
    build = automaton._build
    built = []
    def read_only(place, *rest):
        if place.parent != cache: raise OSError(errno.EROFS, 'Read-only file system')
        write_cache(place, *rest)
    monkeypatch.setattr(automaton, '_write_cache', read_only) # Patched, because root may write to any folder
    monkeypatch.setattr(automaton, '_build', lambda path: built.append(path) or build(path))
    paths = [tmp_path/name/'lm.arpa' for name in 'ab']
    for path, text in zip(paths, (['a b'], ['a b', 'c'])):
        path.parent.mkdir()
        build_ngram(text, path, order=2)
    scores = [[Cached.load(path).score('a b') for path in paths] for _ in range(3)]
    assert built == paths and scores[0] == scores[1] == scores[2] and scores[0][0] != scores[0][1]
    assert [sorted(path.parent.iterdir()) for path in paths] == [[path] for path in paths]
    assert len(list(cache.iterdir())) == 2


def test_full_disks(model, tmp_path, monkeypatch):
    "If the arrays cannot be cached, the model is loaded anyway, with one warning and without partial files."
    path = tmp_path/'lm.arpa'
    path.write_bytes(model[1].read_bytes())
    monkeypatch.setattr(sys, 'dont_write_bytecode', True) # Compiled modules would also be truncated
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1])) # Files cannot grow beyond 64 kB
    try:
        with pytest.warns(UserWarning, match='its arrays are not cached') as warned: found = Cached.load(path)
    finally: resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(warned) == 1 and found.score(model[0][0]) == Automaton.load(path).score(model[0][0])
    assert [p.name for p in tmp_path.rglob('*') if p.is_file()] in (['lm.arpa', 'automata'], ['automata', 'lm.arpa'])


def unigrams(path, words):
    "Write a unigram model whose words differ in probability."
    ids = np.arange(len(words))
    write_arpa(path, words, [len(words)], [Grams(ids[:, None], -1 - ids/8, np.zeros(len(words)))])
    return path


@pytest.mark.parametrize('words', [
    ['THE', 'YES', 'NO', 'yes', 'McX', "IT'S"], ['the', 'of', 'YES', 'Mcx'], ['THE', 'the'], ['NAÏVE', 'IN'],
    ['x', 'X'],
])
@pytest.mark.parametrize('unknown', ['<unk>', '<UNK>'])
def test_capitals(words, unknown, tmp_path):
    "KenLM, automaton and reader detect the same models in capitals, and agree about each word."
    path = unigrams(tmp_path/'lm.arpa', [unknown, '<s>', '</s>', *words])
    lm = NGram.load(path)
    ours = Automaton.load(path)
    read = read_arpa(path)
    probabilities = dict(zip(read.words, read.grams[0].log_prob))
    for w in ('the', 'yes', 'no', 'of', 'in', "it's", 'mcx', 'naïve', 'x', 'else'):
        expected = lm.score(w, False, False)
        assert ours.score(w, False, False) == pytest.approx(expected, abs=1e-5)
        assert (w in ours) == (w in lm) == (w in probabilities)
        assert math.log(10)*probabilities.get(w, -1) == pytest.approx(expected, abs=1e-5)
    assert len(set(read.words)) == len(read.words) == len(words) + 3


def test_other_encodings(tmp_path):
    "Words that are not UTF-8 are scored like others, written unchanged, and can be quoted in errors."
    path = tmp_path/'lm.arpa'
    other = tmp_path/'other.arpa'
    path.write_bytes(re.sub(rb'(?<=[\t ])a(?=[\t\n ])', b'na\xefve', model_with_gaps().encode()))
    lm = NGram.load(path)
    same = Automaton.load(path)
    for s in ('b c', 'f d', 'x', 'c b'): assert same.score(s) == pytest.approx(lm.score(s), abs=1e-5)
    assert b'na\xefve'.decode(errors='surrogateescape') in same
    model = read_arpa(path)
    write_arpa(other, model.words, list(map(len, (g.ids for g in model.grams))), model.grams)
    assert other.read_bytes().count(b'na\xefve') == path.read_bytes().count(b'na\xefve') > 5
    path.write_bytes(path.read_bytes().replace(b'\t<s> na\xefve\t', b'\tna\xefve c\t', 1))
    with pytest.raises(ArpaError, match=r"line \d+: found 'na\ufffdve c' a second time"): Automaton.load(path)


def test_both_spellings_of_unk(tmp_path):
    path = unigrams(tmp_path/'lm.arpa', ['<unk>', '<UNK>', '<s>', '</s>', 'a'])
    with pytest.raises(ArpaError, match='<unk> and <UNK>'): Automaton.load(path)


def test_words_that_are_in_no_model(tmp_path):
    lm = Automaton.load(unigrams(tmp_path/'lm.arpa', ['<unk>', '<s>', '</s>', 'Haus', 'Hof']))
    check_words(lm, ['maus', 'hof'])
    message = "lm.arpa: knows none of the 2 words to be decoded, such as 'house'; give"
    with pytest.raises(ValueError, match=message): check_words(lm, ['house', 'yard'])


@pytest.mark.skipif(not Path('/proc/self/smaps').exists(), reason='needs /proc/self/smaps')
def test_binaries_stay_on_disk(model, tmp_path):
    "Before queries, only the header of a KenLM binary is in memory; with KenLM's defaults, the whole file is."
    import kenlm
    def resident(path):
        kb = 0
        ours = False
        for line in open('/proc/self/smaps'):
            if not line.split()[0].endswith(':'): ours = line.rstrip().endswith(str(path))
            elif ours and line.startswith('Rss:'): kb += int(line.split()[1])
        return 1024*kb/path.stat().st_size
    paths = [kenlm_binary(model[1], tmp_path/f'{name}.bin', 'probing') for name in ('ours', 'all')]
    models = load_kenlm(paths[0]), kenlm.Model(str(paths[1]))
    assert 0 < resident(paths[0]) < 0.5 < resident(paths[1]) and models[0].order == models[1].order


def test_large_ids_do_not_collide():
    "Keys combine state and word without collisions, however large both are."
    rng = np.random.default_rng(0)
    table = automaton.empty_table(3000)
    keys = {(int(s) << 32) | int(w) for s, w in rng.integers(0, 2**31 - 1, (3000, 2))}
    for k in keys: table[find(table, k)]['key'] = k
    assert all(table[find(table, k)]['key'] == k for k in keys)
    assert all(table[find(table, k ^ 1)]['key'] == -1 for k in keys if k ^ 1 not in keys)
