"""nbs/kaggle/train_tensorflow.ipynb as Kaggle executes it, by papermill.

Recordings below the input folder, a version that continues an earlier one, and what is printed about the machine."""
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip('tensorflow', reason='needs TensorFlow: pip install b2t_kaggle[tf]')
from kaggle_session import NOTEBOOKS, RECORDINGS, execute, trap_pip
from test_devices import simulate

from b2t_kaggle.data.simulate import simulate_dataset
from b2t_kaggle.data.store import TrialStore
from b2t_kaggle.devices import machine as detection
from b2t_kaggle.logits import LogitStore
from b2t_kaggle.training.history import read_history

NOTEBOOK = 'train_tensorflow.ipynb'


@pytest.fixture(scope='module')
def environment(tmp_path_factory):
    return trap_pip(tmp_path_factory.mktemp('trap')) | {'CUDA_VISIBLE_DEVICES': '-1'}


@pytest.fixture(scope='module')
def first(environment, tmp_path_factory):
    """A session that found recordings and nothing else, and had no time left when training began.

    Its room, and what it printed."""
    room = tmp_path_factory.mktemp('first')
    simulate_dataset(room/'input'/RECORDINGS, n_sessions=2, train=10, val=5, test=3, max_words=4, lm_sentences=0)
    status, outputs, error = execute(NOTEBOOK, room, environment, minutes=0)
    assert status == 0, error[-3000:]
    return room, outputs


def test_a_session_leaves_a_model_and_log_probabilities(first, environment):
    room, outputs = first
    work = room/'working'
    assert outputs[0].startswith('Found: no GPU or TPU that this TensorFlow can use')
    text = ''.join(outputs)
    for words in ('This session: cpu', '1 of 30 batches are done; to go on', 'Phoneme error rate on val',
                  'of 5 sentences', 'training begins anew', 'nothing to install'):
        assert words in text, text
    for split, n in dict(val=5, test=3).items():   # the first session has none
        logits = LogitStore.open(work/'logits'/f'{split}.arrow')
        trials = TrialStore.open(room/'scratch'/f'{split}.arrow')
        assert len(logits) == len(trials) == n
        assert all(logits[i].shape == ((trials.n_bins[i] - 14)//8 + 1, 41) for i in range(n))
    assert f'recordings:  {room/"input"/RECORDINGS}' in text and not Path(environment['PIP_CALLS']).exists()


def test_a_version_continues_the_one_that_is_attached(first, environment, tmp_path):
    "From a folder that cannot be written to, deep down in which the output of the first session lies."
    shutil.copytree(first[0]/'input', tmp_path/'input')
    attached = tmp_path/'input'/'notebooks'/'someone'/'train-tensorflow'
    shutil.copytree(first[0]/'working', attached)
    for p in [tmp_path/'input', *(tmp_path/'input').rglob('*')]: p.chmod(0o555 if p.is_dir() else 0o444)
    status, outputs, error = execute(NOTEBOOK, tmp_path, environment, minutes=9)
    for p in [tmp_path/'input', *(tmp_path/'input').rglob('*')]: p.chmod(0o755)   # so that pytest can clear up
    assert status == 0, error[-3000:]
    text = ''.join(outputs)
    assert f'checkpoint:  {attached}/train/last.weights.h5' in text and '30 of 30 batches are done\n' in text
    before, after = (read_history(room/'working'/'train'/'history.csv') for room in (first[0], tmp_path))
    assert list(before.step) == [1] and list(after.step) == [1, 10, 20, 30] and after.loss[0] == before.loss[0]


@pytest.mark.parametrize('machine, packages, message', [
    ('kaggle v5e-8', None, 'Found: a TPU that this TensorFlow cannot drive. train_tpu.ipynb uses it'),
    ('kaggle v5e-8', {'tensorflow-tpu': '2.20.0', 'libtpu': '0.0.31'},
     'Found: a TPU that this TensorFlow can drive.\nPlan: tpu (TPU v5e, 8 devices), bfloat16'),
    ('cloud v4-8', {'tensorflow': '2.18.0'},
     'Found: a TPU that this TensorFlow can drive if it was built for TPUs, which shows when it starts.\n'
     'Plan: tpu (TPU v4, 4 devices), bfloat16'),
    ('GPUs', None, 'Found: a GPU.\nPlan: cuda (NVIDIA H200, 2 devices), bfloat16'),
    ('a GPU without bfloat16', None, 'Found: no GPU or TPU that this TensorFlow can use'),
    ('nothing', {'tensorflow-cpu': '2.21.0'}, 'Found: no GPU or TPU that this TensorFlow can use'),
])
def test_the_first_output_tells_what_was_found(machine, packages, message, monkeypatch, tmp_path, capsys):
    detected = simulate(machine, tmp_path)
    monkeypatch.setattr(detection, 'detect', lambda: replace(detected, packages=packages or detected.packages))
    cells = json.loads((NOTEBOOKS/NOTEBOOK).read_text())['cells']
    variables = {}
    for cell in [cell for cell in cells if cell['cell_type'] == 'code'][:2]: exec(''.join(cell['source']), variables)
    assert capsys.readouterr().out.startswith(message)
