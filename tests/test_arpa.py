"ARPA files: reading restores what was written, in pieces of any size; damaged files raise an error with the line."
import bz2
import gzip
import lzma
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from b2t_kaggle.lm.arpa import ArpaError, ArpaReader, Grams, open_text, read_arpa, read_counts, write_arpa
from b2t_kaggle.lm.automaton import load_ngram
from b2t_kaggle.lm.backoff import prune_ngram
from b2t_kaggle.lm.corpus import read_sentences
from b2t_kaggle.lm.ngram import NGram, model_report

WORDS = ['<unk>', '<s>', '</s>', 'a', "it's", 'naïve', '1,000', '-1.5', '\u00a0']


@st.composite
def models(draw):
    "A model of any order whose sections may be empty, with numbers that float32 represents."
    order = draw(st.integers(2, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    sizes = [len(WORDS), *(draw(st.integers(0, 12)) for _ in range(order - 1))]
    ids = [np.arange(len(WORDS))[:, None], *(rng.integers(0, len(WORDS), (m, n)) for n, m in enumerate(sizes[1:], 2))]
    grams = []
    for n, i in enumerate(ids, 1):
        log_prob = -rng.exponential(2, len(i)).astype(np.float32)
        grams.append(Grams(i, log_prob, rng.normal(size=len(i)).astype(np.float32)*(n < order)))
    return grams


@settings(max_examples=40)
@given(models(), st.integers(1, 9), st.booleans(), st.booleans())
def test_round_trip(tmp_path_factory, grams, size, gz, sparse):
    path = tmp_path_factory.mktemp('arpa')/('lm.arpa.gz' if gz else 'lm.arpa')
    parts = [Grams(*(x[i:i + size] for x in g)) for g in grams for i in range(0, len(g.ids), size)]
    write_arpa(path, WORDS, [len(g.ids) for g in grams], parts)
    if sparse and not gz: # Like SRILM, which omits backoffs of 0
        lines = path.read_text().splitlines()
        lines = [x.rsplit('\t', 1)[0] if x.count('\t') == 2 and i % 2 else x for i, x in enumerate(lines)]
        path.write_text('\n'.join(lines) + '\n')
    read = read_arpa(path)
    assert read.words == WORDS and read_counts(path) == [len(g.ids) for g in grams]
    pieces = list(ArpaReader(path, size))
    assert all(len(p.ids) <= size for p in pieces)
    for n, (wrote, got) in enumerate(zip(grams, read.grams), 1):
        np.testing.assert_array_equal(got.ids, wrote.ids)
        np.testing.assert_allclose(got.log_prob, wrote.log_prob, rtol=1e-6)
        kept = np.isclose(got.backoff, wrote.backoff, rtol=1e-5)
        assert kept.all() or sparse and (got.backoff[~kept] == 0).all()
        of_order = [p.ids for p in pieces if p.ids.shape[1] == n]
        np.testing.assert_array_equal(np.concatenate(of_order or [got.ids]), got.ids)


@settings(max_examples=150)
@given(models(), st.integers(0, 10**6), st.binary(min_size=0, max_size=3), st.integers(0, 3), st.booleans())
def test_damage_is_named_or_harmless(tmp_path_factory, grams, at, new, old, gz):
    """Replace, insert or delete bytes anywhere: the file can still be read, or `ArpaError` names file and line.

    If a compressed file cannot be unpacked, the error names the file and its kind."""
    path = tmp_path_factory.mktemp('arpa')/('lm.arpa.gz' if gz else 'lm.arpa')
    write_arpa(path, WORDS, [len(g.ids) for g in grams], grams)
    data = path.read_bytes()
    at %= len(data)
    path.write_bytes(data[:at] + new + data[at + old:])
    try: read_arpa(path)
    except ArpaError as e:
        found = 'line |damaged or cut-off (gzip|bzip2|xz) file'
        assert str(path) in str(e) and re.search(found, str(e))


@pytest.mark.parametrize('size', [3, 4, 5, 100])
def test_errors_name_the_line_at_any_position_in_a_piece(size, tmp_path):
    n = 20
    rng = np.random.default_rng(0)
    path = tmp_path/'lm.arpa'
    ids = np.arange(len(WORDS))[:, None], rng.integers(0, len(WORDS), (n, 2))
    write_arpa(path, WORDS, [len(WORDS), n], [Grams(i, -np.ones(len(i)), np.zeros(len(i))) for i in ids])
    lines = path.read_text().splitlines()
    for i in (6, 8, 14, 17, len(lines) - 3, len(lines) - 2):
        assert '\t' in lines[i - 1]
        path.write_text('\n'.join([*lines[:i - 1], 'x' + lines[i - 1], *lines[i:]]) + '\n')
        with pytest.raises(ArpaError, match=f'line {i}: found .x-1'): list(ArpaReader(path, size))


def test_only_whole_files_are_written(tmp_path):
    path = tmp_path/'lm.arpa'
    path.write_text('precious')
    g = Grams(np.arange(2)[:, None], -np.ones(2), np.zeros(2))
    with pytest.raises(ValueError, match='expected'): write_arpa(path, WORDS, [3, 0], [g])
    assert path.read_text() == 'precious' and len(list(tmp_path.iterdir())) == 1


def test_cut_gzip(tmp_path):
    unigrams = b''.join(b'-1\tw%d\t0\n' % i for i in range(5000))
    whole = gzip.compress(b'\\data\\\nngram 1=99999\n\n\\1-grams:\n' + unigrams)
    (tmp_path/'cut.arpa.gz').write_bytes(whole[:len(whole)//2])
    with pytest.raises(ArpaError, match='cut.arpa.gz: damaged or cut-off gzip file'): read_arpa(tmp_path/'cut.arpa.gz')
    (tmp_path/'cut.arpa.gz').write_bytes(whole[:12])
    with pytest.raises(ArpaError, match='cut.arpa.gz: damaged or cut-off gzip'): read_counts(tmp_path/'cut.arpa.gz')


# --- variants found in practice

USUAL = """\\data\\
ngram 1=5
ngram 2=2
ngram 3=1

\\1-grams:
-0.77\t</s>
-99\t<s>\t-0.22
-1.47\tgo\t-0.22
-1.47\tleft\t-0.22
-2\t<unk>

\\2-grams:
-0.3\t<s> go\t-0.1
-0.3\tgo left

\\3-grams:
-0.2\t<s> go left

\\end\\
"""
FORMS = { # Variants of the same model
    'as it is': USUAL,
    'heading': 'Made by a tool on some day\n\nngram models, see \\data\\ below\n' + USUAL,
    'byte order mark': '\ufeff' + USUAL,
    'both': '\ufeffTitle\n' + USUAL,
    'minus infinity': USUAL.replace('-99', '-inf'), 'in capitals': USUAL.replace('-99', '-INF'),
    'in full': USUAL.replace('-99', '-Infinity'), 'of Windows': USUAL.replace('-99', '-1.#INF'),
    'ends of lines': USUAL.replace('\n', '\r\n'),
    'heading and ends of lines': 'Title\r\n' + USUAL.replace('\n', '\r\n'),
    'spaces': USUAL.replace('\t', '  '), 'tabs in n-grams': USUAL.replace('go left', 'go\tleft'),
    'spaces in the head': USUAL.replace('ngram 1=5', ' ngram\t1 =  5'),
    'no end': USUAL.replace('\\end\\\n', ''), 'no last lines': USUAL.replace('\n\\end\\\n', ''),
    'marks in capitals': USUAL.replace('<s>', '<S>').replace('</s>', '</S>').replace('<unk>', '<UNK>'),
    'comments': '# of\n' + USUAL.replace('ngram 2', '# counts\nngram 2').replace('\\2-grams', '# two words\n\\2-grams'),
    'a section that is counted 0': USUAL.replace('ngram 3=1\n', 'ngram 3=1\nngram 4=0\n'),
}


@pytest.mark.parametrize('form', FORMS)
@pytest.mark.parametrize('pack', [bytes, gzip.compress, bz2.compress, lzma.compress])
def test_forms_of_a_model(form, pack, tmp_path):
    "The first bytes determine the compression, whatever the file name."
    path = tmp_path/('lm.arpa' if pack is not bytes else 'lm.arpa.gz')
    path.write_bytes(pack(FORMS[form].encode()))
    (tmp_path/'usual.arpa').write_text(USUAL)
    lm, usual = load_ngram(path), load_ngram(tmp_path/'usual.arpa')
    for s in ('go left', 'left go', 'go', 'left left else'): assert lm.score(s) == usual.score(s)
    assert usual.score('go left') == pytest.approx(np.log(10)*(-.3 - .2 - .22 - .77), abs=1e-4)
    assert read_counts(path)[:3] == [5, 2, 1] and read_arpa(path).words == read_arpa(tmp_path/'usual.arpa').words
    assert model_report([path])['1-grams'].tolist() == [5]


def test_a_compressed_model_is_pruned(tmp_path):
    path = tmp_path/'model'
    path.write_bytes(gzip.compress(FORMS['both'].replace('-99', '-inf').encode()))
    (tmp_path/'usual.arpa').write_text(USUAL)
    for name in ('model', 'usual.arpa'): prune_ngram(tmp_path/name, tmp_path/f'{name}.out', 0)
    assert (tmp_path/'model.out').read_bytes() == (tmp_path/'usual.arpa.out').read_bytes()


def test_models_are_rewritten_for_kenlm(tmp_path):
    pytest.importorskip('kenlm')
    path = tmp_path/'lm.arpa'
    path.write_text(FORMS['heading'])
    with pytest.raises(ValueError, match='lm.arpa: an ARPA file that KenLM refuses .* -o NEW.arpa'): NGram.load(path)
    prune_ngram(path, tmp_path/'new.arpa', 0)
    assert NGram.load(tmp_path/'new.arpa').order == 3


@pytest.mark.parametrize('content, message', [
    (USUAL.replace('ngram 1=5', 'ngram 1=4'), r'line 11: the section of 1-grams has more .* correct the header'),
    (USUAL.replace('ngram 1=5', 'ngram 1=6'), r'line 12: the section of 1-grams has 5 entries, expected 6 as in the'),
    (USUAL.replace('ngram 3=1', 'ngram 3=2'), r'3-grams has 1 entries, expected 2'),
    (USUAL.replace('-0.77', 'nan'), r'line 7: found nan, expected a finite number'),
    (USUAL.replace('-0.77', 'inf'), r'line 7: found inf, expected a finite number'),
    (USUAL.replace('\\data\\', ''), r"line 1: found 'ngram 1=5', expected .data. within .* ARPA format"),
    ('x'*100 + '\n' + 'words of a text\n'*10_000 + USUAL, r"line 1: found 'x+', expected .data. within"),
    (USUAL[:USUAL.index('ngram')], r'expected ngram 1=COUNT'), ('', r'expected .data.'),
    (USUAL[:USUAL.index('\\2-grams')], r'the file ends here, expected .2-grams:; it is cut off'),
    (USUAL[:USUAL.index('-0.3\tgo left')], r'the file ends here, expected 2 2-grams, .* it is cut off'),
    (USUAL[:USUAL.index(' left\n\n\\end')] + ' lef', r"the word 'lef'"),
    (USUAL[:USUAL.index('\n\n\\end')], r'the file ends here, expected .end.; it is cut off'),
    (USUAL.replace('\\end', 'more'), r'the section of 3-grams has more than 1 entries'),
    (USUAL.encode('utf-16'), r'line 1: found .*expected .data.'),
    (b'PK\x03\x04' + bytes(100), r'line 1: found .PK.*expected .data.'),
    (b'\x28\xb5\x2f\xfd' + bytes(100), r'line 1: found .*expected .data.'),
    (USUAL.replace('left\t', 'go\t'), r"line 10: the word 'go' has two unigrams"),
    (bytes(1000), r'expected .data.'),
    (gzip.compress(USUAL.encode())[:-20], r'lm.arpa: damaged or cut-off gzip file .* fetch or write it again'),
    (bz2.compress(USUAL.encode())[:-20], r'lm.arpa: damaged or cut-off bzip2 file'),
    (lzma.compress(USUAL.encode())[:-20], r'lm.arpa: damaged or cut-off xz file'),
    (USUAL.replace('ngram 1=5', 'ngram 1=6').replace('-2\t<unk>', '-2\t<S>\n-2\t<unk>'), r'found <s> and <S>, which'),
])
def test_refused_files(content, message, tmp_path):
    path = tmp_path/'lm.arpa'
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ArpaError, match=message) as e: load_ngram(path)
    assert str(path) in str(e.value) and '\n' not in str(e.value)


@pytest.mark.parametrize('pack, kind', [(gzip, 'gzip'), (bz2, 'bzip2'), (lzma, 'xz')])
def test_compressed_texts(pack, kind, tmp_path):
    path = tmp_path/'text.txt'
    path.write_bytes(pack.compress('\ufeffHow are you?\nFine.\n'.encode()))
    assert list(read_sentences(path)) == ['how are you', 'fine']
    path.write_bytes(path.read_bytes()[:-6])
    with pytest.raises(ValueError, match=f'text.txt: damaged or cut-off {kind} file'): list(read_sentences(path))
    with open_text(tmp_path/'new.txt', 'wt') as f: f.write('plain')
    assert (tmp_path/'new.txt').read_bytes() == b'plain'
