"""nbs/kaggle/train_tpu.ipynb as Kaggle executes it: papermill, recordings below the input folder, a version that continues an earlier one, nothing installed that is there.

XLA's processor backend stands in for the TPU."""
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip('torch_xla', reason='needs torch_xla: pip install b2t_kaggle[xla]')
from b2t_kaggle.data.simulate import simulate_dataset
from b2t_kaggle.data.store import TrialStore
from b2t_kaggle.logits import LogitStore
from b2t_kaggle.pytorch.checkpoint import load_file
from b2t_kaggle.training import read_history

NOTEBOOK = Path(__file__).parents[2]/'nbs'/'kaggle'/'train_tpu.ipynb'
SMALL = {'feature_subset': list(range(12)), 'neural_dim': 12, 'n_units': 8, 'n_layers': 1, 'rnn_dropout': 0, 'data.batch_size': 8, 'days_per_batch': 2, 'n_buckets': 1, 'eval_batch_size': 8,
         'lr_warmup_steps': 1, 'lr_warmup_steps_day': 1, 'num_training_batches': 30, 'batches_per_val_step': 1000}
RECORDINGS = Path('competitions')/'brain-to-text-25'/'t15_copyTask_neuralData'/'hdf5_data_final'


def execute(room, environment, minutes, n_devices):
    "Run the notebook in `room` with this time budget; returns papermill's exit status, everything that the cells printed or raised, and papermill's errors."
    values = dict(input_dir=str(room/'input'), work_dir=str(room/'working'), scratch_dir=str(room/'scratch'), minutes=minutes, accelerator='xla', preset='demo',
                  overrides=SMALL, package='nowhere')
    env = environment | {'PJRT_DEVICE': 'CPU', 'CPU_NUM_DEVICES': str(n_devices)}
    (room/'parameters.yaml').write_text(json.dumps(values))
    done = subprocess.run([sys.executable, '-m', 'papermill', NOTEBOOK, room/'out.ipynb', '-f', room/'parameters.yaml', '-k', 'python3', '--no-progress-bar'],
                          env=env, capture_output=True, text=True, timeout=300)
    cells = json.loads((room/'out.ipynb').read_text())['cells'] if (room/'out.ipynb').exists() else []
    said = ''.join(''.join(o.get('text', [])) + o.get('evalue', '') for c in cells for o in c.get('outputs', []))
    return done.returncode, said, done.stderr


@pytest.fixture(scope='module')
def environment(tmp_path_factory):
    "Variables in which `python -m pip` is a stand-in that only writes down what it is asked for, in $PIP_CALLS."
    folder = tmp_path_factory.mktemp('trap')
    (folder/'pip').mkdir()
    (folder/'pip'/'__init__.py').touch()
    (folder/'pip'/'__main__.py').write_text("import os, sys; open(os.environ['PIP_CALLS'], 'a').write(' '.join(sys.argv[1:]) + '\\n'); sys.exit('no route to the index' if '--no-index' not in sys.argv else 0)")
    env = {k: v for k, v in os.environ.items() if k != 'XLA_FLAGS'}
    return env | {'PIP_CALLS': str(folder/'calls'), 'PYTHONPATH': os.pathsep.join([str(folder), *filter(None, sys.path)])}


@pytest.fixture(scope='module')
def first(environment, tmp_path_factory):
    "A session on eight devices that saw recordings and nothing else, and had no time left when training began: its room, and what it said."
    room = tmp_path_factory.mktemp('first')
    simulate_dataset(room/'input'/RECORDINGS, n_sessions=2, train=10, val=5, test=3, max_words=4, lm_sentences=0)
    status, said, error = execute(room, environment, 0, 8)
    assert status == 0, error[-3000:]
    return room, said


