"""Test the packages that importing the library needs and loads, and the layers of modules.

A module imports only the framework of its own package, and a clear sentence says which one is missing.
"""
import ast
import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import b2t_kaggle

ROOT = Path(__file__).parent.parent
# Modules are found as files: `pkgutil.walk_packages` would import the packages, and TensorFlow with them
FILES = [p.relative_to(ROOT).with_suffix('').parts for p in (ROOT/'b2t_kaggle').glob('*/**/*.py')]
FILES += [('b2t_kaggle', p.stem) for p in (ROOT/'b2t_kaggle').glob('*.py') if p.name != '__init__.py']
MODULES = sorted('.'.join(parts).removesuffix('.__init__') for parts in FILES)


def source(module):
    "The file of a module or package."
    path = ROOT.joinpath(*module.split('.'))
    return path/'__init__.py' if path.is_dir() else path.with_suffix('.py')


def is_empty(module): return not source(module).read_text().strip()


TENSORFLOW = [m for m in MODULES if m.startswith('b2t_kaggle.tensorflow.') and not is_empty(m)]
PYTORCH = [m for m in MODULES if m.startswith(('b2t_kaggle.pytorch.', 'b2t_kaggle.devices.products'))]
LANGUAGE_MODELS = [f'b2t_kaggle.{m}' for m in ('lm.causal', 'lm.finetune', 'rescoring.fusion')]

