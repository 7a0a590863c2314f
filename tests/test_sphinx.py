"""CMU Sphinx's language models: files of a slow bit-by-bit writer are read back, damaged files are refused, and the
stage `lm` mixes in a general model."""
import math
import os
import zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sphinx_writer import sphinx_file

from b2t_kaggle.config import Config
from b2t_kaggle.lm.arpa import read_arpa
from b2t_kaggle.lm.interpolate import mix_general
from b2t_kaggle.lm.ngram import build_ngram
from b2t_kaggle.lm.sphinx import SphinxError, import_sphinx, read_sphinx
from b2t_kaggle.pipeline.stages.lm import LM

pytestmark = pytest.mark.filterwarnings('ignore:.*too little text')

WORDS = ['<s>', '</s>', *'abcdefghij']
GRAMS = [
    {'</s>': (-.7, 0), '<s>': (-99, -.2), 'a': (-.8, -.3), 'b': (-.9, -.1)},
    {'<s> a': (-.25, -.05), 'a b': (-.4, .02), 'b </s>': (-.3, 0)},
    {'<s> a b': (-.15, 0), 'a b </s>': (-.1, 0)},
]


def as_dict(arpa):
    "n-grams per order, with log10 probability and backoff."
    return [{' '.join(arpa.words[i] for i in ids): (p, b) for ids, p, b in zip(*map(np.ndarray.tolist, g))}
            for g in arpa.grams]


@st.composite
def models(draw):
    "n-grams of 2 to 4 orders with all their suffixes, as in every trie."
    number = st.floats(-3, -.01).map(lambda x: round(x, 3))
    words = WORDS[:draw(st.integers(3, len(WORDS)))]
    orders = [{w: (draw(number), draw(number)) for w in words}]
    for _ in range(draw(st.integers(1, 3))):
        longer = sorted(f'{w} {gram}' for gram in orders[-1] for w in words)
        chosen = draw(st.lists(st.sampled_from(longer), unique=True, max_size=12)) if longer else []
        orders.append({gram: (draw(number), draw(number)) for gram in chosen})
    orders[-1] = {gram: (p, 0) for gram, (p, _) in orders[-1].items()}
    return orders


@settings(max_examples=12, deadline=None)
@given(models(), st.integers(0, 3), st.randoms())
def test_reads_what_was_written(tmp_path_factory, grams, spare, rng):
    path = tmp_path_factory.mktemp('sphinx')/'x.lm.bin'
    spare *= len(grams) > 2
    words = rng.sample(list(grams[0]), len(grams[0]))
    path.write_bytes(sphinx_file(grams, words, spare))
    model = read_sphinx(path)
    assert model.arpa.words[:-1] == words and model.arpa.words[-1] == '<unk>'
    assert model.licence is None
    found = as_dict(model.arpa)
    del found[0]['<unk>']
    for level, expected in zip(found, grams, strict=True):
        assert level.keys() == expected.keys()
        for gram, numbers in level.items(): assert numbers == pytest.approx(expected[gram], abs=1e-5), gram


def test_ngrams_of_left_out_words_are_left_out(tmp_path):
    words = {'<s>': (-99, 0), '</s>': (-1, 0), 'a': (-1, 0), 'A.': (-1.5, 0), "H.'S": (-2, 0), 'READ(2)': (-2, 0),
             'read': (-1, 0), '42': (-2, 0)}
    pairs = dict.fromkeys(["<s> H.'S", "A. H.'S", 'a READ(2)', 'a read', 'read 42', "H.'S read"], (-.5, 0))
    (tmp_path/'x.lm.bin').write_bytes(sphinx_file([words, pairs]))
    import_sphinx(tmp_path/'x.lm.bin', tmp_path/'x.arpa.gz')
    unigrams, bigrams = as_dict(read_arpa(tmp_path/'x.arpa.gz'))
    assert bigrams.keys() == {"<s> h's", 'a read', "h's read"}
    assert sum(10**p for p, _ in unigrams.values()) == pytest.approx(1, abs=1e-5)


def damaged(at, new):
    "The model's file with changed bytes at an offset; a negative offset counts from the end."
    data = bytearray(sphinx_file(GRAMS))
    at %= len(data)
    data[at:at + len(new)] = new
    return bytes(data)


TABLES = 4*65536*3
HEAD = 19 + 1 + 3*4 + 4
UNIGRAMS = HEAD + TABLES
BIGRAMS = UNIGRAMS + 5*12


