"T12's recordings: MATLAB files written and read, values of the public baseline, damage, and a training run."
import base64
import os
import random
import zlib

import numpy as np
import pytest
import torch

from b2t_kaggle.config import preset, with_overrides
from b2t_kaggle.data import t12
from b2t_kaggle.data.matlab import MatlabError, read_matlab, write_matlab
from b2t_kaggle.data.sessions import SessionError, list_sessions, read_session, session_path, validate
from b2t_kaggle.data.store import StoreError, TrialStore
from b2t_kaggle.data.t12 import import_t12, simulate_t12
from b2t_kaggle.pytorch.trainer import train
from b2t_kaggle.training.recipe import TrainingError

FOLDERS = dict(train='train', val='test', test='competitionHoldOut')
NAMES = ['sentenceText', 'blockIdx', 'tx1', 'spikePow']

# scipy.io.savemat(f, dict(sentenceText=np.array(['Good morning.', "I'm here."]), blockIdx=np.array([[4], [6]]),
#                  tx1=…, spikePow=…), do_compression=True); the arrays are those of the test
BY_SCIPY = '''
    TUFUTEFCIDUuMCBNQVQtZmlsZSBQbGF0Zm9ybTogcG9zaXgsIENyZWF0ZWQgb246IFRodSBOb3YgMjYgMTY6NDY6NDAgMjAyNgAAAAAAAAAAAAAA
    AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAABSU0PAAAAUwAAAHic42NgYEgAYjYg5gBiFgYIYIXymYCYF4gZgZgHiItT
    80pS85JTQ1IrSkDqBIBYCojdPfPV83NTFBQyclPzi4pS8/QyFfIU0hX0FCDmAQDjlQ3uDwAAADMAAAB4nONjYGDwAGI2IOYAYj4GCGCF8pmAmBGK
    QfyknPzkbM+UCh4gWwCIWaDq2aA0AIOQA+IPAAAAYgAAAHic42NgYJjBwcDABqSBFAMjAwSwIvGZwDQzQ0mFIQMfkG3AjFDPiaaemQGiCWYOSC9Y
    kImFkXmUGCVGKAHON6y48w0rtnzDCs03YBPABoHNA5s4KjEqMSoxKjHMJQDQnRLTDwAAAMEAAAB4nO2XvQ3CMBBGDxA/RZQqAzACE+CMkCUoEAVI
    FLQexaNklIyC7TiysY1ESfFOSr58iu7ptdeKiDmK7Gwe7LOSebZJX4d0/fm43i7D/dXa71MT9/bZ3kbmpYXn/zehiD7bl4rZq5g6SZPkmOSUpJsl
    PQ8+fPjw4cOHDx8+fPh/wvd3Q/f9bnBZ3A1dKB8+WpXdqLKPlT5Vupu8O37epdL7SscPP/zwww8//PDDDz/88MMPP/zwww8//H71ewPD6z2u
'''


def baseline(crossings, power, blocks):
    "Features of the public baseline, [T, 256] each, computed in float64."
    features = [np.hstack([c[:, :128], p[:, :128]]).astype(float) for c, p in zip(crossings, power)]
    for b in sorted(set(blocks)):
        members = [i for i, other in enumerate(blocks) if other == b]
        bins = np.vstack(features[members[0]:members[-1] + 1])
        mean = bins.sum(0)/len(bins)
        std = np.sqrt(((bins - mean)**2).sum(0)/len(bins))
        for i in members: features[i] = (features[i] - mean)/(std + 1e-8)
    return features


def recordings(lengths, seed=0):
    "Crossings and power of trials with the given lengths, without constant features."
    rng = np.random.default_rng(seed)
    return ([rng.poisson(1., (n, 256)).astype(np.uint8) for n in lengths],
            [rng.gamma(2., 3., (n, 256)).astype(np.float32) for n in lengths])


def write(folder, part='train', day='t12.2022.05.17', **changes):
    "Write a file of three trials in two blocks, with changed variables; `None` removes a variable."
    crossings, power = recordings([30, 41, 22])
    variables = dict(sentenceText=['It is cold.', "I don't know.", 'Yes'], blockIdx=np.array([[3], [3], [5]], np.uint8),
                     tx1=crossings, spikePow=power) | changes
    (folder/part).mkdir(parents=True, exist_ok=True)
    return write_matlab(folder/part/f'{day}.mat', {k: v for k, v in variables.items() if v is not None})