HIDE = '''
import importlib, json, sys

class Without:
    "A finder that does not find these packages."
    def __init__(self, finder, names):
        self.finder = finder
        self.names = names
    def find_spec(self, name, *args):
        return None if name.split('.')[0] in self.names else self.finder.find_spec(name, *args)

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
    "Run code in a new process with these arguments."
    env = os.environ | {'PYTHONPATH': str(ROOT), 'TF_CPP_MIN_LOG_LEVEL': '2'}
    return subprocess.run([sys.executable, '-c', code, json.dumps(given)], capture_output=True, text=True, timeout=400,
                          env=env)


def load(modules, missing=(), watched=()):
    """Import modules in a new process in which packages are missing.

    Returns the errors by module, and which of the watched packages were loaded.
    """
    r = process(IMPORT, missing, modules, watched)
    assert r.returncode == 0, r.stderr
    return json.loads(r.stdout.splitlines()[-1])


def test_neither_tensorflow_nor_torch_xla_nor_kenlm_is_needed():
    others = [m for m in MODULES if m not in TENSORFLOW]
    missing = ['tensorflow', 'keras', 'torch_xla', 'kenlm']
    errors, loaded = load(others, missing, missing)
    assert errors == {} and loaded == []


def test_the_configuration_needs_no_tables():
    top = ('b2t_kaggle.config', 'b2t_kaggle.core.reading')
    errors, loaded = load([m for m in MODULES if m.startswith(top)], watched=['pandas', 'pyarrow', 'h5py', 'numba'])
    assert errors == {} and loaded == []


def test_decoding_needs_no_framework():
    "All modules except those of frameworks and large language models."
    heavy = ['torch', 'torch_xla', 'tensorflow', 'keras', 'jax', 'transformers', 'peft', 'redis', 'kenlm']
    errors, loaded = load([m for m in MODULES if m not in TENSORFLOW + PYTORCH + LANGUAGE_MODELS], heavy, heavy)
    assert errors == {} and loaded == []


def test_the_decoder_needs_only_numpy_numba_rapidfuzz_and_fastcore(tmp_path):
    "The decoder decodes a whole trial and a stream while every other package is hidden."
    lines = ['\\data\\', 'ngram 1=5', '', '\\1-grams:', '-99\t<s>', '-1\t</s>', '-2\t<unk>', '-0.5\ti',
             '-0.7\tsee', '\\end\\']
    (tmp_path/'lm.arpa').write_text('\n'.join([*lines, '']))
    code = """
import sys

class Alone:
    "A finder that finds these packages only, and Python's own."
    def __init__(self, finder): self.finder = finder
    def find_spec(self, name, *args):
        known = {'b2t_kaggle', 'numpy', 'numba', 'llvmlite', 'rapidfuzz', 'fastcore'} | sys.stdlib_module_names
        return self.finder.find_spec(name, *args) if name.split('.')[0] in known else None

sys.meta_path[:] = map(Alone, sys.meta_path)
import numpy as np
from b2t_kaggle import LexiconBeamDecoder, Stream, load_ngram
from b2t_kaggle.phonemes import to_class_ids
decoder = LexiconBeamDecoder({'i': [['AY']], 'see': [['S', 'IY']]}, load_ngram('lm.arpa'))
x = np.full((6, 41), -9.)
x[range(6), to_class_ids('AY SIL S IY SIL SIL'.split())] = 0
x -= np.logaddexp.reduce(x, axis=1)[:, None]
stream = Stream(decoder)
for row in x: stream.push(row[None])
print(decoder.decode_all([x, x], progress=False)[1][0].text, '|', stream.finish()[0].text)
"""
    r = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, timeout=400, cwd=tmp_path,
                       env=os.environ | {'PYTHONPATH': str(ROOT)})
    assert (r.returncode, r.stdout) == (0, 'i see | i see\n'), r.stderr


def test_the_decoder_loads_no_tables_and_no_framework():
    watched = ['pandas', 'pyarrow', 'tqdm', 'torch', 'tensorflow', 'transformers', 'pydantic', 'h5py']
    assert load(['b2t_kaggle.decoding.decoder', 'b2t_kaggle.decoding.streaming'], watched=watched) == [{}, []]


def test_tensorflow_packages_say_what_to_install():
    errors, loaded = load(TENSORFLOW, ['tensorflow', 'keras'], ['tensorflow', 'keras'])
    assert loaded == [] and list(errors) == TENSORFLOW
    assert {m: e for m, e in errors.items() if 'pip install b2t_kaggle[tf]' not in e} == {}


def test_the_command_says_in_one_line_what_to_install(tmp_path):
    (tmp_path/'best.weights.h5').touch()
    command = ['convert', str(tmp_path/'best.weights.h5'), str(tmp_path/'best.pt')]
    r = process(HIDE + 'from b2t_kaggle.cli.command import main; main(*given)', ['tensorflow', 'keras'], command)
    assert r.returncode == 1 and 'pip install b2t_kaggle[tf]' in r.stderr, r.stderr
    assert r.stderr.startswith('Error: the models in b2t_kaggle.tensorflow need TensorFlow')
    assert len(r.stderr.splitlines()) == 1 and not (tmp_path/'best.pt').exists()


def test_pytorch_packages_do_not_load_tensorflow():
    errors, loaded = load(PYTORCH, watched=['torch', 'tensorflow', 'keras', 'torch_xla'])
    assert errors == {} and loaded == ['torch']


def test_tensorflow_packages_do_not_load_pytorch():
    pytest.importorskip('tensorflow')
    errors, loaded = load(TENSORFLOW, ['torch', 'kenlm'], ['torch', 'torch_xla', 'tensorflow'])
    assert errors == {} and loaded == ['tensorflow']


# Which module imports which, read from the source, so that imports inside functions are included even if no test runs
# them. From top to bottom: a module imports from its own package and from those below
LAYERS = ('cli', 'kaggle', 'pipeline', 'rescoring', 'pytorch', 'tensorflow', 'decoding', 'lm', 'training', 'data',
          'logits', 'metrics', 'config', 'devices', 'core', 'phonemes')
LAYER = {layer: i for i, layer in enumerate(LAYERS)}


@cache
def imported(module):
    "Imports of a module's source, at its top or inside functions: dotted names of modules or of names in them."
    package = module if source(module).name == '__init__.py' else module.rpartition('.')[0]
    return list(names_imported(source(module).read_text(), package))


def names_imported(code, package=''):
    "Names that code of a package imports."
    tree = ast.parse(code)
    for node in ast.walk(tree):   # Imports for type checkers only do not count
        if isinstance(node, ast.If) and ast.unparse(node.test) == 'TYPE_CHECKING': node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import): yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split('.')[:len(package.split('.')) + 1 - node.level] if node.level else []
            base = '.'.join([*above, *filter(None, [node.module])])
            yield from (f'{base}.{alias.name}' for alias in node.names)


def module_of(name):
    "The module of the kit that an imported name is or belongs to; `None` for other packages."
    while name not in MODULES and '.' in name: name = name.rpartition('.')[0]
    return name if name in MODULES else None


def import_graph():
    "The modules that each exported module imports, without the package's name."
    graph = {}
    for module in MODULES:
        if module.endswith('._modidx'): continue
        targets = {module_of(name) for name in imported(module)} - {None, module}
        graph[module.removeprefix('b2t_kaggle.')] = {t.removeprefix('b2t_kaggle.') for t in targets}
    return graph


def layer_of(module): return module.split('.')[0]


def is_upward(module, target):
    "Whether an import goes up, or from one framework to the other."
    if {layer_of(module), layer_of(target)} == {'pytorch', 'tensorflow'}: return True
    return LAYER[layer_of(target)] < LAYER[layer_of(module)]


def find_cycle(graph):
    "A cycle of modules that import each other, or an empty list."
    done = set()
    def visit(module, path):
        if module in path: return path[path.index(module):]
        if module in done: return []
        for target in sorted(graph[module]):
            if circle := visit(target, path + [module]): return circle
        done.add(module)
        return []
    return next(filter(None, (visit(module, []) for module in graph)), [])


def test_all_imports_are_read_from_the_source():
    graph = import_graph()
    assert 'devices.machine' in graph['devices.torch'] and 'phonemes' in graph['core.ctc']
    assert 'lm.causal' in graph['pipeline.decoder'] # inside a function
    assert not graph['core.messages']


def test_every_module_is_in_a_layer():
    assert {layer_of(module) for module in import_graph()} <= set(LAYER)


def test_imports_point_downward_only():
    graph = import_graph()
    upward = {(module, target) for module in graph for target in graph[module] if is_upward(module, target)}
    assert upward == set(), 'imports that point upward, or from one framework to the other'


def test_no_modules_import_each_other():
    graph = import_graph()
    assert find_cycle(graph) == []


def test_cycles_are_found():
    assert find_cycle({'a': {'b'}, 'b': {'c'}, 'c': {'b'}}) == ['b', 'c']
    assert find_cycle({'a': {'b', 'c'}, 'b': {'c'}, 'c': set()}) == []


@pytest.mark.parametrize('layer, other', [('tensorflow', 'pytorch'), ('pytorch', 'tensorflow')])
def test_frameworks_do_not_import_each_other_even_inside_functions(layer, other):
    for module in [m for m in MODULES if m.startswith(f'b2t_kaggle.{layer}.')]:
        names = [n for n in imported(module) if module_of(n) or n.split('.')[0] in ('torch', 'tensorflow', 'keras')]
        forbidden = {'tensorflow': {'pytorch', 'torch'}, 'pytorch': {'tensorflow', 'keras'}}[layer]
        for name in names:
            top = name.removeprefix('b2t_kaggle.').split('.')[0]
            assert top not in forbidden and f'devices.{other.removeprefix("py")}' not in name, module


# A name with an underscore is private to its package, however it is imported or reached through a module
def private_imports(graph_of_names):
    """Triples (module, other, name) of private names that a module takes from a module of another package.

    `graph_of_names` has the dotted names that each module imports or reaches.
    """
    for module, names in graph_of_names.items():
        for name in names:
            other, _, last = name.rpartition('.')
            if last.startswith('_') and not last.endswith('__') and layer_of(other) != layer_of(module):
                yield module, other, last


def names_reached(code, package):
    "Dotted names that the code imports, and attributes of what it imports."
    names = list(names_imported(code, package))
    known = {name.rpartition('.')[2]: name for name in names}
    attributes = [n for n in ast.walk(ast.parse(code)) if isinstance(n, ast.Attribute)]
    reached = [(n.value.id, n.attr) for n in attributes if isinstance(n.value, ast.Name)]
    return {*names, *(f'{known[name]}.{attribute}' for name, attribute in reached if name in known)}


def names_of_ours():
    "The kit's names that each module imports or reaches, without the package's name."
    found = {}
    for module in MODULES:
        package = module if source(module).name == '__init__.py' else module.rpartition('.')[0]
        names = names_reached(source(module).read_text(), package)
        ours = [n.removeprefix('b2t_kaggle.') for n in sorted(names) if module_of(n)]
        found[module.removeprefix('b2t_kaggle.')] = ours
    return found


def test_no_private_name_is_imported_from_another_package():
    assert sorted(private_imports(names_of_ours())) == []


def test_a_private_name_of_another_package_is_found():
    code = 'from ..lm import causal\nfrom ..lm.causal import _b, c\nfrom . import own\nown._e, c.d, causal._f'
    found = names_reached(code, 'b2t_kaggle.rescoring')
    ours = {'rescoring.online': [n.removeprefix('b2t_kaggle.') for n in sorted(found)]}
    assert list(private_imports(ours)) == [('rescoring.online', 'lm.causal', name) for name in ('_b', '_f')]


# Notebooks are read in the order of their numbers
def notebooks(root):
    "Notebooks in a folder that export modules, by path: the module, and the code of all cells."
    found = {}
    for path in sorted(root.rglob('[0-9]*.ipynb')):
        if path.parent.name == '.ipynb_checkpoints': continue
        cells = json.loads(path.read_text(encoding='utf-8'))['cells']
        code = '\n'.join(''.join(c['source']) for c in cells if c['cell_type'] == 'code')
        if module := re.search(r'^#\| *default_exp +(\S+)', code, re.MULTILINE):
            # Lines that only IPython understands are not imports
            found[path] = (f'b2t_kaggle.{module[1]}'.removesuffix('.__init__'), re.sub(r'(?m)^[%!].*', '', code))
    return found


def number(path): return int(re.match(r'\d+', path.name)[0])


def out_of_order(root):
    "Pairs of notebooks in one folder, the first of which imports the second although its number is not higher."
    found = notebooks(root)
    home = {module: path for path, (module, _) in found.items()}
    for path, (module, code) in found.items():
        for target in {module_of(name) for name in names_imported(code)} & home.keys() - {module}:
            other = home[target]
            if other.parent == path.parent and number(other) >= number(path):
                yield path.relative_to(root).as_posix(), other.relative_to(root).as_posix()


def test_a_notebook_has_a_higher_number_than_those_it_imports():
    assert sorted(out_of_order(ROOT/'nbs')) == []


@pytest.mark.parametrize('name, found', [('00_files', True), ('01_files', True), ('02_files', False)])
def test_notebooks_out_of_order_are_found(tmp_path, name, found):
    def write(name, *cells):
        cells = [{'cell_type': 'code', 'source': [cell]} for cell in cells]
        (tmp_path/f'{name}.ipynb').write_text(json.dumps({'cells': cells}))
    write('01_metrics', '#| default_exp metrics.__init__')
    write(name, '#| default_exp core.files', '%matplotlib inline\nfrom b2t_kaggle.metrics import edit_distance')
    assert list(out_of_order(tmp_path)) == [(f'{name}.ipynb', '01_metrics.ipynb')] * found


def test_numbers_are_unique_in_a_folder():
    numbered = [(path.parent, number(path)) for path in sorted((ROOT/'nbs').rglob('[0-9]*.ipynb'))
                if path.parent.name != '.ipynb_checkpoints']
    assert len(numbered) == len(set(numbered))


def test_a_notebook_finds_the_helpers_of_the_tests_from_its_own_folder():
    "Run like `nbdev_test`; under pytest the helpers are always found."
    found = [path.parent/folder for path in (ROOT/'nbs').rglob('*.ipynb')
             for folder in re.findall(r"sys\.path\.append\('([^']*tests)'\)", path.read_text(encoding='utf-8'))]
    assert found and all(folder.resolve() == ROOT/'tests' for folder in found)


def test_the_package_has_few_modules_at_its_top():
    entries = {path.stem for path in (ROOT/'b2t_kaggle').iterdir() if path.suffix in ('', '.py')} - {'__pycache__'}
    assert len(entries - {'_modidx'}) <= 17


# Public names of the package: `from b2t_kaggle import …`
HEAVY = ['numpy', 'pandas', 'numba', 'pydantic', 'pyarrow', 'torch', 'tensorflow', 'keras', 'transformers']


def test_the_package_loads_nothing_by_itself():
    errors, loaded = load(['b2t_kaggle'], watched=HEAVY)
    assert errors == {} and loaded == []


def test_importing_the_package_loads_few_modules():
    "Importing the package loads only the package itself, `typing`, and the imports of `typing`."
    def loaded(name): return set(process(f'import sys, {name}; print(*sys.modules)').stdout.split())
    assert loaded('b2t_kaggle') - loaded('typing') == {'b2t_kaggle'}


def test_public_names_need_no_framework():
    code = HIDE + 'import b2t_kaggle\nprint([callable(getattr(b2t_kaggle, name)) for name in b2t_kaggle.__all__])'
    r = process(code, ['torch', 'tensorflow', 'keras', 'transformers'])
    assert r.returncode == 0, r.stderr
    assert r.stdout == f'{[True] * len(b2t_kaggle.__all__)}\n'


@pytest.mark.parametrize('name', b2t_kaggle.__all__)
def test_a_public_name_equals_that_of_its_module(name):
    value = getattr(b2t_kaggle, name)
    assert value is getattr(sys.modules[value.__module__], name) and value.__doc__


def test_type_checkers_see_the_public_names():
    "The names in the stub file are the existing names, from the same modules."
    stub = ast.parse((ROOT/'b2t_kaggle'/'__init__.pyi').read_text()).body
    names = {alias.asname: node.module for node in stub if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert names == {name: f'b2t_kaggle.{module}' for name, module in b2t_kaggle._MODULES.items()}
    assert sorted(names) == sorted(b2t_kaggle.__all__) and (ROOT/'b2t_kaggle'/'py.typed').exists()


def test_errors_about_unknown_public_names():
    with pytest.raises(AttributeError, match="no attribute 'trian'. Did you mean train?"): b2t_kaggle.trian
    with pytest.raises(AttributeError, match="It has Config.* the rest is in its modules"):
        b2t_kaggle.zzz
    with pytest.raises(ImportError):
        from b2t_kaggle import _nothing  # noqa: F401
    assert not hasattr(b2t_kaggle, '__wrapped__')


def test_public_modules_are_imported_when_they_are_used():
    code = "import sys, b2t_kaggle\nassert 'b2t_kaggle.metrics' not in sys.modules\n"
    code += "print(b2t_kaggle.metrics.word_error_rate(['a b'], ['a']), b2t_kaggle.phonemes.BLANK)"
    assert process(code).stdout == '0.5 0\n'


def test_dir_and_help_show_the_public_names():
    code = 'import b2t_kaggle; print(*dir(b2t_kaggle)); help(b2t_kaggle)'
    names, _, text = process(code).stdout.partition('\n')
    assert set(b2t_kaggle.__all__) <= set(names.split()) and '__version__' in names and '_TYPE_CHECKING' not in names
    for words in ('from recording sessions to a submission', 'class LexiconBeamDecoder', 'simulate_dataset(', 'train('):
        assert words in text, words


def test_modules_of_the_kit_do_not_import_public_names_from_the_package():
    for module in MODULES:
        names = {n.removeprefix('b2t_kaggle.') for n in imported(module) if n.startswith('b2t_kaggle.')}
        assert not names & set(b2t_kaggle.__all__), f'{module}: import from the module where the name is'


def test_public_names_are_enough_for_a_submission(tmp_path):
    "The program in the package's description, on a small simulation."
    code = """
from b2t_kaggle import *
simulate_dataset('sessions', n_sessions=2, train=10, val=2, test=2, max_words=4, lm_sentences=200)
small = dict(n_units=8, n_layers=1, num_training_batches=2, lr_warmup_steps=1, lr_warmup_steps_day=1, n_buckets=1,
             processes=1)
cfg = load_config(base='demo', overrides=small | {'data.batch_size': 8, 'days_per_batch': 2, 'accelerator': 'cpu'})
trials = {split: TrialStore.build('sessions', split, f'{split}.arrow') for split in ('train', 'val', 'test')}
train(trials['train'], trials['val'], cfg, 'model', progress=False)
logits = infer('model/best.pt', trials['test'], 'logits.arrow', 'cpu', progress=False)
build_ngram('sessions/lm_text.txt', 'lm.arpa')
decoder = LexiconBeamDecoder(build_lexicon(['i', 'you', 'the']), load_ngram('lm.arpa'), beam=10)
write_submission('submission.csv', [decoder.decode(log_probs)[0].text for log_probs in logits])
"""
    r = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, timeout=400, cwd=tmp_path,
                       env=os.environ | {'PYTHONPATH': str(ROOT)})
    assert r.returncode == 0, r.stderr
    assert [line.split(',')[0] for line in (tmp_path/'submission.csv').read_text().splitlines()] == ['id', '0', '1']
