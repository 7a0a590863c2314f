"""Test that the notebooks in nbs/kaggle find the kit, install missing packages, and leave Kaggle's packages alone."""
import json
import os
import re
import subprocess
import sys

import pytest
from kaggle_session import NOTEBOOKS, RECORDINGS, trap_pip
from killed import LIMIT

from b2t_kaggle.devices.kaggle_machines import KAGGLE_ACCELERATORS

# The cells up to the list of inputs, on a machine without the kit and without one of its packages
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
        given = json.loads(os.environ.get("PARAMETERS", "{}"))
        variables |= folders | dict(package=os.environ.get("PACKAGE")) | given
print("PATH", sys.path[0], os.environ["PYTHONPATH"].split(os.pathsep)[0])
'''
ALL = ('train.ipynb', 'submit.ipynb')


def start(root, absent=('b2t_kaggle.config', 'rapidfuzz'), notebook='train.ipynb', **variables):
    "Run the first cells; returns the process and the calls of pip."
    (root/'trap').mkdir()
    env = trap_pip(root/'trap') | {'ABSENT': json.dumps(absent)} | variables
    command = [sys.executable, '-c', START, NOTEBOOKS/notebook, root/'input', root/'working']
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT)
    calls = root/'trap'/'calls'
    return done, [line.split() for line in calls.read_text().splitlines()] if calls.exists() else []


def test_the_kit_and_missing_packages_are_installed_from_wheels(tmp_path):
    wheels = tmp_path/'input'/'my-wheels'
    wheels.mkdir(parents=True)
    kit = wheels/'b2t_kaggle-0.1.0-py3-none-any.whl'
    kit.touch()
    done, calls_of_pip = start(tmp_path)
    assert done.returncode == 0, done.stderr
    held = tmp_path/'working'/'held.txt'
    assert calls_of_pip == [
        ['install', '--quiet', '--no-deps', str(kit)],
        ['install', '--quiet', '--constraint', str(held), '--no-index', f'--find-links={wheels}', 'rapidfuzz'],
    ]
    assert {line.split('==')[0] for line in held.read_text().splitlines()} >= {'numpy', 'torch'}


def test_neither_wheels_nor_the_internet(tmp_path):
    done, calls_of_pip = start(tmp_path, PACKAGE='the-source')
    assert [a[-1] for a in calls_of_pip] == ['the-source', 'rapidfuzz'] and done.returncode
    assert 'rapidfuzz: not installed (no route to the index)' in done.stderr
    assert 'attach a dataset with wheels for Python 3.' in done.stderr


def test_tensorflow_does_not_install_tensorboard(tmp_path):
    "TensorFlow's packages do not include TensorBoard, so the notebook installs it."
    absent = ('b2t_kaggle.config', 'tensorboard')
    parameters = json.dumps(dict(framework='tensorflow'))
    done, calls_of_pip = start(tmp_path, absent, PACKAGE='the-source', PARAMETERS=parameters)
    assert [a[-1] for a in calls_of_pip] == ['the-source', 'tensorboard'] and 'missing: tensorboard' in done.stdout


def test_an_attached_source_folder_is_used_as_it_is(tmp_path):
    source = tmp_path/'input'/'b2t'
    (source/'b2t_kaggle').mkdir(parents=True)
    (source/'settings.ini').touch()
    (source/'b2t_kaggle'/'config').mkdir()
    done, calls_of_pip = start(tmp_path, absent=('b2t_kaggle.config',))
    assert done.returncode == 0 and calls_of_pip == [], done.stderr
    assert f'PATH {source} {source}' in done.stdout
    assert 'nothing to install' in done.stdout


@pytest.mark.parametrize('contents', [[], [b'this', b'that']])
def test_without_the_kit_it_says_what_to_attach(contents, tmp_path):
    "Without the kit, or with two different wheels of one version."
    for i, content in enumerate(contents):
        (tmp_path/'input'/str(i)).mkdir(parents=True)
        (tmp_path/'input'/str(i)/'b2t_kaggle-0.1.0-py3-none-any.whl').write_bytes(content)
    done, calls_of_pip = start(tmp_path)
    error = f'RuntimeError: b2t_kaggle is not installed, and attached {len(contents)} times; attach one dataset'
    assert error in done.stderr and calls_of_pip == []
    for i in range(len(contents)): assert f'{tmp_path}/input/{i}/b2t_kaggle-0.1.0-py3-none-any.whl' in done.stderr


def test_the_same_wheel_twice_and_through_links(tmp_path):
    """A wheel may be in folders for two images, or in one folder with two paths; a link back to the inputs is not
    followed."""
    (tmp_path/'input').mkdir()
    for name in ('gpu', 'tpu'):
        (tmp_path/'elsewhere'/name).mkdir(parents=True)
        (tmp_path/'elsewhere'/name/'b2t_kaggle-0.1.0-py3-none-any.whl').write_bytes(b'wheel')
    (tmp_path/'input'/'datasets').symlink_to(tmp_path/'elsewhere')
    (tmp_path/'elsewhere'/'inputs').symlink_to(tmp_path/'input')
    done, calls_of_pip = start(tmp_path)
    assert done.returncode == 0, done.stderr
    folders = [tmp_path/'input'/'datasets'/name for name in ('gpu', 'tpu')]
    assert calls_of_pip[0] == ['install', '--quiet', '--no-deps', str(folders[1]/'b2t_kaggle-0.1.0-py3-none-any.whl')]
    assert calls_of_pip[1][-3:] == [*(f'--find-links={folder}' for folder in folders), 'rapidfuzz']


def test_all_notebooks_start_with_the_same_cell():
    def start_cell(notebook):
        cells = [''.join(cell['source']) for cell in json.loads((NOTEBOOKS/notebook).read_text())['cells']]
        cell, = [cell for cell in cells if 'settings.ini' in cell]
        return cell
    assert len({start_cell(notebook) for notebook in ALL}) == 1


# The cell that finds the kit, in a process without it: its folders are removed from the path
WITHOUT_KIT = '''
import json, os, sys
sys.path[:] = [""] + [p for p in sys.path[1:] if not os.path.exists(os.path.join(p, "b2t_kaggle", "config"))]
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in str(finder)]
cells = ["".join(c["source"]) for c in json.load(open(sys.argv[1]))["cells"]]
cell, = [cell for cell in cells if "settings.ini" in cell]
exec(cell, dict(input_dir="input", package=None, accelerator="auto"))
import b2t_kaggle
print(b2t_kaggle.__file__)
'''


@pytest.mark.parametrize('is_whole', [True, False])
def test_a_checkout_in_the_working_folder_is_not_mistaken_for_the_kit(is_whole, tmp_path):
    "Python takes its folder for a package without modules, but the notebook uses it as a checkout."
    kit = tmp_path/'b2t_kaggle'/'b2t_kaggle'
    kit.mkdir(parents=True)
    (kit.parent/'settings.ini').touch()
    if is_whole:
        (kit/'__init__.py').touch()
        (kit/'config').mkdir()
        (kit/'config'/'__init__.py').touch()
    env = {k: v for k, v in os.environ.items() if k != 'PYTHONPATH'}
    command = [sys.executable, '-c', WITHOUT_KIT, NOTEBOOKS/'train.ipynb']
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=LIMIT)
    if is_whole: assert done.stdout.strip() == str(kit/'__init__.py'), done.stderr
    else: assert 'RuntimeError: b2t_kaggle is not installed, and attached 0 times' in done.stderr


def test_a_session_without_an_accelerator_says_so(tmp_path):
    "If recordings are attached, one error lists everything missing before anything is installed or computed."
    session = tmp_path/'input'/RECORDINGS/'t15.2023.08.11'
    session.mkdir(parents=True)
    (session/'data_train.hdf5').touch()
    done, _ = start(tmp_path, ('rapidfuzz',), CUDA_VISIBLE_DEVICES='-1')
    for words in ('This notebook cannot start', '- rapidfuzz: not installed', '- no GPU or TPU that pytorch can use',
                  'set accelerator="cpu"'):
        assert words in done.stderr, done.stderr
    assert not (tmp_path/'working'/'run').exists()


def test_a_notebook_for_the_tpu_on_the_standard_image(tmp_path):
    "The first cell raises the error before anything is installed."
    done, calls = start(tmp_path, ('rapidfuzz',), PARAMETERS='{"accelerator": "tpu"}')
    assert 'RuntimeError: no TPU: Kaggle started the notebook on its standard image' in done.stderr and not calls
    assert 'recordings:' not in done.stdout


def test_accelerators_have_one_name_each():
    "README, guides and notebooks use one name for each accelerator; benchmarks keep their recorded names."
    root = NOTEBOOKS.parents[1]
    paths = [root/'README.md', *(p for p in sorted((root/'nbs').rglob('*.ipynb')) if p.parent.name != 'benchmarks')]
    named = r'\b[TLP]\d+ ?[×x] ?\d\b|\bTPU v\d\w?-\d+\b'
    found = {name for path in paths for name in re.findall(named, path.read_text(encoding='utf-8'))}
    assert found - {'TPU v3-8'} == KAGGLE_ACCELERATORS.keys() - {'cpu'} # One page says that it is retired
