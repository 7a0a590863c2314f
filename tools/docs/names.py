"""The public names of a module in the order in which a reader needs them: names that `b2t_kaggle` exports, then by the
number of notebooks that import them. Of names with the same number the later one is first: notebooks build up to it."""
import ast
import html
import json
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache

from b2t_kaggle.core.pages import Html, table

from .api import card, comments, inline, public
from .execute import ROOT, code_of, directives

NBS = ROOT/'nbs'
MOST = 3   # Maximum number of names at the top of a page


def module_of(notebook: dict) -> str | None:
    "The module that a notebook exports."
    found = (re.search(r'^#\|\s*default_exp (\S+)', code_of(c), re.MULTILINE) for c in notebook['cells'])
    return next((m[1].removesuffix('.__init__') for m in found if m), None)


def imported(code: str) -> Iterator[tuple[str, str]]:
    "Module and name of each name of the kit that a piece of code imports from a module."
    try: tree = ast.parse(re.sub(r'^\s*[%!].*$', '', code, flags=re.MULTILINE))
    except SyntaxError: return
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or not (node.module or '').startswith('b2t_kaggle'): continue
        module = node.module.removeprefix('b2t_kaggle').lstrip('.')
        yield from ((module or _doors().get(name.name, ''), name.name) for name in node.names)


@cache
def _doors() -> dict[str, str]:
    "The module of each name that `b2t_kaggle` exports."
    code = (ROOT/'b2t_kaggle'/'__init__.pyi').read_text(encoding='utf-8')
    nodes = (n for n in ast.walk(ast.parse(code)) if isinstance(n, ast.ImportFrom) and n.module)
    return {name.name: n.module.removeprefix('b2t_kaggle.') for n in nodes
            if n.module.startswith('b2t_kaggle.') for name in n.names}


@cache
def uses() -> Counter[tuple[str, str]]:
    "Number of notebooks that import each name of a module, without the module's own notebook."
    count: Counter[tuple[str, str]] = Counter()
    for path in sorted(NBS.rglob('*.ipynb')):
        if '.ipynb_checkpoints' in path.parts: continue
        notebook = json.loads(path.read_text(encoding='utf-8'))
        own = module_of(notebook)
        names = {name for c in notebook['cells'] if c['cell_type'] == 'code' for name in imported(code_of(c))}
        count.update(name for name in names if name[0] != own)
    return count


class Overview:
    "The beginning of the page of a module."
    def __init__(self, notebook: dict):
        self.module = module_of(notebook)
        exported = [code_of(c) for c in notebook['cells'] if 'export' in directives(code_of(c))]
        self._nodes = {node.name: (node, code) for code in exported for node in public(code)} if self.module else {}
        self.names = sorted(reversed(self._nodes), key=lambda name: (not self._is_door(name), -self._uses(name)))
        self.first = self._first()

    # Programs import names from the package that gathers them
    def _places(self) -> set[str]: return {self.module, self.module.rpartition('.')[0]}
    def _is_door(self, name: str) -> bool: return _doors().get(name) in self._places()
    def _uses(self, name: str) -> int: return sum(uses()[place, name] for place in self._places())

    def _first(self) -> list[str]:
        "Names whose cards begin the page: those that `b2t_kaggle` exports, else the most used ones."
        if doors := [name for name in self.names if self._is_door(name)]: return doors
        most = self._uses(self.names[0]) if self.names else 0
        return [name for name in self.names[:MOST] if self._uses(name) >= max(most/2, 1)] or self.names[:1]

    def html(self,
        link,   # Function from a name to the link to its source
    ) -> str:
        "Cards of the first names, a table of the others, and the next heading."
        if not self.names: return ''
        made = '<h2 id="most-used">Most used</h2>\n'
        for name in self.first:
            node, code = self._nodes[name]
            made += card(node, comments(code), link(name))
        rows = [dict(name=Html(f'<a href="#{name}">{name}</a>'), meaning=Html(self._about(name)))
                for name in self.names if name not in self.first]
        if rows: made += f'<h2 id="also-here">Also here</h2>\n<div class="scroll api">{table(rows)}</div>\n'
        return made + '<h2 id="step-by-step">Step by step</h2>\n'

    def _about(self, name: str) -> str:
        "The first sentence of a docstring."
        text = ' '.join((ast.get_docstring(self._nodes[name][0]) or '').split())
        return inline(re.split(r'(?<=[^.\d][.;:]) ', text, maxsplit=1)[0].rstrip(';:'), 'also here')

    def note(self, name: str) -> str:
        "Link to a card further up, in place of the card."
        return f'<p class="above">↑ <a href="#{name}">{html.escape(name)}</a></p>\n'
