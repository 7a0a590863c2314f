"Log-probabilities of another program become sentences, error rates and a CSV with two commands."
import pickle

import numpy as np
import pytest
from click.testing import CliRunner

from b2t_kaggle.cli import main
from b2t_kaggle.data.simulate import simulate_dataset
from b2t_kaggle.data.store import TrialStore
from b2t_kaggle.lm.ngram import build_ngram
from b2t_kaggle.logits import LogitStore
from b2t_kaggle.phonemes import PHONEMES
from b2t_kaggle.pipeline.foreign_logits import ORDERS, normalised, read_trials


def frames(ids, order, rng):
    "Probabilities [T', 41] that say a trial's phonemes, in an order of the classes."
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
