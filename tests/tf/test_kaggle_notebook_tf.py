"""nbs/kaggle/train.ipynb with TensorFlow as on Kaggle, executed by papermill with the packages of its GPU image, and
its output about the machine."""
from dataclasses import replace

import pytest

pytest.importorskip('tensorflow', reason='needs TensorFlow: pip install b2t_kaggle[tf]')
from kaggle_session import RECORDINGS, attach_wheels, train, trap_pip
from test_devices import simulate

from b2t_kaggle.data.simulate import simulate_dataset
from b2t_kaggle.devices import machine as detection
from b2t_kaggle.kaggle.session import device_problems
from b2t_kaggle.logits import LogitStore
from b2t_kaggle.training.history import read_history


def test_a_session_leaves_a_model_and_log_probabilities(tmp_path):
    (tmp_path/'trap').mkdir()
    environment = trap_pip(tmp_path/'trap', 'gpu') | {'CUDA_VISIBLE_DEVICES': '-1'}
    simulate_dataset(tmp_path/'input'/RECORDINGS, n_sessions=2, train=10, val=5, test=3, max_words=4, lm_sentences=0)
    attach_wheels(tmp_path)
    text = train(tmp_path, environment, framework='tensorflow', accelerator='cpu')
    for words in ('device:      cpu', '30 of 30 batches are done;', 'starts from the beginning',
                  'installed from attached wheels: fastcore rapidfuzz\n',
                  f'recordings:  {tmp_path/"input"/RECORDINGS}'):
        assert words in text, text
    run = tmp_path/'working'/'run'
    assert list(read_history(run/'train'/'history.csv').step) == [10, 20, 30]
    assert (run/'train'/'best.weights.h5').exists()
    for split, n in dict(val=5, test=3).items():   # the first session has none
        assert len(LogitStore.open(run/'logits'/f'{split}.arrow')) == n


@pytest.mark.parametrize('machine, packages, message', [
    ('kaggle v5e-8', None, 'device:      cpu ('),
    ('kaggle v5e-8', {'tensorflow-tpu': '2.20.0', 'libtpu': '0.0.31'},
     'device:      tpu (TPU v5e, 8 devices), bfloat16'),
    ('cloud v4-8', {'tensorflow': '2.18.0'},
     'device:      tpu (TPU v4, 4 devices), bfloat16'),
    ('GPUs', None, 'device:      cuda (NVIDIA H200, 2 devices), bfloat16'),
    ('a GPU without bfloat16', None, 'device:      cpu ('),
    ('nothing', {'tensorflow-cpu': '2.21.0'}, 'device:      cpu ('),
])
def test_the_detected_devices_are_printed(machine, packages, message, monkeypatch, tmp_path, capsys):
    detected = simulate(machine, tmp_path)
    monkeypatch.setattr(detection, 'detect', lambda: replace(detected, packages=packages or detected.packages))
    device_problems('tensorflow', 'auto', False)
    assert capsys.readouterr().out.startswith(message)
