"""Outputs of the notebooks, cached under a hash of their code and of the modules of the kit that they import.

Like the tests, the examples are executed in a few processes, the longest first, each of which imports PyTorch once.
Functions that Numba compiled for the tests are reused. Cells after the last one with an output are not executed;
benchmarks have their outputs in the file."""
import ast
import atexit
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from unittest.mock import patch

from compiled import keep_compiled, take_compiled

from b2t_kaggle.core.files import user_cache, write_whole
from b2t_kaggle.devices.processes import end_with_parent

ROOT = Path(__file__).resolve().parents[2]
FORM = 2   # Version of the cache; increase it when this file makes other outputs
# The longest notebooks, which start first, in seconds of processor time (November 2026, EPYC)
SECONDS = {'tensorflow/09_trainer': 65, 'tensorflow/02_ctc': 34, 'data/02_simulate': 28, 'tensorflow/08_evaluate': 19,
           '00_phonemes': 16, 'tensorflow/01_recurrence': 16, 'pytorch/models/03_triple_gru': 13,
           'guides/one_trial': 12,
           'guides/balancer_and_whiten': 10}
# Each core has a process that computes with one thread. TensorFlow's programs are small and run once, so LLVM need not
# optimise them. Processes that a notebook starts use compiled bytecode
ENVIRONMENT = dict(OMP_NUM_THREADS='1', OMP_WAIT_POLICY='PASSIVE', TF_NUM_INTRAOP_THREADS='1', TF_CPP_MIN_LOG_LEVEL='2',
                   XLA_FLAGS='--xla_backend_optimization_level=0', PYTHONDONTWRITEBYTECODE='',
                   IN_TEST='1')   # As in the tests


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
    if relative.parts[0] in ('stages', 'benchmarks'): return False
    if relative.parts[0] == 'kaggle' and not path.name[0].isdigit(): return False
    if code_of(notebook['cells'][0]).startswith('---'): return False
    return any(shows(code_of(c)) for c in notebook['cells'] if c['cell_type'] == 'code')


def _execute(path: Path) -> list[list[dict]]:
    "The outputs of each cell up to the last one with an output; raises an error if an example fails."
    import matplotlib
    matplotlib.rcParams.update({'svg.fonttype': 'none', 'savefig.transparent': True})
    from execnb.nbio import read_nb
    from execnb.shell import CaptureShell
    shell = CaptureShell(path=path.parent, mpl_format='svg')
    notebook = read_nb(path)
    last = max(i for i, cell in enumerate(notebook.cells) if cell.cell_type == 'code' and shows(cell.source))
    not_executed = [[] for _ in notebook.cells[last + 1:]]
    notebook.cells = notebook.cells[:last + 1]
    def left_out(cell): return bool(directives(cell.source) & {'bench', 'eval'}) if cell.cell_type == 'code' else True
    # Numba caches functions of notebooks in one folder for all of a user's processes, where functions of one process
    # would meet classes that another has defined
    with tempfile.TemporaryDirectory() as cache, patch('IPython.paths.get_ipython_cache_dir', lambda: cache):
        shell.run_all(notebook, exc_stop=True, preproc=left_out)
    # Free this notebook's objects, and do not collect garbage for each shell when the process ends
    shell.user_ns.clear()
    atexit.unregister(shell.atexit_operations)
    return [[dict(o) for o in cell.get('outputs', [])] for cell in notebook.cells] + not_executed


def _processor_seconds() -> float: return sum(os.times()[:4])   # Including child processes that ended


def _work(path: Path) -> tuple[list[list[dict]], float]:
    "The outputs of a notebook, and the processor time in seconds."
    os.chdir(path.parent)
    began = _processor_seconds()
    made = json.loads(json.dumps(_execute(path), default=str))
    return made, _processor_seconds() - began


def outputs(paths: Iterable[Path], n_jobs: int, say=print) -> dict[Path, list[list[dict]]]:
    "The outputs of each cell, by notebook: from the cache, or executed now."
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
    say(f'{len(found)} notebooks have kept outputs, {len(todo)} are executed in {min(n_jobs, len(todo))} processes')
    take_compiled()
    failed = _execute_all(dict(sorted(todo.items(), key=lambda item: -seconds_of(item[0]))), found, n_jobs, say)
    keep_compiled()
    if failed: raise RuntimeError('\n'.join(['these notebooks fail:', *failed]))
    return found


def seconds_of(path: Path) -> int: return SECONDS.get(path.relative_to(ROOT/'nbs').with_suffix('').as_posix(), 0)


def _execute_all(todo: dict[Path, Path], found: dict[Path, list], n_jobs: int, say) -> list[str]:
    "Execute notebooks in this order; save the outputs in the cache and in `found`; a line for each failure."
    failed = []
    os.environ.update(ENVIRONMENT)   # Inherited by the processes
    # No `max_tasks_per_child`: with it the pool stops when its processes end (Python 3.11 to 3.14, cpython#115634)
    with ProcessPoolExecutor(n_jobs, mp_context=get_context('spawn'), initializer=end_with_parent,
                             initargs=[os.getpid()]) as pool:
        running = {pool.submit(_work, path): path for path in todo}
        for n, done in enumerate(as_completed(running), 1):
            path = running[done]
            try: found[path], seconds = done.result()
            except Exception as e:
                failed.append(f'{path.relative_to(ROOT)}: {type(e).__name__}: {e}')
                continue
            write_whole(todo[path], json.dumps(found[path]))
            say(f'  {n:3}/{len(todo)}  {seconds:5.1f} s  {path.relative_to(ROOT)}', flush=True)
    return failed
