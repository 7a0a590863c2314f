"""nbs/kaggle/train_tpu.ipynb as Kaggle executes it, by papermill.

Recordings below the input folder, a version that continues an earlier one, nothing installed that is there. XLA's
processor backend stands in for the TPU."""
import shutil
from pathlib import Path

import pytest

pytest.importorskip('torch_xla', reason='needs torch_xla: pip install b2t_kaggle[xla]')
from kaggle_session import RECORDINGS, execute, trap_pip

from b2t_kaggle.data.simulate import simulate_dataset
from b2t_kaggle.data.store import TrialStore
from b2t_kaggle.logits import LogitStore
from b2t_kaggle.pytorch.checkpoint import load_file
from b2t_kaggle.training.history import read_history


def session(room, environment, minutes, n_devices):
    environment = environment | {'PJRT_DEVICE': 'CPU', 'CPU_NUM_DEVICES': str(n_devices)}
    status, outputs, error = execute('train_tpu.ipynb', room, environment, minutes=minutes, accelerator='xla')
    return status, ''.join(outputs), error


@pytest.fixture(scope='module')
def environment(tmp_path_factory): return trap_pip(tmp_path_factory.mktemp('trap'))


@pytest.fixture(scope='module')
def first(environment, tmp_path_factory):
    """A session on eight devices that found recordings and nothing else, and had no time left when training began.

    Its room, and what it printed."""
    room = tmp_path_factory.mktemp('first')
    simulate_dataset(room/'input'/RECORDINGS, n_sessions=2, train=10, val=5, test=3, max_words=4, lm_sentences=0)
    status, text, error = session(room, environment, 0, 8)
    assert status == 0, error[-3000:]
    return room, text


def test_a_session_leaves_a_model_and_log_probabilities(first):
    room, text = first
    work = room/'working'
    for words in ('8 devices', 'first step after', '1 of 30 batches are done; to go on', 'Phoneme error rate on val',
                  'of 5 sentences'):
        assert words in text, text
    assert load_file(work/'train'/'last.pt')['step'] == 1
    for split, n in dict(val=5, test=3).items():   # the first session has none
        logits = LogitStore.open(work/'logits'/f'{split}.arrow')
        trials = TrialStore.open(room/'scratch'/f'{split}.arrow')
        assert len(logits) == len(trials) == n
        assert all(logits[i].shape == ((trials.n_bins[i] - 14)//8 + 1, 41) for i in range(n))
    assert f'recordings:  {room/"input"/RECORDINGS}' in text and 'training begins anew' in text


def test_nothing_is_installed_where_nothing_is_missing(first, environment):
    assert 'nothing to install' in first[1] and not Path(environment['PIP_CALLS']).exists()


def test_a_version_continues_the_one_that_is_attached(first, environment, tmp_path):
    "On one device, from a folder that cannot be written to, deep down in which the output of the first session lies."
    shutil.copytree(first[0]/'input', tmp_path/'input')
    attached = tmp_path/'input'/'notebooks'/'someone'/'train-tpu'
    shutil.copytree(first[0]/'working', attached)
    (attached/'cache'/'b2t_kaggle'/'xla').mkdir(parents=True)
    (attached/'cache'/'b2t_kaggle'/'xla'/'program').write_text('compiled')
    for p in [tmp_path/'input', *(tmp_path/'input').rglob('*')]: p.chmod(0o555 if p.is_dir() else 0o444)
    status, text, error = session(tmp_path, environment, 9, 1)
    for p in [tmp_path/'input', *(tmp_path/'input').rglob('*')]: p.chmod(0o755)   # so that pytest can clear up
    assert status == 0, error[-3000:]
    assert 'continuing after 1 batches' in text and '30 of 30 batches are done\n' in text
    before, after = (read_history(room/'working'/'train'/'history.csv') for room in (first[0], tmp_path))
    assert list(before.step) == [1] and list(after.step) == [1, 10, 20, 30] and after.loss[0] == before.loss[0]
    assert load_file(tmp_path/'working'/'train'/'last.pt')['step'] == 30
    assert (tmp_path/'working'/'cache'/'b2t_kaggle'/'xla'/'program').read_text() == 'compiled'