def refusal(folder):
    "The problem that prevents the import of a folder, which must leave no session."
    with pytest.raises(SessionError) as error: import_t12(folder, folder/'out')
    assert list((folder/'out').glob('[!.]*')) == []
    return error.value.problem


def test_a_file_that_scipy_wrote_is_read(tmp_path):
    (tmp_path/'a.mat').write_bytes(base64.b64decode(BY_SCIPY))
    found = read_matlab(tmp_path/'a.mat', NAMES)
    assert found['sentenceText'] == ['Good morning.', "I'm here.    "] and found['blockIdx'].tolist() == [[4], [6]]
    for n, crossings, power in zip((3, 5), found['tx1'], found['spikePow'], strict=True):
        i, j = np.indices((n, 256))
        assert (crossings == (7*i + j) % 5).all() and crossings.dtype == np.uint8
        assert (power == (i + j) % 8/4).all() and power.dtype == np.float32


@pytest.fixture(scope='module')
def imported(tmp_path_factory):
    folder = tmp_path_factory.mktemp('t12')
    simulate_t12(folder/'matlab', n_sessions=2, train=13, val=4, test=3, seed=1)
    assert import_t12(folder/'matlab', folder/'sessions') == []
    return folder


@pytest.mark.parametrize('split', FOLDERS)
def test_values_equal_the_baselines(imported, split):
    sessions = list_sessions(imported/'sessions')
    assert sessions == ['t12.2022.04.28', 't12.2022.05.05']
    for session in sessions:
        raw = read_matlab(imported/'matlab'/FOLDERS[split]/f'{session}.mat', NAMES)
        trials = read_session(session_path(imported/'sessions', session, split))
        blocks = raw['blockIdx'].ravel().tolist()
        assert [t.block for t in trials] == blocks
        for trial, text, expected in zip(trials, raw['sentenceText'], baseline(raw['tx1'], raw['spikePow'], blocks),
                                         strict=True):
            assert trial.features.shape == expected.shape
            np.testing.assert_allclose(trial.features, expected, rtol=1e-4, atol=1e-4)
            if split == 'test': assert trial.sentence is None and trial.class_ids is None
            else: assert trial.sentence == text.strip() and trial.class_ids[-1] == 40


def test_trials_are_numbered_once_in_a_session(imported):
    for session in list_sessions(imported/'sessions'):
        files = [session_path(imported/'sessions', session, split) for split in FOLDERS]
        numbers = [(t.block, t.trial) for file in files for t in read_session(file)]
        assert len(set(numbers)) == len(numbers) == 20
    assert len(validate(imported/'sessions')) == 0


def test_values_of_mixed_blocks_equal_the_baselines(tmp_path):
    blocks = [2, 9, 2, 9, 4, 2]
    crossings, power = recordings([12, 30, 7, 25, 1, 16])
    write(tmp_path, blockIdx=np.array([blocks], float), tx1=crossings, spikePow=power, sentenceText=['No.']*6)
    import_t12(tmp_path, tmp_path/'out')
    trials = read_session(session_path(tmp_path/'out', 't12.2022.05.17', 'train'))
    assert [(t.block, t.trial) for t in trials] == [(2, 0), (9, 0), (2, 1), (9, 1), (4, 0), (2, 2)]
    for trial, expected in zip(trials, baseline(crossings, power, blocks)):
        np.testing.assert_allclose(trial.features, expected, rtol=1e-4, atol=1e-4)


def test_a_folder_is_completed_and_a_newer_file_read_again(tmp_path, monkeypatch):
    first = write(tmp_path)
    write(tmp_path, day='t12.2022.06.02')
    missing = [p.file.split('/')[-2] for p in import_t12(tmp_path, tmp_path/'out')]
    assert missing == ['competitionHoldOut', 'test']*2
    write(tmp_path, 'test')
    read = []
    def noted(path, names):
        read.append(path.parent.name)
        return read_matlab(path, names)
    monkeypatch.setattr(t12, 'read_matlab', noted)
    import_t12(tmp_path, tmp_path/'out')
    assert read == ['train', 'test']
    import_t12(tmp_path, tmp_path/'out')
    assert read == ['train', 'test']
    later = session_path(tmp_path/'out', 't12.2022.05.17', 'train').stat().st_mtime + 2
    os.utime(first, (later, later))
    import_t12(tmp_path, tmp_path/'out')
    assert read == ['train', 'test']*2
    assert sorted(p.name for p in (tmp_path/'out'/'t12.2022.05.17').iterdir()) == ['data_train.hdf5', 'data_val.hdf5']


