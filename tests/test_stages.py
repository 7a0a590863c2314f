"Each stage has its own file, and no other module compares stage names to treat a stage differently."
import ast
import json
from pathlib import Path

import pytest

import b2t_kaggle
from b2t_kaggle.pipeline.stages import STAGES, Stage, notebook_path

PACKAGE = Path(b2t_kaggle.__file__).parent
FILES = [p for p in sorted(PACKAGE.rglob('*.py')) if p.name != '_modidx.py' and p != PACKAGE/'__init__.py']
# Last parts of expressions that are compared with names of splits or folders
OTHERS = 'split', 'folder.name'


def is_name(node): return isinstance(node, ast.Constant) and node.value in STAGES


def is_list_of_names(node):
    return isinstance(node, ast.Tuple | ast.Set | ast.List) and len(node.elts) > 1 and all(map(is_name, node.elts))


def spelled(tree):
    "Lines that compare a stage's name, or list several of them."
    public = [n.value for n in ast.walk(tree) if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == '__all__']
    for node in ast.walk(tree):
        if is_list_of_names(node) and node not in public: yield node.lineno
        if isinstance(node, ast.MatchValue) and is_name(node.value): yield node.value.lineno
        if not isinstance(node, ast.Compare): continue
        sides = [node.left, *node.comparators]
        has_name = any(is_name(side) or any(map(is_name, getattr(side, 'elts', ()))) for side in sides)
        if has_name and not any(ast.unparse(side).endswith(OTHERS) for side in sides): yield node.lineno


@pytest.mark.parametrize('code, found', [
    ("name == 'train'", True), ("x != 'lm'", True), ("'decode' in stages", True), ("name in ('pack', 'x')", True),
    ("names = {'infer', 'lm'}", True), ("match name:\n    case 'report': pass", True), ("x.split == 'train'", False),
    ("for split in ('train', 'val'): pass", False), ("StageRun(run, 'train')", False), ("name == 'other'", False)])
def test_names_in_code_are_found(code, found): assert bool(list(spelled(ast.parse(code)))) == found


def test_no_module_compares_names_of_stages():
    found = {f'{p.relative_to(PACKAGE)}:{line}' for p in FILES for line in spelled(ast.parse(p.read_text()))}
    assert found == set(), 'say on the class of the stage what is special about it'


def test_a_stage_is_a_file():
    for name, stage in STAGES.items():
        assert isinstance(stage, Stage) and type(stage).__module__ == f'b2t_kaggle.pipeline.stages.{name}'
        assert stage.does and type(stage).run is not Stage.run


def test_notebooks_execute_their_stage_and_show_it():
    numbers = [notebook_path(name).name.partition('_')[0] for name in STAGES]
    assert len(set(numbers)) == len(STAGES) == len(list(notebook_path('train').parent.glob('*.ipynb')))
    for name in STAGES:
        cells = [c for c in json.loads(notebook_path(name).read_text())['cells'] if c['cell_type'] == 'code']
        code = '\n'.join(''.join(c['source']) for c in cells)
        assert code.count(f"run_stage('{name}', run_dir, work_dir, overrides)") == code.count('run_stage(') == 1
        assert len([line for line in code.splitlines() if line.strip()]) <= 25, name
        assert [c['metadata'].get('tags') for c in cells][0] == ['parameters']
