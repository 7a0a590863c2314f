"How the notebooks in nbs/kaggle come by the kit and by packages that are missing, and what they leave alone."
import json
import subprocess
import sys

import pytest
from kaggle_session import NOTEBOOKS, trap_pip

# The cells up to the one that prints what is attached, on a machine without the kit and without one of its packages
START = '''
import importlib.util, json, os, sys
find_spec = importlib.util.find_spec
absent = json.loads(os.environ["ABSENT"])
importlib.util.find_spec = lambda name, *args: None if name in absent else find_spec(name, *args)
variables = {}
for cell in [c for c in json.load(open(sys.argv[1]))["cells"] if c["cell_type"] == "code"][:3]:
    exec("".join(cell["source"]), variables)
    if "parameters" in cell["metadata"].get("tags", []):
        folders = dict(input_dir=sys.argv[2], work_dir=sys.argv[3], scratch_dir=sys.argv[3])
        variables |= folders | dict(package=os.environ.get("PACKAGE"))
print("PATH", sys.path[0], os.environ["PYTHONPATH"].split(os.pathsep)[0])
'''
BOTH = pytest.mark.parametrize('notebook', ['train_tpu.ipynb', 'train_tensorflow.ipynb'])


def start(notebook, room, absent=('b2t_kaggle', 'rapidfuzz'), **variables):
    "Run the first cells; returns the process, and what pip was calls_of_pip for."
    (room/'trap').mkdir()
    env = trap_pip(room/'trap') | {'ABSENT': json.dumps(absent)} | variables
    command = [sys.executable, '-c', START, NOTEBOOKS/notebook, room/'input', room/'working']
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    calls = room/'trap'/'calls'
    return done, [line.split() for line in calls.read_text().splitlines()] if calls.exists() else []


@BOTH
def test_the_kit_and_what_is_missing_come_from_wheels(notebook, tmp_path):
    wheels = tmp_path/'input'/'my-wheels'
    wheels.mkdir(parents=True)
    kit = wheels/'b2t_kaggle-0.1.0-py3-none-any.whl'
    kit.touch()
    done, calls_of_pip = start(notebook, tmp_path)
    assert done.returncode == 0, done.stderr
    held = tmp_path/'working'/'held.txt'
    assert calls_of_pip == [
        ['install', '--quiet', '--no-deps', str(kit)],
        ['install', '--quiet', '--constraint', str(held), '--no-index', f'--find-links={wheels}', 'rapidfuzz'],
    ]
    assert {line.split('==')[0] for line in held.read_text().splitlines()} >= {'numpy', 'torch'}


@BOTH
def test_neither_wheels_nor_the_internet(notebook, tmp_path):
    done, calls_of_pip = start(notebook, tmp_path, PACKAGE='the-source')
    assert [a[-1] for a in calls_of_pip] == ['the-source', 'rapidfuzz'] and done.returncode
    assert 'rapidfuzz: not installed (no route to the index)' in done.stderr
    assert 'attach a dataset with wheels for Python 3.' in done.stderr


def test_tensorflow_brings_no_tensorboard_along(tmp_path):
    "So the notebook asks for it."
    absent = ('b2t_kaggle', 'tensorboard')
    done, calls_of_pip = start('train_tensorflow.ipynb', tmp_path, absent, PACKAGE='the-source')
    assert [a[-1] for a in calls_of_pip] == ['the-source', 'tensorboard'] and 'missing: tensorboard' in done.stdout


@BOTH
def test_an_attached_source_folder_is_used_as_it_is(notebook, tmp_path):
    source = tmp_path/'input'/'b2t'
    (source/'b2t_kaggle').mkdir(parents=True)
    (source/'settings.ini').touch()
    done, calls_of_pip = start(notebook, tmp_path, absent=('b2t_kaggle',))
    assert done.returncode == 0 and calls_of_pip == [], done.stderr
    assert f'PATH {source} {source}' in done.stdout
    assert 'nothing to install' in done.stdout


@BOTH
@pytest.mark.parametrize('attached', [0, 2])
def test_without_the_kit_it_says_what_to_attach(notebook, attached, tmp_path):
    for i in range(attached):
        (tmp_path/'input'/str(i)).mkdir(parents=True)
        (tmp_path/'input'/str(i)/'b2t_kaggle-0.1.0-py3-none-any.whl').touch()
    done, calls_of_pip = start(notebook, tmp_path)
    error = f'RuntimeError: b2t_kaggle is not installed, and attached {attached} times; attach one dataset'
    assert error in done.stderr and calls_of_pip == []


def test_what_must_stand_in_both_notebooks_is_the_same():
    def start_cell(notebook):
        cells = [''.join(cell['source']) for cell in json.loads((NOTEBOOKS/notebook).read_text())['cells']]
        cell, = [cell for cell in cells if 'settings.ini' in cell]
        return cell.split('importlib.invalidate_caches()')[0]
    assert start_cell('train_tpu.ipynb') == start_cell('train_tensorflow.ipynb')