@pytest.mark.parametrize('data, message', [
    (b'', 'begins with .*, expected .*Trie Language Model'),
    (b'\\data\\\nngram 1=3\n', 'not a trie of CMU Sphinx'),
    (damaged(19, b'\x09'), 'order is 9, expected 2 to 5'),
    (damaged(20, b'\xff\xff\xff\x7f'), 'the file ends within the unigrams'),
    (sphinx_file(GRAMS)[:-12], 'the file ends within the words: found 1 bytes, expected 13'),
    (sphinx_file(GRAMS)[:5000], 'the file ends within the values'),
    (sphinx_file(GRAMS)[:25], 'ends within the head: found 5 bytes, expected 12'),
    (damaged(-1, b'x'), 'found 3 words, expected 4'),
    (damaged(BIGRAMS, b'\x07'), 'a 2-gram has the word number 7, expected less than 4'),
    (damaged(UNIGRAMS + 12 + 8, b'\x09'), 'first children of the 1-grams do not rise'),
    (damaged(UNIGRAMS, b'\0\0\xc0\x7f'), 'a 1-gram has a log-probability above 0 or a number that is not finite'),
    (damaged(UNIGRAMS, b'\0\0\x80\x3f'), 'a 1-gram has a log-probability above 0'),
])
def test_refuses(data, message, tmp_path):
    (tmp_path/'broken.lm.bin').write_bytes(data)
    with pytest.raises(SphinxError, match=f'broken.lm.bin: .*{message}'): read_sphinx(tmp_path/'broken.lm.bin')


def test_refuses_wheels_without_the_model(tmp_path):
    with zipfile.ZipFile(tmp_path/'other.whl', 'w') as archive: archive.writestr('other/__init__.py', '')
    with pytest.raises(SphinxError, match='no en-us.lm.bin among its 1 files'): read_sphinx(tmp_path/'other.whl')
    broken = tmp_path/'broken.whl'
    with zipfile.ZipFile(broken, 'w') as archive: archive.writestr('model/en-us.lm.bin', sphinx_file(GRAMS))
    data = bytearray(broken.read_bytes())
    data[1000:1010] = b'0123456789'
    broken.write_bytes(data)
    with pytest.raises(SphinxError, match='broken.whl: damaged or unreadable zip archive'): read_sphinx(broken)


@pytest.mark.parametrize('offset, value, message', [(8, 1, 'is encrypted'), (10, 99, 'compression method')])
def test_refuses_wheels_that_cannot_be_read(offset, value, message, tmp_path):
    "The one-line error names the file; both headers of the zip member are changed."
    wheel = tmp_path/'odd.whl'
    with zipfile.ZipFile(wheel, 'w') as archive: archive.writestr('model/en-us.lm.bin', sphinx_file(GRAMS))
    data = bytearray(wheel.read_bytes())
    data[data.find(b'PK\1\2') + offset] |= value
    data[offset - 2] |= value
    wheel.write_bytes(data)
    with pytest.raises(SphinxError, match=f'odd.whl: .*{message}'): read_sphinx(wheel)


