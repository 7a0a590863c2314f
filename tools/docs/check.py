"What would disappoint a reader of the site: links to nothing, pages with two titles, directives that show."
import html
import os
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

# Elements that nothing closes
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


def problems(folder: Path) -> list[str]:
    "One line for each problem of a site, or of a single page."
    files = sorted(folder.resolve().rglob('*.html'))
    pages = {p: parts(p.read_text(encoding='utf-8')) for p in files}
    anchors = {str(p): set(page.ids) for p, page in pages.items()}
    found = []
    for path, page in pages.items():
        name = path.relative_to(folder.resolve()).as_posix()
        if page.titles != 1: found.append(f'{name}: found {page.titles} titles (h1), expected one')
        found += [f'{name}: {n} places are called {i}' for i, n in Counter(page.ids).items() if n > 1]
        if page.unscrolled: found.append(f'{name}: {page.unscrolled} tables may be wider than the page')
        if not name.startswith('source/') and _DIRECTIVE.search(''.join(page.code)):
            found.append(f'{name}: a directive shows')
        if printed := _OBJECT.search(''.join(page.printed)): found.append(f'{name}: {printed[0]} shows')
        for link in dict.fromkeys(page.links):
            if problem := _problem(path, html.unescape(link), anchors): found.append(f'{name}: {link}{problem}')
    return found


def _problem(path: Path, link: str, anchors: dict[str, set[str]]) -> str:
    "Why a link leads nowhere, empty where it does not."
    if re.match('[a-z]+:|//', link): return ''
    place, _, fragment = unquote(link).partition('#')
    target = os.path.normpath(path.parent/place) if place else str(path)
    if target not in anchors: return '' if os.path.exists(target) else ' leads nowhere'
    return ': there is no such place' if fragment and fragment not in anchors[target] else ''
