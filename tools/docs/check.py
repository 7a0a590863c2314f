"What would disappoint a reader of the site: links to nothing, pages with two titles, directives that show."
import html
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

# Elements that nothing closes
_EMPTY = {'img', 'br', 'hr', 'meta', 'link', 'input', 'path', 'use', 'rect', 'circle', 'line', 'stop', 'col', 'image'}


class _Parts(HTMLParser):
    "Titles, anchors, links and tables of a page."
    def __init__(self):
        super().__init__()
        self.links, self.ids, self.titles = [], [], 0
        self.open, self.unscrolled = [], 0
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
        if any(tag == 'pre' for tag, _ in self.open): self.code.append(data)
        if ('pre', 'output') in self.open: self.printed.append(data)


def parts(text: str) -> _Parts:
    parser = _Parts()
    parser.feed(text)
    return parser


_DIRECTIVE = re.compile(r'^#\|', re.MULTILINE)
_OBJECT = re.compile(r'<(?:Figure|Axes|IPython|pandas)|(?:Out|In)\s?\[\d+\]:')


def problems(folder: Path) -> list[str]:
    "One line for each problem of a site, or of a single page."
    files = sorted(folder.rglob('*.html'))
    pages = {p.resolve(): parts(p.read_text(encoding='utf-8')) for p in files}
    found = []
    for path, page in pages.items():
        name = path.relative_to(folder.resolve()).as_posix()
        if page.titles != 1: found.append(f'{name}: found {page.titles} titles (h1), expected one')
        found += [f'{name}: {n} places are called {i}' for i, n in Counter(page.ids).items() if n > 1]
        if page.unscrolled: found.append(f'{name}: {page.unscrolled} tables may be wider than the page')
        if not name.startswith('source/') and _DIRECTIVE.search(''.join(page.code)):
            found.append(f'{name}: a directive shows')
        if printed := _OBJECT.search(''.join(page.printed)): found.append(f'{name}: {printed[0]} shows')
        wrong = [problem for link in page.links for problem in _problem(path, html.unescape(link), pages)]
        found += [f'{name}: {problem}' for problem in wrong]
    return found


def _problem(path: Path, link: str, pages: dict) -> list[str]:
    "Why a link leads nowhere."
    url = urlsplit(link)
    if url.scheme or url.netloc: return []
    target = (path.parent/unquote(url.path)).resolve() if url.path else path
    if not target.exists(): return [f'{link} leads nowhere']
    if url.fragment and target in pages and unquote(url.fragment) not in pages[target].ids:
        return [f'{link}: there is no such place']
    return []
