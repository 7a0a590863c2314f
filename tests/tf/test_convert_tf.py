"""Weights are converted between PyTorch, TensorFlow and the official kit's format, also by the command line, and the
models compute the same."""
import numpy as np
import pytest
import torch
from click.testing import CliRunner

tf = pytest.importorskip('tensorflow', reason='needs TensorFlow: pip install b2t_kaggle[tf]')

from b2t_kaggle.cli.command import main
from b2t_kaggle.config import preset, with_overrides
from b2t_kaggle.pytorch import checkpoint as of_torch
from b2t_kaggle.pytorch.models import build_model
from b2t_kaggle.tensorflow import checkpoint as of_tf

SESSIONS = ['t15.2023.08.11', 't15.2023.08.13', 't15.2023.08.18']


def trained(name, folder):
    "A PyTorch model with changed weights, saved as after training."
    noise = {'noise_units': 5} if name == 'triple_gru' else {}
    sizes = {'model.name': name, 'neural_dim': 8, 'n_units': 6, 'data.sessions': SESSIONS}
    cfg = with_overrides(preset('demo'), sizes | noise)
    torch.manual_seed(3)
    model = build_model(cfg.model, 3)
    with torch.no_grad():
        for p in model.parameters(): p += 0.2 * torch.randn_like(p)
    metrics = dict(val_per=0.2, val_loss=1.5, step=9, sessions={SESSIONS[0]: 0.2})
    of_torch.save_atomic(dict(model_state_dict=model.state_dict(), config=cfg.dump(), **metrics), folder/'best.pt')
    return model.eval(), cfg


def b2t(*args):
    r = CliRunner().invoke(main, [str(a) for a in args])
    return r.exit_code, r.output


def ragged(batch=4):
    "Features of trials of different length, their days and lengths in bins."
    rng = np.random.default_rng(0)
    n_bins = np.array([90, 61, 38, 14])[:batch]
    x = rng.standard_normal((batch, 90, 8)).astype(np.float32)
    for row, n in zip(x, n_bins): row[n:] = 0
    return x, rng.integers(0, 3, batch), n_bins


@pytest.mark.parametrize('name', ['gru', 'transformer', 'triple_gru'])
def test_both_ways_by_the_command_line(name, tmp_path):
    model, cfg = trained(name, tmp_path)
    target = tmp_path/'best.weights.h5'
    assert b2t('convert', tmp_path/'best.pt', target) == (0, f'Wrote {target}\n')
    assert b2t('convert', tmp_path/'best.weights.h5', tmp_path/'again.pt')[0] == 0
    theirs, found = of_tf.load_model(tmp_path/'best.weights.h5')
    x, day, n_bins = ragged()
    ours = model(torch.from_numpy(x), torch.from_numpy(day)).detach().numpy()
    other = theirs(x, day).numpy()
    frames = cfg.model.n_frames(n_bins)
    for a, b, n in zip(ours, other, frames): np.testing.assert_allclose(b[:n], a[:n], atol=1e-4)
    again, first = (of_torch.load_file(tmp_path/f) for f in ('again.pt', 'best.pt'))
    for k, v in first['model_state_dict'].items(): assert torch.equal(v, again['model_state_dict'][k]), k
    for k in ('val_per', 'val_loss', 'step', 'sessions'): assert again[k] == first[k], k
    assert found.data.sessions == SESSIONS and found.train.framework == 'tensorflow'


def test_from_an_official_folder(tmp_path):
    model, cfg = trained('gru', tmp_path)
    of_torch.save_official(model, cfg, tmp_path/'t15_pretrained_rnn_baseline', val_per=0.2)
    assert b2t('convert', tmp_path/'t15_pretrained_rnn_baseline', tmp_path/'best.weights.h5')[0] == 0
    theirs, found = of_tf.load_model(tmp_path)
    x, day, _ = ragged()
    ours = model(torch.from_numpy(x), torch.from_numpy(day)).detach().numpy()
    np.testing.assert_allclose(theirs(x, day).numpy(), ours, atol=1e-4)
    assert found.model == cfg.model


def test_models_that_cannot_be_converted(tmp_path):
    trained('triple_gru', tmp_path)
    status, output = b2t('convert', tmp_path/'best.pt', tmp_path/'official')
    assert status == 1 and 'only a gru that reads forwards can be written' in output, output
    assert not (tmp_path/'official'/'checkpoint'/'best_checkpoint').exists()
    (tmp_path/'broken.pt').write_bytes(b'PK nothing')
    status, output = b2t('convert', tmp_path/'broken.pt', tmp_path/'x.weights.h5')
    assert status == 1 and 'damaged' in output and not (tmp_path/'x.weights.h5').exists(), output
