"""Requirements of every TensorFlow encoder. All encoders in the registry are tested."""
import json
import sys
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

tf = pytest.importorskip('tensorflow', reason='needs TensorFlow: pip install b2t_kaggle[tf]')
sys.path.insert(0, str(Path(__file__).parents[1]))
import copies
import encoders
from encoders import LEARNED_BY_100, open_toy, train_until_right, with_steps, write_toy
from killed import ask_before_each_step, kill_after_a_checkpoint
from train_toy import first_steps, start_copies, write_first_steps

from b2t_kaggle.config.encoders.encoder import encoders_in
from b2t_kaggle.config.schema import ConfigError
from b2t_kaggle.pipeline.frameworks import convert
from b2t_kaggle.tensorflow.checkpoint import load_last, load_model
from b2t_kaggle.tensorflow.feed import start
from b2t_kaggle.tensorflow.inference import infer
from b2t_kaggle.tensorflow.models import build_model, encoder_class
from b2t_kaggle.tensorflow.trainer import Trainer, train
from b2t_kaggle.training.checkpoints import CheckpointError
from b2t_kaggle.training.history import History, read_history

NAMES = encoders_in('tensorflow')


# As in `first_steps`
def config(name): return encoders.config(name, framework='tensorflow', **{'data.n_buckets': 1})


@pytest.fixture(scope='module')
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp('toy')
    write_toy(folder)
    open_toy(folder)
    return folder


class EachBatch(History):
    "A history with a row for each batch."
    def add(self, *values, **options): super().add(*values, **options | dict(end_row=True))


@pytest.fixture(scope='module')
def trained(data, tmp_path_factory):
    "The folder and the result of an uninterrupted training, by encoder. Its history has each batch."
    runs = {}
    def get(name):
        if name not in runs:
            with patch('b2t_kaggle.training.loop.History', EachBatch):
                runs[name] = train_until_right(train, data, tmp_path_factory.mktemp(name), config(name))
        return runs[name]
    return get


@pytest.mark.parametrize('name', NAMES)
def test_overfits_a_toy(name, trained):
    _, result = trained(name)
    assert result['val_per'] == 0
    assert result['step'] == 100 or name not in LEARNED_BY_100


@pytest.mark.parametrize('name', NAMES)
def test_padding_changes_nothing(name, trained):
    "A trial's frames equal those of the trial alone, although its padding is garbage."
    model, cfg = load_model(trained(name)[0]/'best.weights.h5')
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 60, 16)).astype('float32')
    garbage = x.copy()
    garbage[1, 31:] = 1e4 * rng.standard_normal((29, 16))
    n = cfg.model.n_frames(31)
    n_bins = np.array([60, 31])
    clean, dirty = (model(batch, np.array([0, 1]), n_bins).numpy() for batch in (x, garbage))
    np.testing.assert_allclose(clean[1, :n], dirty[1, :n], rtol=1e-5, atol=1e-5)
    assert clean.shape[1] == cfg.model.n_frames(60)
    alone = model(x[1:, :31], np.array([1])).numpy()
    np.testing.assert_allclose(clean[1, :n], alone[0, :n], rtol=1e-4, atol=1e-4)


def train_in_a_copy(allowed, folder, cfg, out):
    ask_before_each_step(Trainer, allowed)
    train(*open_toy(folder), cfg, out, progress=False)


@pytest.mark.parametrize('name', NAMES)
def test_continues_exactly_after_a_kill(name, data, trained, tmp_path):
    "After SIGKILL at the first checkpoint, the final weights equal those of an uninterrupted run, bit for bit."
    without_kill, never_killed = trained(name)
    cfg = with_steps(config(name), never_killed['step'])
    start_copies()
    kill_after_a_checkpoint(train_in_a_copy, (data, cfg, tmp_path), tmp_path/'last.weights.h5', steps=50)
    assert 0 < load_last(tmp_path/'last.weights.h5')['run']['step'] < 100
    result = train(*open_toy(data), cfg, tmp_path, progress=False)
    assert result['step'] == never_killed['step']
    again, never = (load_model(folder/'best.weights.h5')[0].to_state() for folder in (tmp_path, without_kill))
    for k, v in never.items(): np.testing.assert_array_equal(v, again[k], err_msg=k)


@pytest.mark.parametrize('name', NAMES)
def test_saves_and_loads(name, data, trained, tmp_path):
    "Inference from the file equals the model in memory."
    file = trained(name)[0]/'best.weights.h5'
    model, cfg = load_model(file)
    store, _ = open_toy(data)
    logits = infer(file, store, tmp_path/'logits.arrow', 'cpu', 'float32', batch_size=3, progress=False)
    x = np.array(store[3].features, dtype='float32')[None]
    alone = tf.nn.log_softmax(model(x, np.array([int(store.day[3])]))).numpy()[0]
    np.testing.assert_allclose(logits[3], alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize('name', NAMES)
def test_official_form_or_refusal(name, trained, tmp_path):
    "`b2t convert` to the official kit's folder and back is exact, bit for bit, or is refused in one sentence."
    file = trained(name)[0]/'best.weights.h5'
    model, cfg = load_model(file)
    if reason := cfg.model.no_official_form():
        with pytest.raises(CheckpointError, match=f'{reason}, which the official kit does not have'):
            convert(file, tmp_path/'official')
        return
    convert(file, tmp_path/'official')
    convert(tmp_path/'official', tmp_path/'back.weights.h5')
    back = load_model(tmp_path/'back.weights.h5')[0].to_state()
    for k, v in model.to_state().items(): np.testing.assert_array_equal(v, back[k], err_msg=k)


@pytest.mark.parametrize('name', NAMES)
def test_parts_of_a_batch_give_the_steps_of_the_whole(name, data, trained, tmp_path):
    "One after another with accumulated gradients, and in parallel on two devices."
    start_copies()
    p = copies.call(write_first_steps, tmp_path/'two.json', 2, name, data)
    whole = read_history(trained(name)[0]/'history.csv').head(3)
    in_turn = first_steps(name, data, accumulate=2)
    p.join(300)
    assert p.exitcode == 0
    at_once = json.loads((tmp_path/'two.json').read_text())
    assert (start('cpu', 'float32').n_devices, in_turn['n'], at_once['n']) == (1, 1, 2)
    assert list(whole.step) == [1, 2, 3]
    for parts in in_turn, at_once:
        assert parts['losses'] == pytest.approx(whole.loss.tolist(), rel=2e-3)
        assert parts['norms'] == pytest.approx(whole.grad_norm.tolist(), rel=2e-3)


@pytest.mark.parametrize('name', ['conv', 'mamba', 'zipformer'])
def test_a_model_that_tensorflow_lacks_is_refused_in_one_line(name):
    refusal = f'model.name = {name}: TensorFlow has no such encoder, it has gru, transformer, triple_gru'
    with pytest.raises(ConfigError, match=refusal): encoder_class(name)
    assert {'gru', 'triple_gru'} <= set(NAMES) and build_model(config('gru').model, 2).cfg.name == 'gru'