def test_a_file_that_is_replaced_by_an_older_one_or_removed_is_detected(tmp_path):
    first = write(tmp_path)
    write(tmp_path, 'competitionHoldOut')
    folder = tmp_path/'out'/first.stem
    import_t12(tmp_path, folder.parent)
    def sentences(): return [t.sentence for t in read_session(folder/'data_train.hdf5')]
    mtime = first.stat().st_mtime - 1000
    write(tmp_path, sentenceText=['It is warm.', "I don't know.", 'Yes'])
    os.utime(first, (mtime, mtime))
    import_t12(tmp_path, folder.parent)
    assert sentences()[0] == 'It is warm.'
    (tmp_path/'competitionHoldOut'/first.name).unlink()
    import_t12(tmp_path, folder.parent)
    assert [p.name for p in folder.iterdir()] == ['data_train.hdf5']
    first.rename(first.with_stem('t12.2022.06.02'))
    gone = import_t12(tmp_path, folder.parent)[-1]
    assert (gone.file, gone.severity) == (str(first), 'warning') and str(folder) in gone.expected
    assert sentences()[0] == 'It is warm.'
    (folder.parent/'.imported.json').write_text('[[[')
    import_t12(tmp_path, folder.parent)
    assert '2022.06.02' in (folder.parent/'.imported.json').read_text()


def test_a_session_that_cannot_be_written_completely_is_removed(tmp_path):
    write(tmp_path)
    write(tmp_path, 'test', spikePow=None)
    assert (refusal(tmp_path).field, refusal(tmp_path).found) == ('spikePow', 'nothing')
    assert list((tmp_path/'out').rglob('*.hdf5')) == []


CROSSINGS, POWER = recordings([30, 41, 22])
NARROW = [CROSSINGS[0], CROSSINGS[1][:, :127], CROSSINGS[2]]
NOT_FINITE = [*POWER[:2], np.where(np.indices((22, 256))[1] == 127, np.nan, POWER[2]).astype(np.float32)]


@pytest.mark.parametrize('changes, place, found', [
    (dict(tx1=CROSSINGS[:2]), ('', 'tx1'), '2 cells'),
    (dict(tx1=CROSSINGS[0]), ('', 'tx1'), 'uint8 [30, 256]'),
    (dict(tx1=NARROW), ('trial_0001', 'tx1'), 'uint8 [41, 127]'),
    (dict(tx1=[*CROSSINGS[:2], CROSSINGS[2][1:]]), ('trial_0002', 'spikePow'), '22 bins'),
    (dict(spikePow=NOT_FINITE), ('trial_0002', 'spikePow'), 'NaN'),
    (dict(spikePow=[POWER[0][:0], *POWER[1:]]), ('trial_0000', 'spikePow'), 'float32 [0, 256]'),
    (dict(blockIdx=np.array([[1.], [1.], [2.5]])), ('', 'blockIdx'), 'float64 [3, 1]'),
    (dict(blockIdx=np.array([[1.], [1.], [np.inf]])), ('', 'blockIdx'), 'float64 [3, 1]'),
    (dict(blockIdx=['123']), ('', 'blockIdx'), 'list'),
    (dict(sentenceText=['One.', 'Two.']), ('', 'sentenceText'), '2 rows'),
    (dict(sentenceText=['One.', ' ', 'Three.']), ('trial_0001', 'sentenceText'), "''"),
    (dict(sentenceText=None), ('', 'sentenceText'), 'nothing'),
    (dict(sentenceText=['One.', 'Two.', 'a '*300]), ('trial_0002', 'seq_class_ids'), '600 entries'),
    (dict(sentenceText=['One.', '12', 'Three.']), ('trial_0001', 'seq_len'), '0'),
])
def test_errors_name_the_place(tmp_path, changes, place, found):
    path = write(tmp_path, **changes)
    problem = refusal(tmp_path)
    assert (problem.file, problem.trial, problem.field) == (str(path), *place)
    assert problem.found.startswith(found) and problem.expected and problem.advice


