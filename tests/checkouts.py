"Copies of this checkout, in which tests follow the instructions that a page gives to developers."
import hashlib
import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parent.parent


def cells_of_page(guide, tag):
    "Sources of a page's cells with this tag."
    return [c.source for c in nbformat.read(guide, 4).cells if tag in c.metadata.get('tags', [])]


def exported(module, about, *cells):
    "A notebook that exports these cells as a module."
    nb = nbformat.v4.new_notebook()
    nb.cells = [nbformat.v4.new_markdown_cell(f'# {module}\n\n> {about}'),
                nbformat.v4.new_code_cell(f'#| default_exp {module}'),
                *(nbformat.v4.new_code_cell('#| export\n' + source) for source in cells)]
    return nb


def run(root, *command):
    "Run a command in a copy; it must succeed."
    # nbdev does nothing if IN_TEST is set, which a tested notebook leaves behind
    env = {k: v for k, v in os.environ.items() if k != 'IN_TEST'} | {'PYTHONPATH': str(root)}
    done = subprocess.run(list(map(str, command)), cwd=root, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done


def _checksums(root):
    "Checksums of the files that people edit: all except those that `nbdev_export` writes."
    paths = [p for p in root.rglob('*') if p.is_file() and '.git' not in p.parts and '__pycache__' not in p.parts]
    edited = [p for p in paths if 'b2t_kaggle' not in p.relative_to(root).parts[:1]]
    return {str(p.relative_to(root)): hashlib.sha256(p.read_bytes()).hexdigest() for p in edited}


def _share_compiled(root):
    "Share compiled files of Python and Numba with the copy's identical modules, whose sources get the same times."
    for module in (ROOT/'b2t_kaggle').rglob('*.py'):
        copy = root/module.relative_to(ROOT)
        if copy.read_bytes() == module.read_bytes(): shutil.copystat(module, copy)
    caches = ('*.pyc', '*.nb[ic]', 'numba-*')  # tools/compiled.py explains the last pattern
    for compiled in itertools.chain(*((ROOT/'b2t_kaggle').rglob(f'__pycache__/{files}') for files in caches)):
        copy = root/compiled.relative_to(ROOT)
        copy.parent.mkdir(exist_ok=True)
        shutil.copy2(compiled, copy)


def checkout_with(root, notebooks):
    "Copy this checkout into a folder, add notebooks by path, and export them; no other file may change."
    listed = subprocess.run(['git', 'ls-files', '-z', '--cached', '--others', '--exclude-standard'], cwd=ROOT,
                            capture_output=True, text=True)
    if listed.returncode: pytest.skip('not a git checkout')
    for name in filter(None, listed.stdout.split('\0')):
        if not (ROOT/name).is_file(): continue
        (root/name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT/name, root/name)
    before = _checksums(root)
    for path, nb in notebooks.items(): nbformat.write(nb, root/path)
    run(root, Path(sys.executable).with_name('nbdev_export'))
    assert {k for k, _ in _checksums(root).items() - before.items()} == set(notebooks), 'another file was touched'
    _share_compiled(root)
    return root
