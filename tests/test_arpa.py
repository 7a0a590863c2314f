"ARPA files: what is written is read, in pieces of any size; a damaged file is refused with its line, or read."
import gzip

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from b2t_kaggle.lm.arpa import ArpaError, ArpaReader, Grams, read_arpa, read_counts, write_arpa

WORDS = ['<unk>', '<s>', '</s>', 'a', "it's", 'naïve', '1,000', '-1.5', '\u00a0']


@st.composite
def models(draw):
    "A model of any order whose sections may be empty; numbers as float32 holds them."
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
    if sparse and not gz: # As SRILM writes: some backoffs missing; those that are left out read as 0
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
    """Bytes replaced, put in or cut out anywhere: the file can still be read, or `ArpaError` names file and line.

    For a gzip file that cannot be unpacked it names the file."""
    path = tmp_path_factory.mktemp('arpa')/('lm.arpa.gz' if gz else 'lm.arpa')
    write_arpa(path, WORDS, [len(g.ids) for g in grams], grams)
    data = path.read_bytes()
    at %= len(data)
    path.write_bytes(data[:at] + new + data[at + old:])
    try: read_arpa(path)
    except ArpaError as e: assert str(path) in str(e) and ('line ' in str(e) or 'not a whole gzip file' in str(e))


@pytest.mark.parametrize('size', [3, 4, 5, 100])
def test_line_of_a_fault_at_any_place_in_a_piece(size, tmp_path):
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
    with pytest.raises(ArpaError, match='cut.arpa.gz: not a whole gzip file'): read_arpa(tmp_path/'cut.arpa.gz')
    (tmp_path/'cut.arpa.gz').write_bytes(whole[:12])
    with pytest.raises(ArpaError, match='cut.arpa.gz: not a whole gzip file'): read_counts(tmp_path/'cut.arpa.gz')