def test_a_session_leaves_a_model_and_log_probabilities(first):
    room, said = first
    work = room/'working'
    for words in ('8 devices', 'first step after', '1 of 30 batches are done; to go on', 'Phoneme error rate on val', 'of 5 sentences'): assert words in said, said
    assert load_file(work/'train'/'last.pt')['step'] == 1
    for split, n in dict(val=5, test=3).items():   # the first session has none
        logits, trials = LogitStore.open(work/'logits'/f'{split}.arrow'), TrialStore.open(room/'scratch'/f'{split}.arrow')
        assert len(logits) == len(trials) == n
        assert all(logits[i].shape == ((trials.n_bins[i] - 14)//8 + 1, 41) for i in range(n))
    assert f'recordings:  {room/"input"/RECORDINGS}' in said and 'training begins anew' in said


def test_nothing_is_installed_where_nothing_is_missing(first, environment):
    assert 'nothing to install' in first[1] and not Path(environment['PIP_CALLS']).exists()


def test_a_version_continues_the_one_that_is_attached(first, environment, tmp_path):
    "On one device, from a folder that cannot be written to, deep down in which the output of the first session lies."
    shutil.copytree(first[0]/'input', tmp_path/'input')
    shutil.copytree(first[0]/'working', tmp_path/'input'/'notebooks'/'someone'/'train-tpu')
    (tmp_path/'input'/'notebooks'/'someone'/'train-tpu'/'cache'/'b2t_kaggle'/'xla').mkdir(parents=True)
    (tmp_path/'input'/'notebooks'/'someone'/'train-tpu'/'cache'/'b2t_kaggle'/'xla'/'program').write_text('compiled')
    for p in [tmp_path/'input', *(tmp_path/'input').rglob('*')]: p.chmod(0o555 if p.is_dir() else 0o444)
    status, said, error = execute(tmp_path, environment, 9, 1)
    for p in [tmp_path/'input', *(tmp_path/'input').rglob('*')]: p.chmod(0o755)   # so that pytest can clear up
    assert status == 0, error[-3000:]
    assert 'continuing after 1 batches' in said and '30 of 30 batches are done\n' in said
    before, after = (read_history(room/'working'/'train'/'history.csv') for room in (first[0], tmp_path))
    assert list(before.step) == [1] and list(after.step) == [1, 10, 20, 30] and after.loss[0] == before.loss[0]
    assert load_file(tmp_path/'working'/'train'/'last.pt')['step'] == 30
    assert (tmp_path/'working'/'cache'/'b2t_kaggle'/'xla'/'program').read_text() == 'compiled'


INSTALL = '''
import importlib.util, json, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: None if name in ("b2t_kaggle", "rapidfuzz") else find(name, *a)
cells = [c for c in json.load(open(sys.argv[1]))["cells"] if c["cell_type"] == "code"]
variables = {}
for cell in cells[:5]:
    exec("".join(cell["source"]), variables)
    if "parameters" in cell["metadata"].get("tags", []): variables |= dict(input_dir=sys.argv[2], work_dir=sys.argv[3], scratch_dir=sys.argv[3], package="the-source")
'''


@pytest.mark.parametrize('offline', [True, False], ids=['wheels', 'no wheels and no internet'])
def test_what_is_missing_is_installed_and_nothing_else(offline, environment, tmp_path):
    wheels = tmp_path/'input'/'my-wheels'
    wheels.mkdir(parents=True)
    if offline: (wheels/'b2t_kaggle-0.1.0-py3-none-any.whl').touch()
    calls = tmp_path/'calls'
    done = subprocess.run([sys.executable, '-c', INSTALL, NOTEBOOK, tmp_path/'input', tmp_path/'working'], env=environment | {'PIP_CALLS': str(calls)}, capture_output=True, text=True)
    asked = [line.split() for line in calls.read_text().splitlines()]
    held = (tmp_path/'working'/'held.txt').read_text().splitlines()
    assert {p.split('==')[0] for p in held} >= {'numpy', 'torch', 'torch_xla'}
    common = ['install', '--quiet', '--constraint', str(tmp_path/'working'/'held.txt')]
    if offline:
        offered = ['--no-index', f'--find-links={wheels}']
        assert done.returncode == 0, done.stderr
        assert asked == [[*common, *offered, 'rapidfuzz'], [*common, *offered, '--no-deps', str(wheels/'b2t_kaggle-0.1.0-py3-none-any.whl')]]
    else:
        assert asked == [[*common, 'rapidfuzz']]
        assert 'rapidfuzz: not installed (no route to the index)' in done.stderr and 'attach a dataset with wheels' in done.stderr