@pytest.mark.parametrize('method', [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_refuses_a_damaged_wheel_of_any_compression(method, tmp_path):
    wheel = tmp_path/'broken.whl'
    with zipfile.ZipFile(wheel, 'w', method) as archive: archive.writestr('model/en-us.lm.bin', sphinx_file(GRAMS))
    data = wheel.read_bytes()
    wheel.write_bytes(data[:80] + bytes(20) + data[100:])
    with pytest.raises(SphinxError, match='broken.whl: damaged or unreadable zip archive'): read_sphinx(wheel)


def test_refuses_a_model_that_expands_to_too_much(tmp_path):
    wheel = tmp_path/'bomb.whl'
    with zipfile.ZipFile(wheel, 'w', zipfile.ZIP_DEFLATED) as archive, archive.open('model/en-us.lm.bin', 'w') as f:
        for _ in range(65): f.write(bytes(1 << 20))
    with pytest.raises(SphinxError, match='bomb.whl: .*has more than 67,108,864 bytes'): read_sphinx(wheel)


def test_the_installed_package_and_its_licence(tmp_path):
    model = tmp_path/'pocketsphinx'/'model'/'en-us'/'en-us.lm.bin'
    model.parent.mkdir(parents=True)
    model.write_bytes(sphinx_file(GRAMS))
    licence = tmp_path/'pocketsphinx-5.1.1.dist-info'/'licenses'/'LICENSE'
    licence.parent.mkdir(parents=True)
    licence.write_text('Copyright')
    import_sphinx(model, tmp_path/'x.arpa')
    assert (tmp_path/'x.arpa.LICENSE').read_text() == 'Copyright'


def _wheels():
    "The real wheel, from the environment variable or ../shared."
    if path := os.environ.get('B2T_POCKETSPHINX'): return [Path(path)]
    return sorted((Path(__file__).parents[2]/'shared').glob('pocketsphinx-*.whl'))


@pytest.mark.skipif(not _wheels(), reason='the wheel of pocketsphinx is not here; name it in B2T_POCKETSPHINX')
def test_the_english_model():
    "Counts and log-probabilities agree with pocketsphinx, which gives integers to the base 1.0001."
    model = read_sphinx(_wheels()[0])
    assert [len(g.ids) for g in model.arpa.grams] == [72_500, 2_048_918, 1_668_601]
    assert 'Carnegie Mellon University' in model.licence
    number = {w: i for i, w in enumerate(model.arpa.words)}
    for gram, expected in {'matter': -83639, 'glasses to': -38032, 'an aux': -104539, 'see you </s>': -24698,
                           '<s> i': -24463, 'she said just': -60708, '<s> how are': -29542}.items():
        ids = [number[w] for w in gram.split()]
        grams = model.arpa.grams[len(ids) - 1]
        row, = np.flatnonzero((grams.ids == ids).all(axis=1))
        assert grams.log_prob[row]/math.log10(1.0001) == pytest.approx(expected, abs=1.5)


TRAIN = ['we see you', 'we are here', 'you are here', 'i see the house', 'here we are']
VAL = ['we see the house', 'you see us', 'i am here', 'zyx']


def lm_stage(folder, val=VAL, **values):
    "Execute the stage without a run; returns the details of its result."
    tables = {name: pd.DataFrame(dict(sentence=sentences, is_instruction=False))
              for name, sentences in dict(train=TRAIN, val=val).items()}
    cfg = Config(lm=values, data=dict(dataset_dir=folder))
    def trials(split): return SimpleNamespace(index=tables[split])
    run = SimpleNamespace(cfg=cfg, dir=folder, data_dir=folder, trials=trials, texts=list(cfg.lm.texts))
    return LM().run(run, None).details


def test_a_run_without_a_general_model(tmp_path, capsys):
    "The model is built from the transcripts; one line says how many words it lacks and what to do."
    details = lm_stage(tmp_path)
    expected = build_ngram(TRAIN, tmp_path/'expected.arpa', order=3)
    assert (tmp_path/'lm'/'lm.arpa').read_bytes() == expected.read_bytes()
    assert sorted(details['words']) == sorted(set(' '.join(TRAIN).split()))
    line, = (line for line in capsys.readouterr().err.splitlines() if 'cannot be decoded' in line)
    assert line.startswith('27.3 % of the words of val') and 'lm.general=FILE' in line # us, am and zyx of 11


@pytest.mark.parametrize('repeat, note', [(1, 'val has 11 labelled words'), (20, 'Weights tuned on 220 words')])
def test_a_run_with_a_general_model(repeat, note, tmp_path, capsys):
    "The general model is mixed with transcripts and other text; words that only it contains can be decoded."
    grams = [{'<s>': (-99, 0), '</s>': (-.5, 0)} | {w: (-1.2, 0) for w in 'us am see the house qwxz'.split()},
             {'see us': (-.1, 0)}]
    (tmp_path/'general.lm.bin').write_bytes(sphinx_file(grams))
    (tmp_path/'more.txt').write_text('We rest.\nI am at home.\n')
    values = dict(general=tmp_path/'general.lm.bin', texts=[tmp_path/'more.txt'])
    details = lm_stage(tmp_path, VAL*repeat, **values)
    out = capsys.readouterr().out
    assert note in out and 'cannot be decoded' not in out
    fits = details['mixture'].fits
    assert list(fits.index) == ['general', 'transcripts', 'texts', 'mixed']
    assert fits.weight[:3].sum() == pytest.approx(1)
    assert fits.oov_rate['mixed'] == pytest.approx(1/11) # zyx
    assert {'us', 'am', 'rest', 'here'} <= set(details['words']) and 'qwxz' not in details['words']
    assert (fits.weight[:3].nunique() == 1) == (repeat == 1)


def test_real_sentences_fit_the_mixture_better(tmp_path):
    "Perplexity of real sentences; the general model is as good as previously measured."
    shared = Path(__file__).parents[2]/'shared'/'t15'
    if not _wheels(): pytest.skip('the wheel of pocketsphinx is not here; name it in B2T_POCKETSPHINX')
    if not shared.exists(): pytest.skip('../shared/t15 is not beside the repository')
    val = pd.read_json(shared/'phonemes_val.jsonl', lines=True).sentence
    train = pd.read_csv(shared/'train.csv').sentence
    mixture = mix_general(_wheels()[0], dict(transcripts=train), val, tmp_path/'lm.arpa')
    assert mixture.fits.perplexity['general'] == pytest.approx(92, abs=2)
    assert mixture.fits.perplexity['mixed'] < 80 and mixture.fits.oov_rate['mixed'] < .002
