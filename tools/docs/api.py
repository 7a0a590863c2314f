"""Description of a public name, read from its source: signature, parameters with their comments, docstring.

Comments after parameters are docments. No module is imported, so that no framework has to be installed."""
import ast
import html
import io
import tokenize
from collections.abc import Iterator

from b2t_kaggle.core.pages import Html, table

from .cells import markdown

_FUNCTIONS = ast.FunctionDef, ast.AsyncFunctionDef


def comments(source: str) -> dict[int, tuple[str, bool]]:
    "Comment by line, and whether it is alone on the line."
    found = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT: continue
        alone = not token.line[:token.start[1]].strip()
        found[token.start[0]] = token.string.lstrip('#| ').strip(), alone
    return found


def comment_of(node: ast.AST, notes: dict[int, tuple[str, bool]]) -> str:
    "The comment after a parameter or field, with the lines above that have only comments."
    comment = notes.get(node.end_lineno, ('', False))[0]
    above = []
    line = node.lineno - 1
    while line in notes and notes[line][1]:
        above.insert(0, notes[line][0])
        line -= 1
    return ' '.join(filter(None, [*above, comment]))


def _code(node: ast.AST | None) -> str: return f'<code>{html.escape(ast.unparse(node))}</code>' if node else ''
def inline(text: str, place: str = '') -> str:
    return markdown(text, place).strip().removeprefix('<p>').removesuffix('</p>') if text else ''


def parameters(f: ast.FunctionDef, notes: dict) -> list[dict]:
    "A row for each parameter, and one for what is returned."
    a = f.args
    named = [*a.posonlyargs, *a.args]
    defaults = [None]*(len(named) - len(a.defaults)) + a.defaults
    rows = list(zip(named, defaults, ['']*len(named)))
    rows += [(a.vararg, None, '*')] if a.vararg else []
    rows += [(arg, default, '') for arg, default in zip(a.kwonlyargs, a.kw_defaults)]
    rows += [(a.kwarg, None, '**')] if a.kwarg else []
    lines = [arg.lineno for arg, _, _ in rows]
    made = []
    for arg, default, stars in rows:
        if arg.arg in ('self', 'cls'): continue
        alone = lines.count(arg.lineno) == 1 and arg.lineno != f.lineno
        place = ast.Pass(lineno=arg.lineno, end_lineno=(default or arg).end_lineno)
        made.append(dict(name=f'<code>{stars}{arg.arg}</code>', type=_code(arg.annotation), default=_code(default),
                         meaning=inline(comment_of(place, notes)) if alone or len(lines) == 1 else ''))
    last = max(lines, default=f.lineno)
    comment = notes.get(f.returns.end_lineno, ('', True)) if f.returns and f.returns.lineno > last else ('', True)
    if f.returns and ast.unparse(f.returns) != 'None':
        meaning = inline(comment[0]) if not comment[1] else ''
        made.append(dict(name='<i>returns</i>', type=_code(f.returns), default='', meaning=meaning))
    return made


def filled(rows: list[dict]) -> str:
    "The table without empty columns."
    kept = [k for k in rows[0] if any(row[k] for row in rows)] if rows else []
    rows = [{k: Html(row[k]) for k in kept} for row in rows]
    return f'<div class="scroll api">{table(rows)}</div>' if rows else ''


def fields(c: ast.ClassDef, notes: dict) -> list[dict]:
    "Annotated attributes: of a dataclass, a named tuple or a pydantic model, whose meaning is a string below each."
    rows = []
    for node, below in zip(c.body, [*c.body[1:], None]):
        if not isinstance(node, ast.AnnAssign) or node.target.id.startswith('_'): continue
        text = below.value.value if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) else ''
        value = node.value
        if isinstance(value, ast.Call) and value.args and ast.unparse(value.func) == 'Field': value = value.args[0]
        rows.append(dict(name=f'<code>{node.target.id}</code>', type=_code(node.annotation), default=_code(value),
                         meaning=inline(text or comment_of(node, notes))))
    return rows


def signature(f: ast.FunctionDef) -> str:
    "Names and defaults, as in a call; types are in the table."
    bare = ast.parse(ast.unparse(f)).body[0]
    for arg in ast.walk(bare.args):
        if isinstance(arg, ast.arg): arg.annotation = None
    bare.args.args = [arg for arg in bare.args.args if arg.arg not in ('self', 'cls')]
    text = f'({ast.unparse(bare.args)})'
    return text if len(text) < 100 else '(…)'


def _method(f: ast.FunctionDef, notes: dict) -> str:
    decorators = [ast.unparse(d) for d in f.decorator_list]
    is_property = any(d in ('property', 'cached_property') for d in decorators)
    shown = f.name if is_property else f.name + signature(f)
    rows = [] if is_property else parameters(f, notes)
    rows = rows if any(row['meaning'] for row in rows) else []
    return (f'<div class="method"><p><code>{html.escape(shown)}</code></p>\n'
            f'{markdown(ast.get_docstring(f) or "")}{filled(rows)}</div>')


def card(node: ast.AST, notes: dict, link: str) -> str:
    "Card of a public function or class: parameters, purpose, and a link to its source."
    kind = 'class' if isinstance(node, ast.ClassDef) else 'def'
    init = next((n for n in node.body if isinstance(n, _FUNCTIONS) and n.name == '__init__'), None)
    called = node if kind == 'def' else init
    brackets = signature(called) if called else ''
    rows = parameters(called, notes) if called else fields(node, notes)
    methods = [n for n in node.body if isinstance(n, _FUNCTIONS) and not n.name.startswith('_')
               and ast.get_docstring(n)] if kind == 'class' else []
    return (f'<section class="name" id="{node.name}">\n<p class="signature"><span class="k">{kind}</span> '
            f'<b>{node.name}</b>{html.escape(brackets)}<a href="{link}">source</a></p>\n'
            f'{markdown(ast.get_docstring(node) or "")}{filled(rows)}'
            f'{"".join(_method(m, notes) for m in methods)}</section>\n')


def public(source: str) -> Iterator[ast.AST]:
    "Functions and classes in a piece of source whose names do not begin with an underscore."
    for node in ast.parse(source).body:
        if isinstance(node, (*_FUNCTIONS, ast.ClassDef)) and not node.name.startswith('_'): yield node


def lines_of(source: str) -> dict[str, int]:
    "The line at which each function and class of a module begins."
    return {node.name: node.lineno for node in public(source)}
