"""nbs/kaggle/{train,submit,ensemble}.ipynb as Kaggle executes them, by papermill, one after another.

Folders are laid out like Kaggle's, what is attached cannot be written to, and pip has no internet."""
import json
from pathlib import Path

import pytest
from kaggle_session import RECORDINGS, attach, execute, outputs_of, text_of, train, trap_pip

from b2t_kaggle.data.simulate import simulate_dataset
from b2t_kaggle.data.store import TrialStore
from b2t_kaggle.logits import LogitStore
from b2t_kaggle.pipeline import run_stages
from b2t_kaggle.runs import Run, StageRun
from b2t_kaggle.submission import validate_submission

FAST = {'lm.order': 2, 'decode.beam': 10, 'decode.nbest': 2}


@pytest.fixture(scope='module')
def environment(tmp_path_factory):
    return trap_pip(tmp_path_factory.mktemp('trap')) | {'CUDA_VISIBLE_DEVICES': '-1'}


@pytest.fixture(scope='module')
def trained(environment, tmp_path_factory):
    "A session that trained on the recordings, and what it printed."
    room = tmp_path_factory.mktemp('trained')
    simulate_dataset(room/'input'/RECORDINGS, n_sessions=2, train=10, val=5, test=3, max_words=4, lm_sentences=0)
    return room, train(room, environment, accelerator='cpu')


@pytest.fixture(scope='module')
def submitted(trained, environment, tmp_path_factory):
    "A session that decoded the output of that one, and what it printed."
    room = tmp_path_factory.mktemp('submitted')
    attach(room, trained[0])
    status, text, error = execute('submit.ipynb', room, environment, overrides=FAST)
    assert status == 0, error[-3000:]
    return room, text


def check_submission(room):
    "One row for each test trial; the file is the run's."
    path = room/'working'/'submission.csv'
    packed, = (room/'scratch').glob('packed-*/test.arrow')
    validate_submission(path, TrialStore.open(packed).index)   # raises where it is none
    assert path.read_bytes() == (room/'working'/'run'/'submission.csv').read_bytes()


def test_training_leaves_a_run_and_few_outputs(trained, environment):
    room, text = trained
    run = room/'working'/'run'
    for words in (f'recordings:  {room/"input"/RECORDINGS}', 'begins anew', 'nothing to install', 'device:      cpu',
                  '30 of 30 batches are done; attach'):
        assert words in text, text
    assert not Path(environment['PIP_CALLS']).exists()
    assert len(LogitStore.open(run/'logits'/'test.arrow')) == 3
    bars = text_of(outputs_of(room/'out.ipynb')).count('/30 [')
    assert 1 <= bars <= 3, f'the bar of 30 batches was drawn {bars} times'
    assert len(outputs_of(room/'out.ipynb')) < 60


def test_a_run_of_kaggle_is_done_elsewhere_too(trained, tmp_path):
    "With the same stamps: nothing is left to do, and nothing is packed for it."
    room = trained[0]
    run = Run(room/'working'/'run', tmp_path)
    assert {name: StageRun(run, name).status() for name in ('train', 'infer')} == dict(train='done', infer='done')
    assert {row['state'] for row in run_stages(run, 'infer')} == {'not needed', 'skipped, nothing changed'}


def test_a_trained_run_is_submitted(submitted):
    room, text = submitted
    check_submission(room)
    assert f'runs:        {room}/input/notebooks/someone/version-0/run' in text
    assert (room/'working'/'run'/'report.html').exists()


def test_several_runs_are_averaged(trained, environment, tmp_path):
    "Of two versions, the second of which is a LogitStore of each split; a binary n-gram would need a package more."
    attach(tmp_path, trained[0])
    for split in ('val', 'test'):
        given = LogitStore.open(trained[0]/'working'/'run'/'logits'/f'{split}.arrow')
        (tmp_path/'input'/'datasets'/'someone').mkdir(parents=True, exist_ok=True)
        other = [x[::-1] for x in given]
        LogitStore.write(tmp_path/'input'/'datasets'/'someone'/f'{split}.arrow', other, given.index, given.provenance)
    status, text, error = execute('ensemble.ipynb', tmp_path, environment, overrides=FAST)
    assert status == 0, error[-3000:]
    check_submission(tmp_path)
    stamp = json.loads((tmp_path/'working'/'run'/'stages'/'ensemble.json').read_text())
    assert stamp['metrics']['models'] == 2


def test_what_is_missing_is_said_at_once(environment, tmp_path):
    status, text, error = execute('submit.ipynb', tmp_path, environment)
    assert status and not (tmp_path/'working').exists()
    for words in ('This session cannot begin', '- the recordings: not attached', '- a model: none is attached'):
        assert words in text, text
