"Problems of the site: dead links, pages with two titles, visible directives."
import html
import os
import re
from collections import Counter
from collections.abc import Container, Iterator, Sequence
from functools import lru_cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

# Elements without a closing tag
_EMPTY = {'img', 'br', 'hr', 'meta', 'link', 'input', 'path', 'use', 'rect', 'circle', 'line', 'stop', 'col', 'image'}


class _Parts(HTMLParser):
    "Titles, anchors, links and tables of a page."
    def __init__(self):
        super().__init__()
        self.links, self.ids = [], []
        self.titles = 0
        self.open = []
        self.unscrolled = 0
        self.code, self.printed = [], []

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        if 'id' in attrs: self.ids.append(attrs['id'])
        for name in ('href', 'src'):
            if name in attrs and tag != 'use': self.links.append(attrs[name])
        if tag == 'h1': self.titles += 1
        if tag == 'table' and not any('scroll' in c for _, c in self.open): self.unscrolled += 1
        if tag not in _EMPTY: self.open.append((tag, attrs.get('class') or ''))

    def handle_endtag(self, tag):
        for i in range(len(self.open) - 1, -1, -1):
            if self.open[i][0] == tag:
                del self.open[i:]
                break

    def handle_data(self, data):
        kind = next((kind for tag, kind in self.open if tag == 'pre'), None)
        if kind is not None: self.code.append(data)
        if kind == 'output': self.printed.append(data)


def parts(text: str) -> _Parts:
    parser = _Parts()
    parser.feed(text)
    return parser


_DIRECTIVE = re.compile(r'^#\|', re.MULTILINE)
_OBJECT = re.compile(r'<(?:Figure|Axes|IPython|pandas)|(?:Out|In)\s?\[\d+\]:')


def problems(
    folder: Path,                     # Folder of a site, or of a single page
    names: Sequence[str] = (),        # Pages to check, in the folder; empty: all
    elsewhere: Container[str] = (),   # Pages outside the folder to which links may lead
) -> list[str]:
    "One line for each problem."
    folder = folder.resolve()
    files = [folder/name for name in names] or sorted(folder.rglob('*.html'))
    return [f'{path.relative_to(folder).as_posix()}: {problem}'
            for path in files for problem in _problems_of(path, folder, elsewhere)]


def _problems_of(path: Path, folder: Path, elsewhere: Container[str]) -> Iterator[str]:
    page = _read(path)
    if page.titles != 1: yield f'found {page.titles} titles (h1), expected one'
    yield from (f'{n} places are called {i}' for i, n in Counter(page.ids).items() if n > 1)
    if page.unscrolled: yield f'{page.unscrolled} tables may be wider than the page'
    is_source = path.is_relative_to(folder/'source')
    if not is_source and _DIRECTIVE.search(''.join(page.code)): yield 'a directive shows'
    if printed := _OBJECT.search(''.join(page.printed)): yield f'{printed[0]} shows'
    for link in dict.fromkeys(page.links):
        if problem := _problem(path, html.unescape(link), folder, elsewhere): yield link + problem


def _read(path: Path) -> _Parts: return _parts_of(path, path.stat().st_mtime_ns)


@lru_cache(1000)
def _parts_of(path: Path, changed: int) -> _Parts: return parts(path.read_text(encoding='utf-8'))


def _problem(path: Path, link: str, folder: Path, elsewhere: Container[str]) -> str:
    "Reason why a link is dead; empty if it is not."
    if re.match('[a-z]+:|//', link): return ''
    place, _, fragment = unquote(link).partition('#')
    target = Path(os.path.normpath(path.parent/place)) if place else path
    if not target.exists():
        is_known = target.is_relative_to(folder) and target.relative_to(folder).as_posix() in elsewhere
        return '' if is_known else ' leads nowhere'
    is_lost = fragment and target.suffix == '.html' and fragment not in _read(target).ids
    return ': there is no such place' if is_lost else ''
