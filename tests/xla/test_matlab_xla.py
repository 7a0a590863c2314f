"MATLAB files agree with scipy's reader and writer. Only the environment of PyTorch/XLA has scipy, through JAX."
import numpy as np
import pytest

from b2t_kaggle.data.matlab import read_matlab
from b2t_kaggle.data.sessions import read_session, session_path
from b2t_kaggle.data.t12 import import_t12, simulate_t12

sio = pytest.importorskip('scipy.io')
NAMES = ['sentenceText', 'blockIdx', 'tx1', 'tx4', 'spikePow']


def test_simulated_files_are_read_by_scipy(tmp_path):
    simulate_t12(tmp_path/'m', n_sessions=1, train=12, val=2, test=2)
    for path in (tmp_path/'m').glob('*/*.mat'):
        ours, theirs = read_matlab(path, NAMES), sio.loadmat(path)
        assert ours['sentenceText'] == theirs['sentenceText'].tolist()
        assert np.array_equal(ours['blockIdx'], theirs['blockIdx'])
        for name in NAMES[2:]:
            assert theirs[name].shape == (1, len(ours[name]))
            for a, b in zip(ours[name], theirs[name][0]): assert a.dtype == b.dtype and np.array_equal(a, b)


def test_imported_values_equal_those_of_a_reader_with_scipy_bit_for_bit(tmp_path):
    simulate_t12(tmp_path/'m', n_sessions=1, train=12, val=2, test=2)
    import_t12(tmp_path/'m', tmp_path/'s')
    for split, folder in dict(train='train', val='test', test='competitionHoldOut').items():
        dat = sio.loadmat(tmp_path/'m'/folder/'t12.2022.04.28.mat')
        pairs = zip(dat['tx1'][0], dat['spikePow'][0])
        features = [np.concatenate([c[:, :128], p[:, :128]], axis=1) for c, p in pairs]
        block = dat['blockIdx'].ravel()
        for b in np.unique(block):
            bins = np.concatenate([f for f, other in zip(features, block) if other == b])
            for i in np.flatnonzero(block == b): features[i] = (features[i] - bins.mean(0))/(bins.std(0) + 1e-8)
        trials = read_session(session_path(tmp_path/'s', 't12.2022.04.28', split))
        for t, f in zip(trials, features, strict=True): assert np.array_equal(t.features, f)


@pytest.mark.parametrize('compressed', [False, True])
@pytest.mark.parametrize('dtype', ['int8', 'uint16', 'int32', 'uint64', 'float32', 'float64'])
def test_files_that_scipy_wrote_are_read(tmp_path, compressed, dtype):
    cells = np.empty((1, 3), object)
    for i in range(3): cells[0, i] = (np.arange(12).reshape(4, 3) + i).astype(dtype)
    cells[0, 2] = np.zeros((0, 5), dtype)
    variables = dict(numbers=cells[0, 0], cells=cells, text=np.array(['Ärger', 'no']), whole=3, other={'a': 1})
    sio.savemat(tmp_path/'a.mat', variables, do_compression=compressed)
    found = read_matlab(tmp_path/'a.mat', ['numbers', 'cells', 'text', 'whole'])
    assert found['text'] == ['Ärger', 'no   '] and found['whole'].tolist() == [[3]]
    for a, b in zip([found['numbers'], *found['cells']], [cells[0, 0], *cells[0]], strict=True):
        assert a.dtype == b.dtype and np.array_equal(a, b)
