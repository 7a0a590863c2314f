"""Outputs of the notebooks, kept under a hash of their code and of the modules of the kit that they import.

The examples are executed in processes that each take many notebooks, as the tests do: PyTorch is imported once for
each of them. What shows nothing is not executed; benchmarks have their outputs in the file."""
import ast
import hashlib
import json
import os
import re
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache
from multiprocessing import get_context
from pathlib import Path

from b2t_kaggle.files import user_cache, write_whole

ROOT = Path(__file__).resolve().parents[2]
FORM = 1   # Of what is kept; another number when this file makes other outputs
# Their examples simulate, search and train for half a minute and more each: the tests run them, the site does not
SLOW = {'02_simulate.ipynb', '09_trainer.ipynb'}


def directives(code: str) -> set[str]: return set(re.findall(r'^#\|\s*(\w+)', code, re.MULTILINE))


def code_of(cell: dict) -> str: return ''.join(cell['source'])


def _calls(node: ast.AST) -> set[str]:
    return {ast.unparse(n.func) for n in ast.walk(node) if isinstance(n, ast.Call)}


def shows(code: str) -> bool:
    "Whether a cell prints, draws, or ends in a value that is displayed."
    if directives(code) & {'hide', 'export', 'default_exp', 'bench', 'eval'}: return False
    try: body = ast.parse(re.sub(r'^[%!].*$', '', code, flags=re.MULTILINE)).body
    except SyntaxError: return False
    if not body: return False
    names = {name for node in body for name in _calls(node)}
    if any(re.search('print|display|plot|imshow', name) for name in names): return True
    last = body[-1]
    if not isinstance(last, ast.Expr) or code.rstrip().endswith(';'): return False
    call = ast.unparse(last.value.func) if isinstance(last.value, ast.Call) else ''
    return not re.match(r'test_|.*\.(append|cleanup|write|unlink|touch|mkdir|step|eval|close|write_text)$', call)


@cache
def _imports(path: Path) -> frozenset[Path]:
    "The files of the kit that a module imports."
    return frozenset(_imported(path.read_text(encoding='utf-8'), path))


def _imported(code: str, path: Path | None = None) -> set[Path]:
    found = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import): names = [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = path.relative_to(ROOT).parts[:-node.level] if path and node.level else ()
            base = '.'.join([*above, *filter(None, [node.module])])
            names = [base, *(f'{base}.{a.name}' for a in node.names)]
        else: continue
        for name in names:
            if not name.startswith('b2t_kaggle'): continue
            place = ROOT.joinpath(*name.split('.'))
            found |= {p for p in (place.with_suffix('.py'), place/'__init__.py') if p.exists()}
    return found


def modules_of(code: Iterable[str]) -> set[Path]:
    "The files of the kit that a notebook needs: the module that it exports, what it imports, and what these import."
    todo = set()
    for source in code:
        exported = re.search(r'^#\|\s*default_exp (\S+)', source, re.MULTILINE)
        place = ROOT.joinpath('b2t_kaggle', *exported[1].split('.')) if exported else None
        if place: todo |= {p for p in (place.with_suffix('.py'), place/'__init__.py') if p.exists()}
        try: todo |= _imported(re.sub(r'^[%!].*$', '', source, flags=re.MULTILINE))
        except SyntaxError: pass
    found = set()
    while todo:
        found.add(path := todo.pop())
        todo |= _imports(path) - found
    return found


def key(notebook: dict) -> str:
    "A hash of a notebook's code, and of all modules of the kit that it needs."
    code = [code_of(c) for c in notebook['cells'] if c['cell_type'] == 'code']
    texts = [*code, *(p.read_text(encoding='utf-8') for p in sorted(modules_of(code)))]
    return hashlib.sha256('\0'.join([str(FORM), *texts]).encode()).hexdigest()[:20]


def is_executed(path: Path, notebook: dict) -> bool:
    "Whether the site shows what the examples of a notebook print and draw."
    relative = path.relative_to(ROOT/'nbs')
    if relative.parts[0] in ('pipeline', 'benchmarks') or path.name in SLOW: return False
    if relative.parts[0] == 'kaggle' and not path.name[0].isdigit(): return False
    if code_of(notebook['cells'][0]).startswith('---'): return False
    return any(shows(code_of(c)) for c in notebook['cells'] if c['cell_type'] == 'code')


def _execute(path: Path) -> list[list[dict]]:
    "The outputs of each cell; raises where an example fails."
    import matplotlib
    matplotlib.rcParams.update({'svg.fonttype': 'none', 'savefig.transparent': True})
    from execnb.nbio import read_nb
    from execnb.shell import CaptureShell
    shell = CaptureShell(path=path.parent, mpl_format='svg')
    notebook = read_nb(path)
    def left_out(cell): return bool(directives(cell.source) & {'bench', 'eval'}) if cell.cell_type == 'code' else True
    os.environ['IN_TEST'] = '1'   # as the tests do
    shell.run_all(notebook, exc_stop=True, preproc=left_out)
    return [[dict(o) for o in cell.get('outputs', [])] for cell in notebook.cells]


def _work(path: Path) -> list[list[dict]]:
    os.chdir(path.parent)
    return json.loads(json.dumps(_execute(path), default=str))


def outputs(paths: Iterable[Path], n_jobs: int, say=print) -> dict[Path, list[list[dict]]]:
    "The outputs of each cell, by notebook: kept ones, and those that are executed now."
    folder = user_cache('site')
    folder.mkdir(parents=True, exist_ok=True)
    found, todo = {}, {}
    for path in paths:
        notebook = json.loads(path.read_text(encoding='utf-8'))
        if not is_executed(path, notebook): continue
        kept = folder/f'{path.stem}-{key(notebook)}.json'
        if kept.exists(): found[path] = json.loads(kept.read_text(encoding='utf-8'))
        else: todo[path] = kept
    if not todo: return found
    say(f'{len(found)} notebooks have kept outputs, {len(todo)} are executed')
    failed = []
    # A process that has executed many notebooks holds the memory of all of them
    with ProcessPoolExecutor(n_jobs, mp_context=get_context('spawn'), max_tasks_per_child=30) as pool:
        running = {pool.submit(_work, path): path for path in todo}
        for done in as_completed(running):
            path = running[done]
            try: found[path] = done.result()
            except Exception as e:
                failed.append(f'{path.relative_to(ROOT)}: {type(e).__name__}: {e}')
                continue
            write_whole(todo[path], json.dumps(found[path]))
            say(f'  {path.relative_to(ROOT)}', flush=True)
    if failed: raise RuntimeError('\n'.join(['these notebooks fail:', *failed]))
    return found
