"""Executes a benchmark in place and writes down when, where and from which code: `./kit bench 06_decoding`.

The committed outputs are the figures that the documentation speaks of. The notebook's metadata hold a hash of its code
cells; tests/test_benchmarks.py refuses one whose code is another than the one that was executed.
"""
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT/'nbs'/'benchmarks'
LINE = '*Executed '   # how the last cell begins, which says the same to a reader


def code_hash(
    notebook: dict, # As JSON holds it
) -> str:
    "Of all code cells, without their outputs."
    cells = [''.join(c['source']) for c in notebook['cells'] if c['cell_type'] == 'code']
    return hashlib.sha256('\n\0'.join(cells).encode()).hexdigest()[:16]


def problem(
    path: Path, # Of a benchmark
) -> str | None:
    "Why its outputs are not those of its code, if they are not."
    notebook = json.loads(path.read_text(encoding='utf-8'))
    stamp = notebook['metadata'].get('b2t')
    if stamp is None: return f'{path.name}: never executed; ./kit bench {path.stem}'
    if stamp['code'] != code_hash(notebook):
        return f'{path.name}: its code changed since {stamp["executed"]}; ./kit bench {path.stem}'
    if any(c.get('outputs') for c in notebook['cells']): return None
    return f'{path.name}: its outputs are gone; ./kit bench {path.stem}'


def stamped(
    notebook: dict, # Executed
    machine: str,   # What it ran on
    commit: str,    # The state of the repository
) -> dict:
    "The notebook with the record of its execution, as metadata and as its last line; bars and warnings are no results."
    stamp = dict(executed=date.today().isoformat(), machine=machine, commit=commit, code=code_hash(notebook))
    for c in notebook['cells']:
        if c['metadata'].get('tags') == []: del c['metadata']['tags']   # papermill's
        if c.get('outputs'): c['outputs'] = [o for o in c['outputs'] if o.get('name') != 'stderr']
    cells = [c for c in notebook['cells'] if not ''.join(c['source']).startswith(LINE)]
    line = f'{LINE}{stamp["executed"]} on {machine}, commit {commit}.*'
    cells.append(dict(cell_type='markdown', id=f'c{len(cells):03}', metadata={}, source=[line]))
    return notebook | dict(cells=cells, metadata=notebook['metadata'] | dict(b2t=stamp))


def execute(name: str):
    "Execute a benchmark; its file changes only when every cell went well."
    from papermill import PapermillExecutionError, execute_notebook

    from b2t_kaggle.devices.machine import cpu_name
    from b2t_kaggle.pipeline.kernels import kernel_manager
    path = FOLDER/f'{name}.ipynb'
    describe = ['git', 'describe', '--always', '--dirty=+']   # a plus stands for changes that are not committed
    commit = subprocess.run(describe, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    machine = f'{cpu_name()}, {platform.system()}, Python {platform.python_version()}'
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)/path.name
        os.environ.update(OMP_WAIT_POLICY='PASSIVE', TF_CPP_MIN_LOG_LEVEL='2')
        os.environ['PYTHONPATH'] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get('PYTHONPATH')]))
        try: execute_notebook(path, out, kernel_name='python3', kernel_manager_class=kernel_manager(), cwd=path.parent)
        except PapermillExecutionError as e: sys.exit(f'{e}\n{path.name} failed; its file is as it was')
        notebook = stamped(json.loads(out.read_text(encoding='utf-8')), machine, commit or 'unknown')
    path.write_text(json.dumps(notebook, indent=1, sort_keys=True, ensure_ascii=False) + '\n', encoding='utf-8')
    subprocess.run(['nbdev_clean', '--fname', path], cwd=ROOT, check=True)
    print(f'{path.relative_to(ROOT)}: {notebook["cells"][-1]["source"][0]}')


if __name__ == '__main__':
    for name in sys.argv[1:]: execute(name)
