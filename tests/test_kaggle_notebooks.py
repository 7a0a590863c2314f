"""nbs/kaggle/{train,submit}.ipynb as on Kaggle, executed by papermill one after another. Folders are laid out like
Kaggle's, inputs are read-only, pip has no internet, and only packages of Kaggle's GPU image are found."""
import json

import pytest
from kaggle_session import RECORDINGS, attach, attach_wheels, execute, outputs_of, text_of, train, trap_pip
from tiny_models import tiny_lm, tiny_whisper

from b2t_kaggle.config import load_config
from b2t_kaggle.data.simulate import simulate_dataset
from b2t_kaggle.data.store import TrialStore
from b2t_kaggle.kaggle.cycle import is_finished, submission_problem, training_problem
from b2t_kaggle.logits import LogitStore
from b2t_kaggle.pipeline.execute import run_stages
from b2t_kaggle.pipeline.run import Run
from b2t_kaggle.pipeline.stamps import StageRun
from b2t_kaggle.pipeline.submission import validate_submission

FAST = {'lm.order': 2, 'decode.beam': 10, 'decode.nbest': 2}


@pytest.fixture(scope='module')
def environment(tmp_path_factory):
    return trap_pip(tmp_path_factory.mktemp('trap'), 'gpu') | {'CUDA_VISIBLE_DEVICES': '-1'}


@pytest.fixture(scope='module')
def trained(environment, tmp_path_factory):
    "A session that trained on the recordings, and its output."
    root = tmp_path_factory.mktemp('trained')
    simulate_dataset(root/'input'/RECORDINGS, n_sessions=2, train=10, val=5, test=3, max_words=4, lm_sentences=0)
    attach_wheels(root)
    return root, train(root, environment, accelerator='cpu')


@pytest.fixture(scope='module')
def submitted(trained, environment, tmp_path_factory):
    "A session that decoded the output of `trained`, and its own output."
    root = tmp_path_factory.mktemp('submitted')
    attach(root, trained[0])
    status, text, error = execute('submit.ipynb', root, environment, overrides=FAST)
    assert status == 0, error[-3000:]
    return root, text


def check_submission(root):
    "Check for one row per test trial, and for the run's own file."
    path = root/'working'/'submission.csv'
    packed, = (root/'scratch').glob('packed-*/test.arrow')
    validate_submission(path, TrialStore.open(packed).index)   # raises if it is invalid
    assert path.read_bytes() == (root/'working'/'run'/'submission.csv').read_bytes()


def test_training_leaves_a_run_and_few_outputs(trained, environment):
    root, text = trained
    run = root/'working'/'run'
    for words in (f'recordings:  {root/"input"/RECORDINGS}', 'starts from the beginning', 'device:      cpu',
                  'installed from attached wheels: fastcore rapidfuzz',
                  '30 of 30 batches are done; attach'):
        assert words in text, text
    assert len(LogitStore.open(run/'logits'/'test.arrow')) == 3
    bars = text_of(outputs_of(root/'out.ipynb')).count('/30 [')
    seconds = json.loads((run/'stages'/'train.json').read_text())['seconds']
    assert 1 <= bars <= 3 + seconds/30, f'the bar of 30 batches was drawn {bars} times in {seconds} s'
    assert len(outputs_of(root/'out.ipynb')) < 60


def test_a_run_of_kaggle_is_also_done_elsewhere(trained, tmp_path):
    "The stamps are valid elsewhere: all stages are done, and no trials are packed."
    root = trained[0]
    run = Run(root/'working'/'run', tmp_path)
    assert {name: StageRun(run, name).status() for name in ('train', 'infer')} == dict(train='done', infer='done')
    assert {row['state'] for row in run_stages(run, 'infer')} == {'not needed', 'skipped, nothing changed'}


def test_a_cycle_takes_both_outputs(trained, submitted):
    assert training_problem(trained[0]/'working'/'run') == '' and is_finished(trained[0]/'working'/'run')
    assert submission_problem(submitted[0]/'working') == ''


def test_a_trained_run_is_submitted(submitted):
    root, text = submitted
    check_submission(root)
    assert f'runs:        {root}/input/notebooks/someone/version-0/run' in text
    assert (root/'working'/'run'/'report.html').exists()


@pytest.fixture
def models(submitted, tmp_path):
    """An n-gram through a link, an LLM, and weights of Whisper, which is not an LLM, attached to a session in
    `tmp_path`."""
    datasets = tmp_path/'input'/'datasets'/'someone'
    datasets.mkdir(parents=True)
    (datasets/'lm').symlink_to(submitted[0]/'working'/'run'/'lm')
    tiny_lm(tmp_path/'input'/'models'/'opt'/'1', 'opt', ['is it a good time', 'what do you mean'])
    tiny_whisper(datasets/'whisper', ['hello'])
    return datasets


def test_several_runs_are_averaged(trained, models, environment, tmp_path):
    "Two versions, the second as a LogitStore of each split; an n-gram and an LLM rank the sentences."
    attach(tmp_path, trained[0])
    for split in ('val', 'test'):
        given = LogitStore.open(trained[0]/'working'/'run'/'logits'/f'{split}.arrow')
        LogitStore.write(models/f'{split}.arrow', [x[::-1] for x in given], given.index, given.provenance)
    status, text, error = execute('submit.ipynb', tmp_path, environment, overrides=FAST)
    assert status == 0, error[-3000:]
    check_submission(tmp_path)
    run = tmp_path/'working'/'run'
    stamps = {name: json.loads((run/'stages'/f'{name}.json').read_text()) for name in ('ensemble', 'rescore')}
    assert stamps['ensemble']['metrics']['models'] == 2 and stamps['rescore']['finished']
    cfg = load_config(run/'config.yaml')
    assert (cfg.lm.path, cfg.rescore.llm) == (models/'lm'/'lm.arpa', str(tmp_path/'input'/'models'/'opt'/'1'))
    assert f'unused:      {models}/whisper' in text


def test_missing_inputs_are_reported_at_once(environment, tmp_path):
    status, text, error = execute('submit.ipynb', tmp_path, environment)
    assert status and not (tmp_path/'working').exists()
    for words in ('This notebook cannot start', '- the recordings: not attached', '- a model: none is attached'):
        assert words in text, text
