"Two commands turn log-probabilities of another program into sentences, error rates and a CSV."
import os
import pickle
import zipfile

import numpy as np
import pytest
from click.testing import CliRunner

from b2t_kaggle.cli import main
from b2t_kaggle.data.simulate import simulate_dataset
from b2t_kaggle.data.store import TrialStore
from b2t_kaggle.lm.ngram import build_ngram
from b2t_kaggle.logits import LogitError, LogitStore
from b2t_kaggle.phonemes import PHONEMES
from b2t_kaggle.pipeline.foreign_logits import ORDERS, import_logits, normalised, read_trials


def frames(ids, order, rng):
    "Probabilities [T', 41] that spell a trial's phonemes, with the classes in some order."
    scores = 7.*np.eye(41)[[k for i in ids for k in (i, 0)]] + rng.random((2*len(ids), 41))
    probs = np.exp(scores)/np.exp(scores).sum(1, keepdims=True)
    return probs[:, [PHONEMES.index(name) for name in ORDERS[order]]]


@pytest.fixture(scope='module')
def data(tmp_path_factory):
    d = tmp_path_factory.mktemp('foreign')
    simulate_dataset(d/'sessions', n_sessions=2, train=20, val=6, test=3, max_words=4, lm_sentences=200)
    val = TrialStore.build(d/'sessions', 'val', d/'val.arrow', progress=False)
    test = TrialStore.build(d/'sessions', 'test', d/'test.arrow', progress=False)
    rng = np.random.default_rng(0)
    rows = [frames(val.class_ids(i), 'blank-last', rng) for i in range(len(val))]
    np.savez(d/'val.npz', *rows)
    padded = np.zeros((len(test), 1, 40, 41), np.float32)
    for i in range(len(test)):
        padded[i, 0] = np.log(frames(val.class_ids(i)[:20], 'blank-last', rng).repeat(4, 0)[:40])
    (d/'test.pkl').write_bytes(pickle.dumps(dict(logits=list(padded), adjusted_len=[40]*len(test))))
    build_ngram(val.index.sentence.tolist(), d/'own.arpa', order=2)
    return d


def b2t(*args): return CliRunner().invoke(main, list(map(str, args)), catch_exceptions=False)


def test_two_commands_lead_to_sentences_error_rates_and_a_csv(data):
    where = ['--name', 'mine', '--out', data/'runs', '--work', data/'work']
    made = b2t('import-logits', data/'val.npz', data/'test.pkl', '--classes', 'blank-last', '--data',
               data/'sessions', *where)
    assert made.exit_code == 0 and '6 trials of val' in made.output, made.output
    done = b2t('run', *where, '--set', f'lm.path={data/"own.arpa"}')
    assert done.exit_code == 0 and 'WER 0.0 %' in done.output, done.output
    assert len((data/'runs/mine/submission.csv').read_text().splitlines()) == 4


def test_two_files_of_one_split_are_refused(data):
    made = b2t('import-logits', data/'val.npz', data/'val.npz', '--data', data/'sessions', '--name', 'twice')
    assert made.exit_code == 2 and 'found 2 files for val, expected one of each split' in made.output


def test_another_order_of_the_classes_is_named(data):
    made = b2t('import-logits', data/'val.npz', '--data', data/'sessions', '--name', 'other', '--out', data/'runs',
               '--work', data/'work')
    assert made.exit_code == 1 and 'the classes seem to be in the order blank-last' in made.output


def test_a_run_names_another_order_of_the_classes(data):
    given = LogitStore.write(data/'given_val.arrow', [normalised(t.logits, 'val') for t in read_trials(data/'val.npz')],
                             TrialStore.open(data/'val.arrow').index, {})
    b2t('ensemble', given.path, '--data', data/'sessions', '--name', 'wrong', '--out', data/'runs', '--work',
        data/'work')
    logs = [p.read_text() for p in (data/'runs/wrong/notebooks').glob('*ensemble*.ipynb')]
    assert 'seem to be in the order blank-last' in logs[0]


@pytest.mark.parametrize('method', [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_damaged_archives_are_refused_in_one_line(method, tmp_path):
    """With flipped bits, encrypted members or an unknown compression, one line names the file, or the arrays are
    unchanged."""
    rng = np.random.default_rng(method)
    arrays = [rng.normal(size=(9, 41)) for _ in range(3)]
    with zipfile.ZipFile(tmp_path/'good.npz', 'w', method) as archive:
        for i, x in enumerate(arrays):
            with archive.open(f't{i}.npy', 'w') as f: np.save(f, x)
    good = (tmp_path/'good.npz').read_bytes()
    table = good.index(b'PK\1\2')
    places = [*((int(i), 255) for i in rng.integers(len(good), size=30)), (table + 8, 1), (table + 10, 99)]
    for at, flipped in places:
        content = bytearray(good)
        content[at] ^= flipped
        if at > table and flipped != 255: content[at - table - 2] ^= flipped # The header has the same values
        (tmp_path/'x.npz').write_bytes(content)
        try: trials = read_trials(tmp_path/'x.npz')
        except LogitError as e: assert str(e).startswith(f'{tmp_path}/x.npz: ') and '\n' not in str(e)
        else: assert all((t.logits == x).all() for t, x in zip(trials, arrays, strict=True))


@pytest.mark.parametrize('name, content', [
    ('frame.pkl', b'\x80\4\x95' + b'\xff'*8), ('bytes.pkl', b'\x80\4\x8e' + b'\xff'*8), ('persistent.pkl', b'Pa\n.'),
    ('deep.npy', b'\x93NUMPY\2\0\x10\x27\0\0' + b'('*10_000)])
def test_other_errors_of_readers_are_one_line(name, content, tmp_path):
    (tmp_path/name).write_bytes(content)
    with pytest.raises(LogitError, match=f'^{tmp_path}/{name}: [^\n]*$'): read_trials(tmp_path/name)


def test_a_pipe_is_not_read(tmp_path):
    os.mkfifo(tmp_path/'pipe.npy')
    for path in tmp_path, tmp_path/'pipe.npy':
        with pytest.raises(LogitError, match='found a pipe, socket or device'): read_trials(path)


def test_another_order_of_the_classes_is_detected_without_labels(data):
    test = TrialStore.open(data/'test.arrow')
    with pytest.warns(UserWarning, match='in the order blank-last .*--classes changes the order'):
        import_logits(data/'test.pkl', test.index, data/'given_test.arrow')
    import_logits(data/'test.pkl', test.index, data/'given_test.arrow', 'blank-last')
