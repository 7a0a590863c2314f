"""Run mypy on a copy of the package in which methods added with fastcore's `@patch` are inside their classes.

mypy does not know `@patch`: it would miss such methods, and not check calls of them."""
import ast
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
DECORATORS = {'patch': '', 'patch(as_prop=True)': '@property', 'patch(cls_method=True)': '@classmethod'}


def with_methods(source):
    "Source of a module with each patched function moved to the end of its class."
    lines, tree = source.splitlines(), ast.parse(source)
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    moved = {}
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef): continue
        names = [ast.unparse(d) for d in node.decorator_list]
        patches = [name for name in names if name in DECORATORS]
        if not patches: continue
        owner = ast.unparse(node.args.args[0].annotation).strip('\'"')
        if owner not in classes: raise SystemExit(f'{node.name}: {owner} is not a class of this module')
        first = node.decorator_list[0].lineno - 1
        text = [DECORATORS.get(line.strip()[1:], line) for line in lines[first:node.end_lineno]]
        moved.setdefault(owner, []).extend(['', *(f'    {line}' if line else '' for line in text)])
        lines[first:node.end_lineno] = ['']*(node.end_lineno - first)
    for owner in sorted(moved, key=lambda name: -classes[name].end_lineno):
        lines[classes[owner].end_lineno:classes[owner].end_lineno] = moved[owner]
    return '\n'.join(lines) + '\n'


def main():
    "Check the copy; line numbers in messages are those of the copy, so the code is also shown."
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        shutil.copytree(ROOT/'b2t_kaggle', copy/'b2t_kaggle', ignore=shutil.ignore_patterns('__pycache__'))
        shutil.copy(ROOT/'pyproject.toml', copy)
        for path in (copy/'b2t_kaggle').rglob('*.py'):
            source = path.read_text(encoding='utf-8')
            if '\n@patch' in source: path.write_text(with_methods(source), encoding='utf-8')
        mypy = [sys.executable, '-m', 'mypy', '--pretty', '--cache-dir', str(ROOT/'.mypy_cache')]
        return subprocess.run(mypy, cwd=copy).returncode


if __name__ == '__main__': sys.exit(main())