def test_a_held_out_file_needs_no_text_and_a_train_file_does(tmp_path):
    write(tmp_path, 'competitionHoldOut', sentenceText=None)
    assert len(import_t12(tmp_path, tmp_path/'out')) == 2
    assert len(read_session(session_path(tmp_path/'out', 't12.2022.05.17', 'test'))) == 3


def test_a_damaged_file_is_refused_or_read_as_it_was(tmp_path):
    path = write(tmp_path, tx1=CROSSINGS[:3], spikePow=POWER[:3])
    whole = path.read_bytes()
    raw = b''.join(zlib.decompress(whole[a:b]) for a, b in elements(whole))
    plain = whole[:128] + raw
    draw = random.Random(0)
    n_refused = 0
    for data in whole, plain:
        path.write_bytes(data)
        good = read_matlab(path, NAMES)
        for _ in range(300):
            # Mostly the headers of variables, which contain sizes and types
            at = draw.randrange(120, min(len(data), draw.choice((600, 2000, len(data)))))
            path.write_bytes(data[:at] + bytes([draw.randrange(256)]) + data[at + 1:])
            try: found = read_matlab(path, NAMES)
            except MatlabError: n_refused += 1
            else: assert data is plain or all(np.array_equal(a, b) for n in found for a, b in zip(found[n], good[n]))
        for at in draw.sample(range(len(data)), 20):
            path.write_bytes(data[:at])
            try: assert len(read_matlab(path, NAMES)) < 4
            except MatlabError: pass
    assert n_refused > 100


def elements(data):
    "Start and end of each variable's compressed bytes."
    at = 128
    while at < len(data):
        end = at + 8 + int.from_bytes(data[at + 4:at + 8], 'little')
        yield at + 8, end
        at = end


def test_a_model_of_256_features_learns_from_a_store_of_them(imported, tmp_path):
    stores = [TrialStore.build(imported/'sessions', s, tmp_path/f'{s}.arrow', progress=False) for s in ('train', 'val')]
    assert [(len(s), s.n_features) for s in stores] == [(26, 256), (8, 256)]
    small = dict(neural_dim=256, n_units=8, n_layers=1, patch_size=8, patch_stride=8, num_training_batches=3,
                 batches_per_val_step=3, days_per_batch=2)
    cfg = with_overrides(preset('demo'), small | {'data.batch_size': 4})
    result = train(*stores, cfg, tmp_path/'run', progress=False)
    assert result['finished'] and result['step'] == 3 and torch.isfinite(torch.tensor(result['val_loss']))


def test_matlab_files_are_not_sessions_yet(imported):
    assert '`b2t data import`' in validate(imported/'matlab').advice[0]


def test_a_model_of_another_width_is_refused_before_a_step(imported, tmp_path):
    stores = [TrialStore.build(imported/'sessions', s, tmp_path/f'{s}.arrow', progress=False) for s in ('train', 'val')]
    with pytest.raises(TrainingError, match='train.arrow: trials have 256 features, .* set model.neural_dim=256'):
        train(*stores, preset('demo'), tmp_path/'run', progress=False)


def test_two_participants_are_not_one_store(imported, tmp_path):
    (tmp_path/'t15.2023.08.11').mkdir()
    (tmp_path/'t12.2022.04.28').symlink_to(imported/'sessions/t12.2022.04.28')
    with pytest.raises(StoreError, match='t15.2023.08.11 with 512'):
        TrialStore.build(tmp_path, 'train', tmp_path/'train.arrow', progress=False)
    own = TrialStore.build(tmp_path, 'train', tmp_path/'train.arrow', sessions=['t12.2022.04.28'], progress=False,
                           feature_subset=[255, 3])
    assert own.n_features == 2
    with pytest.raises(StoreError, match='from 0 to 255'):
        TrialStore.build(tmp_path, 'train', tmp_path/'train.arrow', sessions=['t12.2022.04.28'], progress=False,
                         feature_subset=[256])
