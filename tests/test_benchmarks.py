"Notebooks are as they are committed: the figures of a benchmark are those of its code, others have no outputs."
import json
import sys
from pathlib import Path

import pytest
from nbformat import ValidationError, validate
from nbformat.warnings import DuplicateCellId

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT/'tools'))
from bench import code_hash, problem, stamped  # noqa: E402

BENCHMARKS = sorted((ROOT/'nbs'/'benchmarks').glob('*.ipynb'))
NOTEBOOKS = sorted(p for p in (ROOT/'nbs').rglob('*.ipynb') if p.parent.name != '.ipynb_checkpoints')
NOTEBOOK = {'metadata': {'kernelspec': {'name': 'python3'}}, 'nbformat': 4, 'nbformat_minor': 5, 'cells': [
    {'cell_type': 'markdown', 'source': ['# A title'], 'metadata': {}, 'id': 'c000'},
    {'cell_type': 'code', 'source': ['x = 1\n', 'x'], 'metadata': {}, 'id': 'c001',
     'outputs': [{'text': '1'}, {'name': 'stderr', 'text': 'a bar\r'}]}]}


@pytest.mark.parametrize('path', BENCHMARKS, ids=lambda p: p.stem)
def test_outputs_are_those_of_the_code(path):
    found = problem(path)
    assert found is None, found


@pytest.mark.filterwarnings('error') # nbformat only warns of two cells with one id
def test_notebooks_are_as_their_format_says():
    for path in NOTEBOOKS:
        try: validate(json.loads(path.read_text(encoding='utf-8')))
        except (ValidationError, DuplicateCellId) as e: pytest.fail(f'{path.relative_to(ROOT)}: {e}')


def test_all_other_notebooks_come_without_outputs():
    for path in NOTEBOOKS:
        if path.parent.name == 'benchmarks': continue
        cells = json.loads(path.read_text(encoding='utf-8'))['cells']
        assert not [c['id'] for c in cells if c.get('outputs')], f'{path.relative_to(ROOT)}: outputs belong to the site'


def test_a_changed_cell_is_noticed_and_a_changed_text_is_not(tmp_path):
    path = tmp_path/'x.ipynb'
    def write(notebook): path.write_text(json.dumps(notebook))
    write(NOTEBOOK)
    assert 'never executed' in problem(path)
    done = json.loads(json.dumps(stamped(NOTEBOOK, 'a machine', 'abc')))
    write(done)
    assert problem(path) is None and done['metadata']['b2t']['machine'] == 'a machine'
    assert done['cells'][-1]['source'][0].endswith('on a machine, commit abc.*')
    assert done['cells'][1]['outputs'] == [{'text': '1'}]   # what went to stderr is no result
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
