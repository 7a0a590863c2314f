"""Committed notebooks: outputs of benchmarks and reader's notebooks belong to their code, other notebooks have no
outputs, and no notebook exports much code before an example runs."""
import ast
import base64
import io
import json
import re
import sys
from pathlib import Path

import pytest
from nbformat import ValidationError, validate
from nbformat.warnings import DuplicateCellId
from PIL import Image

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT/'tools'))
from bench import LARGEST, code_hash, is_reader, problem, readers, stamped, without_words  # noqa: E402

BENCHMARKS = sorted((ROOT/'nbs'/'benchmarks').glob('*.ipynb'))
NOTEBOOKS = sorted(p for p in (ROOT/'nbs').rglob('*.ipynb') if p.parent.name != '.ipynb_checkpoints')
NOTEBOOK = {'metadata': {'kernelspec': {'name': 'python3'}}, 'nbformat': 4, 'nbformat_minor': 5, 'cells': [
    {'cell_type': 'markdown', 'source': ['# A title'], 'metadata': {}, 'id': 'c000'},
    {'cell_type': 'code', 'source': ['x = 1\n', 'x'], 'metadata': {}, 'id': 'c001',
     'outputs': [{'text': '1'}, {'name': 'stderr', 'text': 'a bar\r'}]}]}


@pytest.mark.parametrize('path', [*BENCHMARKS, *readers()], ids=lambda p: p.stem)
def test_outputs_belong_to_the_code(path):
    found = problem(path)
    assert found is None, found


@pytest.mark.filterwarnings('error') # nbformat only warns if two cells have the same id
def test_notebooks_have_a_valid_format():
    for path in NOTEBOOKS:
        try: validate(json.loads(path.read_text(encoding='utf-8')))
        except (ValidationError, DuplicateCellId) as e: pytest.fail(f'{path.relative_to(ROOT)}: {e}')


def test_other_notebooks_have_no_outputs():
    for path in NOTEBOOKS:
        notebook = json.loads(path.read_text(encoding='utf-8'))
        if path.parent.name == 'benchmarks' or is_reader(notebook): continue
        cells = [c['id'] for c in notebook['cells'] if c.get('outputs')]
        assert not cells, f'{path.relative_to(ROOT)}: outputs belong to the site'


def test_changed_code_is_detected_and_changed_text_is_not(tmp_path):
    path = tmp_path/'x.ipynb'
    def write(notebook): path.write_text(json.dumps(notebook))
    write(NOTEBOOK)
    assert 'never executed' in problem(path)
    done = json.loads(json.dumps(stamped(NOTEBOOK, 'a machine', 'abc')))
    write(done)
    assert problem(path) is None and done['metadata']['b2t']['machine'] == 'a machine'
    assert done['cells'][-1]['source'][0].endswith('on a machine, commit abc.*')
    assert done['cells'][1]['outputs'] == [{'text': '1'}]   # stderr is not an output of the code
    assert len(stamped(done, 'another', 'def')['cells']) == len(done['cells']) and code_hash(done) == code_hash(
        NOTEBOOK
    )
    done['cells'][0]['source'] = ['# Another title']
    write(done)
    assert problem(path) is None
    done['cells'][1]['source'] = ['x = 2\n', 'x']
    write(done)
    assert 'its code changed since' in problem(path)
    done['cells'][1].update(source=NOTEBOOK['cells'][1]['source'], outputs=[])
    write(done)
    assert 'outputs are gone' in problem(path)


CODE = """#| hide
def f(
    x, # A number
):
    "What it does."
    return '# no comment'
"""


@pytest.mark.parametrize('part, is_code', [
    ('A number', False), ('What it does.', False), ('#| hide', True), ('# no comment', True), ('return', True)])
def test_words_in_code_may_change_and_code_may_not(part, is_code):
    assert (without_words(CODE.replace(part, 'other')) != without_words(CODE)) == is_code


def test_a_cell_with_magics_is_hashed_as_it_is():
    assert without_words('%pip list # Words') == '%pip list # Words'


def test_a_readers_notebook_has_its_pictures_and_is_small(tmp_path):
    drawn = io.BytesIO()
    Image.new('RGB', (8, 8)).save(drawn, 'png')
    picture = dict(data={'image/png': base64.b64encode(drawn.getvalue()).decode()})
    path = tmp_path/'x.ipynb'
    def problem_with(*outputs):
        notebook = json.loads(json.dumps(NOTEBOOK | dict(metadata=dict(b2t=dict(pictures=2)))))
        notebook['cells'][1]['outputs'] = list(outputs)
        done = stamped(notebook, 'a machine', 'abc')
        assert len(done['cells']) == 2 # The line at the end of a benchmark would be part of the README
        path.write_text(json.dumps(done))
        return problem(path)
    assert problem_with(picture, picture) is None
    assert 'x.ipynb: 1 pictures, expected at least 2' == problem_with(picture)
    assert 'bytes of outputs' in problem_with(picture, picture, {'text': '.'*LARGEST})


# Readers see code run: exported cells are followed by examples
MOST_EXPORTED = 80 # Lines of code


def statements(source): return ast.parse(re.sub(r'(?m)^[%!].*', '', source)).body


def lines_of_code(source):
    "Lines that are not empty, comments or standalone strings."
    alone = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)]
    prose = {i for n in alone if isinstance(n.value.value, str) for i in range(n.lineno, n.end_lineno + 1)}
    lines = enumerate(source.splitlines(), 1)
    return sum(i not in prose and line.strip()[:1] not in ('', '#') for i, line in lines)


def runs_something(source):
    "Whether a cell is an example: tests execute it, and it does more than import and define."
    if re.search(r'(?m)^#\| *(default_exp|bench|eval: *false)', source): return False
    return any(not isinstance(s, ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef)
               for s in statements(source))


def longest_export(notebook):
    "The largest number of exported lines without an example between them, and the cell that ends them."
    longest = (0, '')
    n = 0
    for cell in notebook['cells']:
        source = ''.join(cell['source'])
        if cell['cell_type'] != 'code': continue
        if re.search(r'(?m)^#\| *export', source):
            n += lines_of_code(source)
            longest = max(longest, (n, cell['id']))
        elif runs_something(source): n = 0
    return longest


def test_no_notebook_exports_much_before_something_runs():
    found = {p: longest_export(json.loads(p.read_text(encoding='utf-8'))) for p in NOTEBOOKS}
    long = [f'{p.relative_to(ROOT)}: {n} lines, to cell {cell}' for p, (n, cell) in found.items() if n > MOST_EXPORTED]
    assert long == [], 'split the cells, and put a small example between'


def test_exported_lines_are_counted_up_to_an_example():
    exported = '#| export\ndef f(x):\n    "Twice."\n\n    # as it says\n    return 2*x\n\'\'\'a\nb\'\'\''
    assert lines_of_code(exported) == 2
    def longest(*sources):
        return longest_export({'cells': [{'cell_type': 'code', 'id': str(i), 'source': s}
                                         for i, s in enumerate(sources)]})
    assert longest(exported, 'import os', 'def g(): pass', '#| bench\nf(1)', exported) == (4, '4')
    assert longest(exported, '#| hide\n%matplotlib inline\nassert f(1) == 2', exported) == (2, '2')
