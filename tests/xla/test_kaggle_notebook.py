"""nbs/kaggle/train.ipynb on XLA as on Kaggle, executed by papermill. Recordings are below the input folder, a version
continues an earlier one, and installed packages are not installed again. XLA's CPU backend replaces the TPU."""
import json
from pathlib import Path

import pytest

pytest.importorskip('torch_xla', reason='needs torch_xla: pip install b2t_kaggle[xla]')
from kaggle_session import RECORDINGS, SMALL, attach, outputs_of, text_of, train, trap_pip

from b2t_kaggle.data.simulate import simulate_dataset
from b2t_kaggle.logits import LogitStore
from b2t_kaggle.pytorch.checkpoint import load_file
from b2t_kaggle.training.history import read_history


def session(root, environment, n_devices, **overrides):
    environment = environment | {'PJRT_DEVICE': 'CPU', 'CPU_NUM_DEVICES': str(n_devices)}
    return train(root, environment, overrides=SMALL | overrides, accelerator='xla')


@pytest.fixture(scope='module')
def environment(tmp_path_factory): return trap_pip(tmp_path_factory.mktemp('trap'))


@pytest.fixture(scope='module')
def first(environment, tmp_path_factory):
    """A session on eight devices with only recordings attached, whose time budget is used up when training starts: its
    folder and its output."""
    root = tmp_path_factory.mktemp('first')
    simulate_dataset(root/'input'/RECORDINGS, n_sessions=2, train=10, val=5, test=3, max_words=4, lm_sentences=0)
    return root, session(root, environment, 8, **{'train.time_budget': 0.01})


def test_a_session_leaves_a_model_and_log_probabilities(first):
    root, text = first
    run = root/'working'/'run'
    for words in ('8 devices', '1 of 30 batches are done; to continue', 'starts from the beginning',
                  f'recordings:  {root/"input"/RECORDINGS}'):
        assert words in text, text
    assert 'first step after' in text_of(outputs_of(run/'notebooks'/'03_train.ipynb'))
    assert load_file(run/'train'/'last.pt')['step'] == 1
    for split, n in dict(val=5, test=3).items():   # The first session has none
        logits = LogitStore.open(run/'logits'/f'{split}.arrow')
        assert len(logits) == n and '8 devices' in logits.provenance['device']
    assert json.loads((run/'stages'/'train.json').read_text())['finished'] is False


def test_nothing_is_installed_if_nothing_is_missing(first, environment):
    assert 'nothing to install' in first[1] and not Path(environment['PIP_CALLS']).exists()


def test_a_version_continues_the_attached_one(first, environment, tmp_path):
    "The version runs on one device, from a read-only folder, with the output of the first session in a deep subfolder."
    (first[0]/'working'/'run'/'xla').mkdir()
    (first[0]/'working'/'run'/'xla'/'program').write_text('compiled')
    attach(tmp_path, first[0])
    text = session(tmp_path, environment, 1)
    assert f'continues {tmp_path}/input/notebooks/someone/version-0/run' in text
    assert '30 of 30 batches are done;' in text
    run = tmp_path/'working'/'run'
    before, after = (read_history(folder/'train'/'history.csv') for folder in (first[0]/'working'/'run', run))
    assert list(before.step) == [1] and list(after.step) == [1, 10, 20, 30] and after.loss[0] == before.loss[0]
    assert load_file(run/'train'/'last.pt')['step'] == 30
    assert (run/'xla'/'program').read_text() == 'compiled'
