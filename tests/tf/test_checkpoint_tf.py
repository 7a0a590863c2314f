"""Checkpoints in TensorFlow: a killed writer leaves a valid file, and a change of any byte of a file is detected."""
import errno
import os
import pickle
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

pytest.importorskip('tensorflow', reason='needs TensorFlow: pip install b2t_kaggle[tf]')

from b2t_kaggle.config import preset, with_overrides
from b2t_kaggle.core.files import WriteError, _owner
from b2t_kaggle.tensorflow.checkpoint import load_last, load_model, save_best, save_last
from b2t_kaggle.tensorflow.models import build_model
from b2t_kaggle.training.checkpoints import CheckpointError

SIZES = dict(neural_dim=2, n_units=2, n_layers=1, patch_size=2, patch_stride=1, n_classes=3)
CFG = with_overrides(preset('official'), SIZES | dict(sessions=['t15.2023.08.11']))
# In each file all weights, the state and the step are the same number
WRITER = '''
import sys
import numpy as np
from test_checkpoint_tf import CFG, build_model, save_last
model = build_model(CFG.model, 1)
for step in range(10**9):
    for v in model.weights: v.assign(np.full(v.shape, step, 'float32'))
    save_last(sys.argv[1], model, CFG, {}, dict(h0=dict(exp_avg=np.full(50_000, step, 'float32'))), dict(step=step))
'''

def step_of(path):
    "The step of a file, after checking that all of its arrays have it."
    last = load_last(path)
    model, _ = load_model(path)
    moments = np.unique(last['optimizer']['h0']['exp_avg'])
    weights = (x for v in model.weights for x in np.unique(v.numpy()))
    numbers = {last['run']['step'], *moments, *weights}
    assert len(numbers) == 1
    return numbers.pop()


def test_a_writer_stopped_or_killed_at_any_moment_leaves_a_whole_file(tmp_path):
    path = tmp_path/'last.weights.h5'
    rng = np.random.default_rng(0)
    with open(tmp_path/'log', 'w') as log:
        folders = [os.path.dirname(__file__), *filter(None, [os.environ.get('PYTHONPATH')])]
        env = os.environ | dict(PYTHONPATH=os.pathsep.join(folders))
        writer = subprocess.Popen([sys.executable, '-c', WRITER, str(path)], stderr=log, env=env)
    owner = _owner(writer.pid)
    try:
        end = time.monotonic() + 400
        while not path.exists():
            assert writer.poll() is None and time.monotonic() < end, (tmp_path/'log').read_text()[-2000:]
            time.sleep(0.05)
        steps = []
        while len(steps) < 12 or len(set(steps)) < 3:  # A stopped process leaves the same files as a killed one
            assert time.monotonic() < end, f'it writes too slowly: {steps}'
            time.sleep(rng.uniform(0, 0.1))
            writer.send_signal(signal.SIGSTOP)
            os.waitpid(writer.pid, os.WUNTRACED)  # before it stops, a file may change between two reads
            steps.append(step_of(path))
            writer.send_signal(signal.SIGCONT)
        time.sleep(rng.uniform(0, 0.1))
    finally: writer.kill()
    assert writer.wait() == -signal.SIGKILL, (tmp_path/'log').read_text()[-2000:]
    steps.append(step_of(path))
    assert steps == sorted(steps) and len(set(steps)) > 2
    leftover = tmp_path/f'.last.weights.h5.{owner}.tmp.weights.h5'
    leftover.write_bytes(b'half of a file')  # As a killed process may leave it
    save_last(path, build_model(CFG.model, 1), CFG, {}, {}, dict(step=-1))
    assert load_last(path)['run'] == dict(step=-1) and sorted(os.listdir(tmp_path)) == ['last.weights.h5', 'log']


def test_a_full_disk(small_disk):
    "If HDF5 wrote directly to the disk, it would end the process."
    (small_disk/'others').write_bytes(bytes(96 << 10))
    path = small_disk/'best.weights.h5'
    with pytest.raises(WriteError) as error: save_best(path, build_model(CFG.model, 1), CFG, {})
    assert str(error.value).startswith(f'{path}: not written, because the disk is full; no part of it was left')
    assert os.listdir(small_disk) == ['others']


def test_a_changed_byte_is_detected_or_harmless(tmp_path):
    path = tmp_path/'last.weights.h5'
    model = build_model(CFG.model, 1)
    rng = np.random.default_rng(0)
    state = dict(h0=dict(exp_avg=rng.standard_normal(2000).astype('float32')))
    save_last(path, model, CFG, {}, state, dict(step=3))
    whole = path.read_bytes()
    weights = model.to_state()
    found = 0
    for _ in range(25):
        i = rng.integers(len(whole))
        path.write_bytes(whole[:i] + bytes([whole[i] ^ rng.integers(1, 256)]) + whole[i+1:])
        try:
            again, cfg = load_model(path)
            last = load_last(path)
        except CheckpointError as e:
            assert str(e).startswith(str(path)) and '\n' not in str(e)
            found += 1
        else:
            assert cfg == CFG and last['run'] == dict(step=3)
            for k, v in again.to_state().items(): np.testing.assert_array_equal(v, weights[k])
            np.testing.assert_array_equal(last['optimizer']['h0']['exp_avg'], state['h0']['exp_avg'])
    assert found > 5


class Evil:
    def __init__(self, marker): self.marker = marker
    def __reduce__(self): return os.mkdir, (self.marker,)

@pytest.mark.parametrize('name, message', [('best.weights.h5', 'not a Keras weights file'),
                                           ('best.pt', 'b2t convert .* from a PyTorch checkpoint')])
def test_reading_a_pickle_does_not_run_it(tmp_path, name, message):
    (tmp_path/name).write_bytes(pickle.dumps(Evil(str(tmp_path/'ran'))))
    with pytest.raises(CheckpointError, match=message): load_model(tmp_path/name)
    with pytest.raises(CheckpointError, match='not a Keras weights file'): load_last(tmp_path/name)
    assert not (tmp_path/'ran').exists()


def test_a_configuration_of_any_length(tmp_path):
    "45 days and long lists in the configuration: HDF5 limits attributes to 64 KiB unless they are texts."
    cfg = with_overrides(CFG, dict(sessions=[f't15.2023.{i:02}.01' for i in range(45)]))
    cfg = with_overrides(cfg, dict(bad_trials_dict={s: {'1': list(range(600))} for s in cfg.data.sessions}))
    model = build_model(cfg.model, 45)
    save_best(tmp_path/'best.weights.h5', model, cfg, {})
    again, found = load_model(tmp_path)
    assert found == cfg and again.named_variables()['day_weights'].shape == (45, 2, 2)


def test_a_model_is_read_on_a_file_system_without_locks(tmp_path):
    import no_locks  # Not at the top: the stopped writer imports this file elsewhere
    save_best(tmp_path/'best.weights.h5', build_model(CFG.model, 1), CFG, dict(PER=0.5))
    code = 'import sys; from b2t_kaggle.tensorflow.checkpoint import load_model; load_model(sys.argv[1])'
    env = no_locks.environment(tmp_path, errno.ENOLCK)
    found = subprocess.run([sys.executable, '-c', code, tmp_path/'best.weights.h5'], env=env, stderr=subprocess.PIPE)
    assert found.returncode == 0, found.stderr.decode()[-2000:]
