"""Execute a notebook in place and keep its outputs: `./kit bench 06_decoding`, `./kit bench nbs/00_phonemes.ipynb`.

Benchmarks have the figures that the documentation cites. Reader's notebooks have pictures, at least as many as their
metadata say (`"b2t": {"pictures": 2}`); `./kit bench readers` executes all of them. Both store a hash of their code
cells, and tests/test_benchmarks.py fails if the code has changed since.
"""
import ast
import base64
import hashlib
import io
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import tokenize
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NBS = ROOT/'nbs'
LINE = '*Executed '    # Begins the last cell of a benchmark, which shows the stamp to a reader
LARGEST = 150_000      # Maximum size of a reader's notebook's outputs in bytes
# Parts of outputs that change with each execution, and their replacements
CHANGING = {rf'{ROOT}/': '', rf'{tempfile.gettempdir()}/tmp\w+': '/tmp/…',
            r"(first step after |'seconds': )[\d.]+": r'\1…', r'T_[0-9a-f]{5}(?=_|\\")': 'T_table'}


def read(path: Path) -> dict: return json.loads(path.read_text(encoding='utf-8'))


def readers() -> list[Path]:
    "The notebooks outside the benchmarks that keep their outputs."
    return [p for p in sorted(NBS.rglob('*.ipynb')) if '.ipynb_checkpoints' not in p.parts and is_reader(read(p))]


def is_reader(notebook: dict) -> bool: return 'pictures' in notebook['metadata'].get('b2t', {})


def without_words(
    source: str, # Code of a cell
) -> str:
    "The code without comments, docstrings and blank lines; directives (`#| hide`) are kept."
    try:
        definitions = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef | ast.ClassDef)]
        tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    except (SyntaxError, tokenize.TokenError): return source   # A cell with magics
    lines = source.splitlines()
    for t in tokens:
        if t.type == tokenize.COMMENT and not t.string.startswith('#|'):
            lines[t.start[0] - 1] = lines[t.start[0] - 1][:t.start[1]]
    for first in (n.body[0] for n in definitions if ast.get_docstring(n) is not None and n.body[0].lineno > n.lineno):
        lines[first.lineno - 1:first.end_lineno] = ['']*(first.end_lineno - first.lineno + 1)
    return '\n'.join(line.rstrip() for line in lines if line.strip())


def code_hash(
    notebook: dict, # Parsed JSON
) -> str:
    "Hash of all code cells without outputs, comments and docstrings, so that rewording leaves outputs valid."
    cells = [without_words(''.join(c['source'])) for c in notebook['cells'] if c['cell_type'] == 'code']
    return hashlib.sha256('\n\0'.join(cells).encode()).hexdigest()[:16]


def n_pictures(notebook: dict) -> int:
    kinds = [o.get('data', {}).keys() for c in notebook['cells'] for o in c.get('outputs', [])]
    return sum(bool(kind & {'image/png', 'image/svg+xml'}) for kind in kinds)


def problem(
    path: Path, # Benchmark or reader's notebook
) -> str | None:
    "Reason why the outputs of a notebook are not up to date, or None."
    notebook = read(path)
    stamp = notebook['metadata'].get('b2t', {})
    again = f'./kit bench {path.relative_to(ROOT) if ROOT in path.parents else path.stem}'
    if 'code' not in stamp: return f'{path.name}: never executed; {again}'
    if stamp['code'] != code_hash(notebook): return f'{path.name}: its code changed since {stamp["executed"]}; {again}'
    if not any(c.get('outputs') for c in notebook['cells']): return f'{path.name}: its outputs are gone; {again}'
    if not is_reader(notebook): return None
    n = n_pictures(notebook)
    if n < stamp['pictures']: return f'{path.name}: {n} pictures, expected at least {stamp["pictures"]}'
    size = len(json.dumps([c.get('outputs', []) for c in notebook['cells']]))
    return f'{path.name}: {size:,} bytes of outputs, expected at most {LARGEST:,}' if size > LARGEST else None


def smaller(
    png: str, # Picture in Base64
) -> str:
    "A picture in 64 colours if that is smaller, else unchanged."
    from PIL import Image
    made = io.BytesIO()
    picture = Image.open(io.BytesIO(base64.b64decode(png))).convert('RGB')
    picture.quantize(64, Image.Quantize.MAXCOVERAGE).save(made, 'png', optimize=True)   # Thin lines keep their colours
    return min(base64.b64encode(made.getvalue()).decode(), png.strip(), key=len)


def cleaned(
    outputs: list[dict], # Outputs of a cell
) -> list[dict]:
    "Outputs without progress bars, warnings, temporary paths and times, and with small pictures."
    text = json.dumps([o for o in outputs if o.get('name') != 'stderr'], ensure_ascii=False)
    for pattern, value in CHANGING.items(): text = re.sub(pattern, value, text)
    made = json.loads(text)
    for data in (o.get('data', {}) for o in made):
        if 'image/png' in data: data['image/png'] = smaller(data['image/png'])
    return made


def stamped(
    notebook: dict, # Executed notebook
    machine: str,   # Machine that executed it
    commit: str,    # Commit of the repository
) -> dict:
    "The notebook with clean outputs and the record of its execution as metadata; in a benchmark also as its last line."
    stamp = notebook['metadata'].get('b2t', {}) | dict(executed=date.today().isoformat(), machine=machine,
                                                       commit=commit, code=code_hash(notebook))
    for c in notebook['cells']:
        if c['metadata'].get('tags') == []: del c['metadata']['tags']   # Added by papermill
        if c.get('outputs'): c['outputs'] = cleaned(c['outputs'])
    cells = [c for c in notebook['cells'] if not ''.join(c['source']).startswith(LINE)]
    if not is_reader(notebook):
        line = f'{LINE}{stamp["executed"]} on {machine}, commit {commit}.*'
        cells.append(dict(cell_type='markdown', id=f'c{len(cells):03}', metadata={}, source=[line]))
    return notebook | dict(cells=cells, metadata=notebook['metadata'] | dict(b2t=stamp))


def execute(path: Path):
    "Execute a notebook; its file changes only if every cell succeeds."
    from papermill import PapermillExecutionError, execute_notebook

    from b2t_kaggle.devices.machine import cpu_name
    from b2t_kaggle.pipeline.execute import kernel_manager
    describe = ['git', 'describe', '--always', '--dirty=+']   # a plus means uncommitted changes
    commit = subprocess.run(describe, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    machine = f'{cpu_name()}, {platform.system()}, Python {platform.python_version()}'
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)/path.name
        (Path(folder)/'matplotlibrc').write_text('figure.dpi: 72\n')
        os.environ.update(OMP_WAIT_POLICY='PASSIVE', TF_CPP_MIN_LOG_LEVEL='2', MATPLOTLIBRC=folder)
        os.environ['PYTHONPATH'] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get('PYTHONPATH')]))
        try: execute_notebook(path, out, kernel_name='python3', kernel_manager_class=kernel_manager(), cwd=path.parent)
        except PapermillExecutionError as e: sys.exit(f'{e}\n{path.name} failed; its file is unchanged')
        notebook = stamped(read(out), machine, commit or 'unknown')
    path.write_text(json.dumps(notebook, indent=1, sort_keys=True, ensure_ascii=False) + '\n', encoding='utf-8')
    subprocess.run(['nbdev_clean', '--fname', path], cwd=ROOT, check=True)
    print(f'{path.relative_to(ROOT)}: executed on {machine}, commit {commit}')


if __name__ == '__main__':
    for name in sys.argv[1:]:
        for path in readers() if name == 'readers' else [ROOT/name]: execute(path)
