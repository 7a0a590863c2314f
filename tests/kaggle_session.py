"""Shared by the tests of the notebooks in nbs/kaggle: a session as on Kaggle, executed by papermill on a small
simulation."""
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from kaggle_image import pretend_image

from b2t_kaggle.kaggle import session

PACKAGES = session.TRAINING | session.CURVES | session.DECODING | session.KENLM | session.LLM
NOTEBOOKS = Path(__file__).parents[1]/'nbs'/'kaggle'
SMALL = {
    'feature_subset': list(range(12)), 'neural_dim': 12, 'n_units': 8, 'n_layers': 1, 'rnn_dropout': 0,
    'data.batch_size': 8, 'days_per_batch': 2, 'n_buckets': 1, 'eval_batch_size': 8, 'lr_warmup_steps': 1,
    'lr_warmup_steps_day': 1, 'num_training_batches': 30, 'batches_per_val_step': 1000, 'processes': 1,
}
RECORDINGS = Path('competitions')/'brain-to-text-25'/'t15_copyTask_neuralData'/'hdf5_data_final'


# Do not wait for idle kernels
PAPERMILL = """
import json, sys
from pathlib import Path
from papermill import execute_notebook
notebook, out, parameters = sys.argv[1:]
execute_notebook(notebook, out, json.loads(Path(parameters).read_text()), kernel_name='python3', progress_bar=False,
                 shutdown_kernel='immediate')
"""


PIP = """
import os, sys
open(os.environ['PIP_CALLS'], 'a').write(' '.join(sys.argv[1:]) + '\\n')
sys.exit(0 if {'--no-index', '--no-deps'} & set(sys.argv) else 'no route to the index')
"""


def trap_pip(folder, image=None):
    """Environment variables with which `python -m pip` is a stand-in without internet. It only appends its arguments to
    the file $PIP_CALLS. With an image, processes find only the packages of this Kaggle image, and those that pip was
    asked to install from wheels."""
    if image: pretend_image(folder, image, PACKAGES)
    (folder/'pip').mkdir()
    (folder/'pip'/'__init__.py').touch()
    (folder/'pip'/'__main__.py').write_text(PIP)
    python_path = os.pathsep.join([str(folder), *filter(None, sys.path)])
    inherited = {k: v for k, v in os.environ.items() if not k.startswith('B2T_')} # Commands set their own
    return inherited | {'PIP_CALLS': str(folder/'calls'), 'PYTHONPATH': python_path}


def attach_wheels(root):
    "Attach a folder of wheels to the session in the folder `root`; an empty wheel is enough for the stand-in for pip."
    (root/'input'/'wheels').mkdir(parents=True)
    (root/'input'/'wheels'/'rapidfuzz-3-py3-none-any.whl').touch()


def outputs_of(notebook):
    "All outputs of an executed notebook."
    return [output for cell in json.loads(notebook.read_text())['cells'] for output in cell.get('outputs', [])]


def text_of(outputs): return ''.join(''.join(o.get('text', [])) + o.get('evalue', '') for o in outputs)


def execute(notebook, root, environment, **values):
    """Run the notebook in the folder `root` with read-only inputs. Returns papermill's exit status, the notebook's
    output and errors, and papermill's errors."""
    folders = dict(input_dir=str(root/'input'), work_dir=str(root/'working'), scratch_dir=str(root/'scratch'))
    (root/'parameters.json').write_text(json.dumps(folders | dict(package='nowhere') | values))
    out = root/'out.ipynb'
    command = [sys.executable, '-c', PAPERMILL, NOTEBOOKS/notebook, out, root/'parameters.json']
    (root/'input').mkdir(exist_ok=True)
    attached = [root/'input', *(root/'input').rglob('*')]
    for p in attached: p.chmod(0o555 if p.is_dir() else 0o444)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    for p in attached: p.chmod(0o755)   # So that pytest can clean up
    return done.returncode, text_of(outputs_of(out)) if out.exists() else '', done.stderr


def train(root, environment, **values):
    "Run train.ipynb on the small model, which must succeed, and return its output."
    status, text, error = execute('train.ipynb', root, environment, **dict(preset='demo', overrides=SMALL) | values)
    assert status == 0, error[-3000:]
    return text


def attach(root, *earlier):
    "Attach the recordings of the first earlier session and the outputs of all of them to the session in `root`."
    for kind in ('competitions', 'wheels'):
        if (earlier[0]/'input'/kind).exists(): shutil.copytree(earlier[0]/'input'/kind, root/'input'/kind)
    for i, other in enumerate(earlier):
        shutil.copytree(other/'working', root/'input'/'notebooks'/'someone'/f'version-{i}')
