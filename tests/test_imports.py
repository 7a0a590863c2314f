"What importing the library needs and brings along: no framework but the one that a room is about, and one clear sentence where that is missing."
import ast
import json
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import b2t_kaggle

ROOT = Path(__file__).parent.parent
MODULES = sorted(m.name for m in pkgutil.walk_packages(b2t_kaggle.__path__, 'b2t_kaggle.'))
TENSORFLOW = [m for m in MODULES if m.startswith('b2t_kaggle.tensorflow.')]
PYTORCH = [m for m in MODULES if m.startswith('b2t_kaggle.pytorch.')]
LANGUAGE_MODELS = [f'b2t_kaggle.rescoring.{m}' for m in ('llm', 'mixture', 'finetune')]

HIDE = '''
import importlib, json, sys

class Without:
    "A finder that does not find these packages."
    def __init__(self, finder, names): self.finder, self.names = finder, names
    def find_spec(self, name, *args): return None if name.split('.')[0] in self.names else self.finder.find_spec(name, *args)

missing, *given = json.loads(sys.argv[1])
sys.meta_path[:] = [Without(f, missing) for f in sys.meta_path]
'''
IMPORT = HIDE + '''
modules, watched = given
errors = {}
for m in modules:
    try: importlib.import_module(m)
    except ImportError as e: errors[m] = str(e)
print(json.dumps([errors, sorted({m.split('.')[0] for m in sys.modules} & set(watched))]))
'''


def process(code, *given):
    "Run code in a new process with this as its arguments."
    return subprocess.run([sys.executable, '-c', code, json.dumps(given)], capture_output=True, text=True, timeout=180, env=os.environ | {'PYTHONPATH': str(ROOT), 'TF_CPP_MIN_LOG_LEVEL': '2'})


def load(modules, missing=(), watched=()):
    "Import modules in a new process in which packages are missing; the errors by module, and which of the watched packages it loaded."
    r = process(IMPORT, missing, modules, watched)
    assert r.returncode == 0, r.stderr
    return json.loads(r.stdout.splitlines()[-1])


def test_neither_tensorflow_nor_torch_xla_is_needed():
    errors, loaded = load([m for m in MODULES if m not in TENSORFLOW], ['tensorflow', 'keras', 'torch_xla'], ['tensorflow', 'keras', 'torch_xla'])
    assert errors == {} and loaded == []


def test_decoding_needs_no_framework():
    "All that is about neither a framework nor large language models."
    heavy = ['torch', 'torch_xla', 'tensorflow', 'keras', 'jax', 'transformers', 'peft', 'redis']
    errors, loaded = load([m for m in MODULES if m not in TENSORFLOW + PYTORCH + LANGUAGE_MODELS], heavy, heavy)
    assert errors == {} and loaded == []


def test_rooms_of_tensorflow_say_what_to_install():
    errors, loaded = load(TENSORFLOW, ['tensorflow', 'keras'], ['tensorflow', 'keras'])
    assert loaded == [] and list(errors) == TENSORFLOW
    assert {m: e for m, e in errors.items() if 'pip install b2t_kaggle[tf]' not in e} == {}


def test_the_command_says_in_one_line_what_to_install(tmp_path):
    (tmp_path/'best.weights.h5').touch()
    command = ['convert', str(tmp_path/'best.weights.h5'), str(tmp_path/'best.pt')]
    r = process(HIDE + 'from b2t_kaggle.cli import main; main(*given)', ['tensorflow', 'keras'], command)
    assert r.returncode == 1 and r.stderr.startswith('Error: the models in b2t_kaggle.tensorflow need TensorFlow') and 'pip install b2t_kaggle[tf]' in r.stderr, r.stderr
    assert len(r.stderr.splitlines()) == 1 and not (tmp_path/'best.pt').exists()


def test_rooms_of_pytorch_bring_no_tensorflow():
    errors, loaded = load(PYTORCH, watched=['torch', 'tensorflow', 'keras', 'torch_xla'])
    assert errors == {} and loaded == ['torch']


def test_rooms_of_tensorflow_bring_no_pytorch():
    pytest.importorskip('tensorflow')
    errors, loaded = load(TENSORFLOW, ['torch'], ['torch', 'torch_xla', 'tensorflow'])
    assert errors == {} and loaded == ['tensorflow']


@pytest.mark.parametrize('room, other', [('tensorflow', 'pytorch'), ('pytorch', 'tensorflow')])
def test_no_room_imports_the_other_even_inside_a_function(room, other):
    for path in sorted((ROOT/'b2t_kaggle'/room).glob('*.py')):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or '', *(a.name for a in node.names)] if isinstance(node, ast.ImportFrom) else []
            assert not [n for n in names if other in n.split('.') or (n == 'torch' and room == 'tensorflow')], f'{path.name}, line {node.lineno}'
