"Number of parameters, division of classes, and order of definitions in the package, read from the source."
import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent/'b2t_kaggle'
TREES = {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text())
         for path in sorted(PACKAGE.rglob('*.py')) if path.name != '_modidx.py'}

MOST_POSITIONAL = 8
# Signatures that other programs call
OF_OTHERS = {
    'pytorch/models/gru.py: GRUDecoder',                         # The official constructor
    'tensorflow/models/gru.py: GRUDecoder',
    'pytorch/models/zipformer/encoder.py: Zipformer2',           # icefall's
    'pytorch/models/zipformer/layer.py: Zipformer2EncoderLayer',
    'pytorch/optimizer/scaled_adam.py: ScaledAdam',
}


def functions(node, owner=''):
    "Functions at every depth by name, without lambdas; a constructor has the name of its class."
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef): yield from functions(child, child.name)
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield owner if child.name == '__init__' else child.name, child
            yield from functions(child)
        else: yield from functions(child, owner)


def n_positional(function):
    "Number of parameters that can be passed by position, without `self`."
    names = [a.arg for a in (*function.args.posonlyargs, *function.args.args)]
    return len(names) - (names[:1] in (['self'], ['cls']))


def with_many(trees):
    "Functions with more positional parameters than allowed."
    return {f'{path}: {name}' for path, tree in trees.items() for name, function in functions(tree)
            if n_positional(function) > MOST_POSITIONAL}


def test_no_function_has_more_than_eight_positional_parameters():
    assert with_many(TREES) == OF_OTHERS, 'put a * before the options, or what belongs together into a named tuple'


@pytest.mark.parametrize('signature, n', [
    ('def f(a, b, c, d, e, f, g, h): pass', 0), ('def f(a, b, c, d, e, f, g, h, i): pass', 1),
    ('def f(a, /, b, c, d, e, f, g, h, i): pass', 1), ('def f(a, b, c, d, e, f, g, *, h, i, j): pass', 0),
    ('class A:\n def __init__(self, a, b, c, d, e, f, g, h): pass', 0),
    ('class A:\n def __init__(self, a, b, c, d, e, f, g, h, i): pass', 1),
    ('def f():\n def g(a, b, c, d, e, f, g, h, i): pass', 1)])
def test_positional_parameters_are_counted(signature, n):
    assert len(with_many({'a.py': ast.parse(signature)})) == n


# Private classes with a single subclass, and why they are not halves of a long class
HALVES_THAT_STAY = {
    '_StepsConfig': "a group's keys, of which pydantic wants one class; those of the steps have own checks",
}


def name_of(node):
    "The last name of `a.b.c` or `a[b]`."
    if isinstance(node, ast.Subscript): node = node.value
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, 'id', None)


def halves(trees):
    "Private classes that only one class uses, as its base."
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    private = {node.name for node in nodes if isinstance(node, ast.ClassDef) and node.name.startswith('_')}
    bases = [name_of(base) for node in nodes if isinstance(node, ast.ClassDef) for base in node.bases]
    used = [name_of(node) for node in nodes if isinstance(node, ast.Name | ast.Attribute)]
    return {name for name in private if bases.count(name) == 1 and used.count(name) == 1}


def test_no_private_class_is_half_of_another():
    assert halves(TREES) <= HALVES_THAT_STAY.keys(), 'merge it into the class, or find what each does by itself'


@pytest.mark.parametrize('code, found', [
    ('class _A: pass\nclass B(_A): pass', {'_A'}), ('class A: pass\nclass B(A): pass', set()),
    ('class _A: pass\nclass B(_A): pass\nclass C(_A): pass', set()), ('class _A: pass\nclass B(_A): pass\n_A()', set()),
    ('class _A: pass\nclass B(_A[int]): pass', {'_A'}), ('class _A: pass\nx = _A()', set())])
def test_halves_are_found(code, found):
    assert halves({'a.py': ast.parse(code)}) == found


LONG = 200 # Lines above which a module's main name is looked for
# Modules whose main class or function starts after the first third; each leaves the list when it is rewritten
LATE: set[str] = set()
MOST_DISGUISED = 20


def type_name(annotation):
    "Last name of a parameter's type: `Trainer` of `'trainer.Trainer | None'`."
    if annotation is None: return ''
    text = ast.unparse(annotation).strip('\'"')
    return text.split('|')[0].strip().split('[')[0].split('.')[-1]


def is_patch(node):
    return any(ast.unparse(d).startswith('patch') for d in getattr(node, 'decorator_list', ()))


def main_name(tree):
    "The longest public class, including patched methods, or else the longest function; and its first line."
    lines, first = {}, {}
    classes = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    for node in tree.body:
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef): continue
        name = type_name(node.args.args[0].annotation) if is_patch(node) else node.name
        if name.startswith('_'): continue
        lines[name] = lines.get(name, 0) + node.end_lineno - node.lineno + 1
        if not is_patch(node): first[name] = node.lineno
    names = [name for name in lines if name in first and name in classes] or [name for name in lines if name in first]
    best = max(names, key=lambda name: lines[name], default=None)
    return best and (best, first[best])


def disguised(tree):
    "Private functions whose first parameter is a class of their module, which should be methods."
    classes = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith('_') and not is_patch(node):
            parameters = [*node.args.posonlyargs, *node.args.args]
            if parameters and type_name(parameters[0].annotation) in classes: yield node.name


def test_the_main_class_or_function_comes_in_the_first_third():
    late = set()
    for path, tree in TREES.items():
        n = len((PACKAGE/path).read_text().splitlines())
        main = main_name(tree)
        if n > LONG and main and main[1] > n/3: late.add(path)
    assert late <= LATE, f'{sorted(late - LATE)}: begin with the main class, and patch its methods in below'
    assert LATE <= late, f'{sorted(LATE - late)} need not be in LATE any more'


def test_methods_are_in_their_classes():
    found = [f'{path}: {name}' for path, tree in TREES.items() for name in disguised(tree)]
    assert len(found) <= MOST_DISGUISED, '\n'.join(found)


def test_patched_methods_count_for_their_class():
    tree = ast.parse('def f(): pass\nclass A: pass\nclass B:\n x = 1\n@patch\ndef m(self: A):\n pass\n pass\n pass\n'
                     'def _g(a: A): pass\ndef _h(x: int): pass')
    assert main_name(tree) == ('A', 2) and list(disguised(tree)) == ['_g']
