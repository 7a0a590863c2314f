"""The documentation site: one page for each notebook, with what its examples print and draw, and the API by names."""
import ast
import base64
import html
import json
import os
import posixpath
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from itertools import groupby
from pathlib import Path
from urllib.parse import unquote

from tqdm import tqdm

from b2t_kaggle.core.files import replaced_folder, write_whole
from b2t_kaggle.core.pages import Html, cards, page, table

from .api import card, comments, lines_of, public
from .cells import markdown, output
from .execute import ROOT, code_of, directives, outputs
from .names import NBS, Overview
from .order import groups

HERE = Path(__file__).parent
TITLE = 'b2t_kaggle'
_HEADING = re.compile(r'<h([1-4])[^>]*?id="([^"]*)"[^>]*>(.*?)</h\1>', re.DOTALL)


@dataclass
class Page:
    "A page of the site, without its frame."
    path: str              # Path in the site, such as `lm/08_prune.html`
    title: str
    about: str = ''        # One line of text
    body: str = ''
    group: str = ''
    entries: list = field(default_factory=list)   # Entries of the search: title, anchor, text


def plain(made: str) -> str:
    "Plain text of HTML."
    made = re.sub(r'<(svg|style|pre|table).*?</\1>', ' ', made, flags=re.DOTALL)
    return ' '.join(html.unescape(re.sub('<[^>]+>', ' ', made)).split())


def clean_headings(made: str) -> str:
    "Remove the link signs after headings, and write anchors in lower case, as on GitHub."
    made = re.sub(r'<a class="anchor-link"[^>]*>.*?</a>', '', made)
    return re.sub(r'(<h\d[^>]*? id=|<a href=)"(#?)([^"#]*)"',
                  lambda m: m[0] if m[1] == '<a href=' and not m[2] else f'{m[1]}"{m[2]}{unquote(m[3]).lower()}"', made)


def highlighted(code: str) -> str:
    from pygments import highlight
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import PythonLexer
    return highlight(code, PythonLexer(), HtmlFormatter(nowrap=True))


def without_directives(code: str) -> str: return re.sub(r'^#\|.*\n?', '', code, flags=re.MULTILINE).strip('\n')


def is_import(code: str) -> bool:
    "Whether a cell only imports."
    try: body = ast.parse(code).body
    except SyntaxError: return False
    return all(isinstance(node, (ast.Import, ast.ImportFrom)) for node in body)


class Names:
    "Lines of a module's names in its source page."
    def __init__(self, module: str | None):
        place = ROOT/'b2t_kaggle'/(module or '').replace('.', '/')
        if module and place.is_dir(): place /= '__init__'
        self.file = place.with_suffix('.py') if module else None
        self.exists = bool(self.file and self.file.exists())
        self.lines = lines_of(self.file.read_text(encoding='utf-8')) if self.exists else {}

    @property
    def page(self) -> str: return source_path(self.file)

    def link(self, name: str, page_path: str) -> str:
        "Link from a page to the line at which a name begins."
        line = f'#L{self.lines[name]}' if name in self.lines else ''
        return relative(self.page, page_path) + line


def source_path(file: Path) -> str:
    "Path of a module's source page in the site."
    return f'source/{file.relative_to(ROOT/"b2t_kaggle").with_suffix(".html").as_posix()}'


def relative(target: str, start: str) -> str: return posixpath.relpath(target, posixpath.dirname(start) or '.')


def exported(code: str, names: Names, path: str, overview: Overview) -> str:
    "Cards of the public names of an exported cell, except those further up, followed by its code."
    bare = without_directives(code)
    notes = comments(bare)
    made = ''.join(overview.note(node.name) if node.name in overview.first
                   else card(node, notes, names.link(node.name, path)) for node in public(bare))
    if is_import(bare): return ''
    word = 'Code' if made else 'Code of helpers'
    return f'{made}<details><summary>{word}</summary><pre>{highlighted(bare)}</pre></details>\n'


def example(code: str, folded: bool) -> str:
    bare = without_directives(code)
    if is_import(bare) or not bare: return ''
    made = f'<pre>{highlighted(bare)}</pre>\n'
    return f'<details><summary>Code</summary>{made}</details>\n' if folded else made


def executed_line(notebook: dict) -> str:
    "When and where a benchmark was executed."
    stamp = notebook['metadata'].get('b2t')
    if not stamp: return '<p class="kicker">Not executed yet: the figures are still missing.</p>\n'
    return f'<p class="kicker">Executed {stamp["executed"]} on {html.escape(stamp["machine"])}.</p>\n'


def cells_of(notebook: dict, ran: list | None, path: str, is_benchmark: bool) -> Iterator[str]:
    "The HTML of each cell that is shown."
    overview = Overview(notebook)
    names = Names(overview.module)
    for i, cell in enumerate(notebook['cells']):
        source = code_of(cell)
        if cell['cell_type'] == 'markdown':
            if not source.startswith('*Executed '): yield clean_headings(markdown(source))
        if 'default_exp' in directives(source): yield overview.html(lambda name: names.link(name, path))
        if cell['cell_type'] != 'code' or directives(source) & {'hide', 'default_exp'}: continue
        if 'export' in directives(source): yield exported(source, names, path, overview)
        else: yield example(source, folded=is_benchmark)
        outs = ran[i] if ran else cell.get('outputs', [])
        yield ''.join(output(o, f'o{i}-{k}') for k, o in enumerate(outs) if o['output_type'] != 'error')


def notebook_page(path: Path, ran: list | None) -> Page:
    notebook = json.loads(path.read_text(encoding='utf-8'))
    place = path.relative_to(NBS).with_suffix('.html').as_posix()
    is_benchmark = path.parent.name == 'benchmarks'
    body = ''.join(cells_of(notebook, ran, place, is_benchmark))
    title = plain(re.search('<h1.*?</h1>', body, re.DOTALL)[0])
    if is_benchmark: body = re.sub('</blockquote>', lambda m: m[0] + executed_line(notebook), body, count=1)
    about = re.search('<blockquote>(.*?)</blockquote>', body, re.DOTALL)
    return Page(place, title, plain(about[1]) if about else '', body)


def text_page(path: Path, place: str) -> Page:
    "A page of a Markdown file of the project."
    body = clean_headings(markdown(path.read_text(encoding='utf-8')))
    return Page(place, plain(re.search('<h1.*?</h1>', body, re.DOTALL)[0]), '', body, 'Contribute')


def source_page(file: Path) -> Page:
    "A module's source, with an anchor for each line."
    code = highlighted(file.read_text(encoding='utf-8')).rstrip('\n').split('\n')
    lines = '\n'.join(f'<span id="L{i}">{line}</span>' for i, line in enumerate(code, 1))
    name = file.relative_to(ROOT).as_posix()
    return Page(source_path(file), name, '', f'<h1>{name}</h1>\n<pre class="lines">{lines}</pre>')


def list_of_benchmarks(pages: list[Page]) -> Page:
    "All benchmarks with date and machine."
    rows = []
    for p in pages:
        stamp = json.loads((NBS/p.path).with_suffix('.ipynb').read_text(encoding='utf-8'))['metadata'].get('b2t', {})
        link = Html(f'<a href="{relative(p.path, "benchmarks/index.html")}">{html.escape(p.title)}</a>')
        machine = stamp.get('machine', '').split(', ')[0]
        rows.append(dict(benchmark=link, question=p.about, executed=stamp.get('executed', 'not yet'), machine=machine))
    intro = ('<h1>Benchmarks</h1><blockquote><p>What was measured, when and on which machine.</p></blockquote>'
             '<p>Each is a notebook with its figures; <code>./kit bench NAME</code> executes it again. A test fails '
             'if the code changed since then. “Not yet” means that the code changed or has not run, and that there are '
             'no figures.</p>')
    return Page('benchmarks/index.html', 'Benchmarks', 'What was measured, when and on which machine.',
                f'{intro}<div class="scroll">{table(rows)}</div>', 'Benchmarks')


_WAYS = {
    'guides/tutorial.html': ('Tutorial', 'See it work, change one thing, compare.'),
    'guides/official_checkpoint.html': ('Submit', 'From the official checkpoint to a submission.csv.'),
    'guides/kaggle_gpu.html': ('Train', 'On Kaggle, on your own GPU, or on a TPU.'),
    'guides/comparison.html': ('How it compares', 'With the official kit and other systems, point by point.'),
    'guides/design.html': ('Design', 'One chain of files, and why.'),
    'benchmarks/index.html': ('Benchmarks', 'What was measured, when and where.'),
}


def results_of(overview: str) -> str:
    "Cards with the results of `./kit run` in the overview; raises `ValueError` if one is missing."
    text = plain(re.sub('</?table>', '', overview))
    found = {name: re.search(pattern, text) for name, pattern in _RESULTS.items()}
    if lost := [name for name, m in found.items() if not m]:
        raise ValueError(f'nbs/index.ipynb: found no {" and no ".join(lost)} of ./kit run, expected sentences with '
                         'them; correct the patterns _RESULTS of tools/docs/build.py')
    notes = {'time': '2 cores, no GPU; with installing',
             'word error rate': 'simulated, val; weights of the search cross-validated'}
    return cards({name: (m[1], notes.get(name, 'simulated, val')) for name, m in found.items()})


# Patterns of the results of `./kit run` in the overview
_RESULTS = {'time': r'\./kit run (\d+ min(?: \d+ s)?)', 'phoneme error rate': r'phoneme error rate of ([\d.]+ %)',
            'word error rate': r'word error rate of ([\d.]+ %)'}


# Notebook that draws the animation on the first page
TRIAL = NBS/'guides'/'one_trial.ipynb'


def moving_picture(ran: list | None) -> str:
    "The last picture of the notebook of one trial; empty if it was not executed."
    if not ran: return ''
    drawn = [out for outs in ran for out in outs if 'image/svg+xml' in out.get('data', {})]
    place = relative(TRIAL.relative_to(NBS).with_suffix('.html').as_posix(), 'index.html')
    return (f'<figure class="moving">{output(drawn[-1], "trial")}'
            '<figcaption>A trial of a simulated participant in real time: the recorded features, the phonemes of a '
            'small model, and the words so far. The signal is clearer than in real recordings. '
            f'<a href="{place}">How it is made</a> <label><input type="checkbox"> hold still</label>'
            '</figcaption></figure>\n')


def landing(overview: Page, picture: str) -> Page:
    "The first page: the command `./kit run` and its results, the decoding of a trial, further pages, the overview."
    about = html.escape(overview.about)
    ways = ''.join(f'<a class="card" href="{path}"><b>{title}</b><span>{text}</span></a>\n'
                   for path, (title, text) in _WAYS.items())
    body = re.sub('<h1.*?</h1>', '', overview.body, count=1, flags=re.DOTALL)
    body = re.sub('<blockquote>.*?</blockquote>', '', body, count=1, flags=re.DOTALL)
    body = re.sub(r'<p>\s*<a [^>]*>\s*<img .*?</p>', '', body, count=1, flags=re.DOTALL)   # Badges of other servers
    report = base64.b64encode((NBS/'report.png').read_bytes()).decode()
    body = body.replace('src="nbs/report.png"', f'class="plot" src="data:image/png;base64,{report}"')
    hero = (f'<div class="hero"><h1>{TITLE}</h1><p class="lead">{about}</p>\n<pre><code>./kit run</code></pre>\n'
            '<p>Simulates a participant, trains and decodes; writes a valid <code>submission.csv</code> and '
            '<code>report.html</code> to <code>submissions/demo</code>.</p></div>\n')
    hero += f'{picture}{results_of(overview.body)}<div class="cards begin">{ways}</div>\n'
    return Page(overview.path, TITLE, overview.about, hero + body, 'Begin')


def rewritten(body: str, path: str, known: set[str]) -> str:
    "Replace links to notebooks and files of the project by links to their pages."
    def link(m):
        target, _, anchor = m[1].partition('#')
        if re.match(r'[a-z]+:', target) or not target.endswith(('.ipynb', '.md', '.py')): return m[0]
        place = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
        place = re.sub(r'^(\.\./)+', '', place)
        place = re.sub(r'^nbs/', '', re.sub(r'\.(ipynb|md|py)$', '.html', place))
        if place.startswith('b2t_kaggle/'): place = place.replace('b2t_kaggle/', 'source/', 1)
        if place == 'README.html': place = 'index.html'
        if place not in known: return m[0]
        return f'href="{relative(place, path)}{"#" + anchor.lower() if anchor else ""}"'
    return re.sub(r'href="([^"]*)"', link, body)


def unique_ids(body: str) -> str:
    "Number the anchors of headings that occur twice or equal a public name."
    seen = Counter(re.findall('<section class="name" id="([^"]*)"', body))
    def number(m):
        seen[m[1]] += 1
        return m[0] if seen[m[1]] == 1 else f' id="{m[1]}-{seen[m[1]]}"'
    return re.sub(r'(?<=<h\d) id="([^"]*)"', number, body)


def find_entries(p: Page) -> list:
    "Entries of the search for a page: page, title, place and first words of each section and each name."
    entries = [[p.title, p.title, p.path, p.about]]
    pieces = re.split(r'(?=<h[23][ >])|(?=<section class="name")', p.body)
    for piece in pieces:
        heading = re.match(r'<h[23] id="([^"]*)">(.*?)</h', piece, re.DOTALL)
        name = re.match(r'<section class="name" id="([^"]*)"', piece)
        if not heading and not name:
            entries[0][3] += ' ' + plain(piece)[:400]
            continue
        anchor = (heading or name)[1]
        title = plain(heading[2]) if heading else anchor
        text = plain(re.sub('<p class="signature">.*?</p>|<h[23].*?</h[23]>', '', piece, count=1, flags=re.DOTALL))
        entries.append([p.title, title, f'{p.path}#{anchor}', text[:400]])
    return entries


def sections(body: str) -> list[tuple[str, str]]:
    "Place and title of each section of a page."
    return [(anchor, plain(text)) for level, anchor, text in _HEADING.findall(body) if level == '2']


@cache
def template(name: str):
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    return Environment(loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
                       lstrip_blocks=True).get_template(f'{name}.html.jinja')


def framed(p: Page, pages: list[Page]) -> str:
    "A page with its head, menu and links to the pages before and after it."
    base = relative('index.html', p.path).removesuffix('index.html')
    by_group = {group: list(members) for group, members in groupby(pages, lambda other: other.group)}
    at = next((i for i, other in enumerate(pages) if other is p), None)
    before, after = (None, None) if at is None else (pages[at - 1] if at else None, (*pages, None)[at + 1])
    top = re.match('.*?</h1>(\\s*<blockquote>.*?</blockquote>)?', p.body, re.DOTALL)[0]
    made = template('page').render(
        site=TITLE, base=base, here=p, groups=by_group, way=lambda other: relative(other.path, p.path),
        top=top, sections=[] if p.path == 'index.html' else sections(p.body), rest=p.body.removeprefix(top),
        before=before, after=after)
    head = template('head').render(about=p.about, base=base)
    return page(TITLE if p.path == 'index.html' else f'{p.title} · {TITLE}', made, head)


def modules() -> list[Path]:
    "The files of the package that are not empty."
    files = sorted((ROOT/'b2t_kaggle').rglob('*.py'))
    return [p for p in files if p.name != '_modidx.py' and p.stat().st_size]


def heads() -> list[Page]:
    "The pages in the reader's order, only with title and subject."
    made = []
    for group, members in groups(NBS).items():
        if group == 'Benchmarks': made.append(Page('benchmarks/index.html', 'Benchmarks', group=group))
        made += [head(p, group) for p in members]
    return made + [text_page(ROOT/f'{name}.md', f'{name}.html') for name in ('CONTRIBUTING', 'CHANGELOG')]


def head(path: Path, group: str) -> Page:
    "Title and subject of a notebook's page."
    cells = json.loads(path.read_text(encoding='utf-8'))['cells']
    first = markdown(next(code_of(c) for c in cells if c['cell_type'] == 'markdown' and '# ' in code_of(c)))
    about = re.search('<blockquote>(.*?)</blockquote>', first, re.DOTALL)
    title = plain(clean_headings(re.search('<h1.*?</h1>', first, re.DOTALL)[0]))
    return Page(path.relative_to(NBS).with_suffix('.html').as_posix(), title, plain(about[1]) if about else '',
                group=group)


def notebook_of(p: Page) -> Path | None:
    "The notebook that a page is made of."
    path = (NBS/p.path).with_suffix('.ipynb')
    return path if path.exists() else None


def filled(p: Page, pages: list[Page], ran: dict[Path, list]) -> Page:
    "A page with its body."
    notebook = notebook_of(p)
    if p.path == 'benchmarks/index.html':
        return list_of_benchmarks([other for other in pages if other.group == p.group and other is not p])
    if not notebook: return p
    made = notebook_page(notebook, ran.get(notebook))
    if p.path == 'index.html': made = landing(made, moving_picture(ran.get(TRIAL)))
    made.group = p.group
    return made


def named(names: Iterable[str], pages: list[Page]) -> list[Page]:
    "The requested pages, by notebook, place or title; raises `ValueError` for an unknown or ambiguous name."
    found = []
    for name in names:
        some = _alike(re.sub(r'^nbs/|\.(ipynb|html|md)$', '', name), pages)
        if len(some) != 1: raise ValueError(f'--only {name}: found {len(some)} pages, expected one; '
                                            f'similar are {", ".join(_similar(name, some or pages))}')
        found += some
    return found


def _alike(wanted: str, pages: list[Page]) -> list[Page]:
    "Pages with this place, else with this title or file, else with this text in their place."
    return ([p for p in pages if wanted == p.path.removesuffix('.html')]
            or [p for p in pages if wanted in (p.title, Path(p.path).stem)] or [p for p in pages if wanted in p.path])


def _similar(name: str, pages: list[Page]) -> list[str]:
    known = list(dict.fromkeys(n for p in pages for n in (p.path.removesuffix('.html'), p.title)))
    return get_close_matches(name, known, 5, cutoff=0.1)


def build(
    folder: str | Path,    # Folder of the site; an earlier build is replaced
    n_jobs: int | None = None, # Processes that execute notebooks; None: one for each core
    execute: bool = True,  # Whether to execute the examples; without their outputs a build takes seconds
    only: Sequence[str] = (), # Pages to write into an earlier build; empty: the whole site
    say=print,
) -> tuple[list[str], list[str]]: # Places of the pages that were written, and those of all pages of the site
    """Build the site, or some of its pages; a site is written whole or not at all. Raises `ValueError` for an
    unknown page, `FileExistsError` if the folder has other contents."""
    pages = heads()
    chosen = named(only, pages) if only else pages
    wanted = [path for p in chosen if (path := notebook_of(p))]
    if any(p.path == 'index.html' for p in chosen): wanted.append(TRIAL)
    ran = outputs(list(dict.fromkeys(wanted)), n_jobs or os.cpu_count() or 1, say) if execute else {}
    files = modules()
    sources = [source_path(file) for file in files]
    say(f'{len(chosen)} pages of notebooks' + ('' if only else f' and {len(files)} of sources') + ' to write')
    with tqdm(total=len(chosen) + (0 if only else len(files)), unit=' pages', disable=None) as bar:
        made = {p.path: stepped(bar, filled(p, pages, ran)) for p in chosen}
        pages = [made.get(p.path, p) for p in pages]
        written = [] if only else [stepped(bar, source_page(file)) for file in files]
    write_site(Path(folder), pages, written, list(made) if only else None, {p.path for p in pages} | set(sources))
    return [*made, *(p.path for p in written)], [*(p.path for p in pages), *sources]


def stepped(bar, made):
    bar.update()
    return made


def write_site(
    target: Path,         # Folder of the site
    pages: list[Page],    # Pages in the reader's order
    sources: list[Page],  # Pages of modules
    only: list[str] | None = None, # Places of the pages to write, also into an existing site; None: all
    known: set[str] = frozenset(), # Places of the whole site, to which links may lead
) -> None:
    "Write pages, style, program and index of the search; a whole site at once or not at all."
    if target.exists() and any(target.iterdir()) and not (target/'search.js').exists():
        raise FileExistsError(f'{target} has other contents than a site; choose another folder')
    written = [p for p in pages if only is None or p.path in only]
    for p in written: p.body = unique_ids(rewritten(p.body, p.path, known))
    entries = [entry for p in written for entry in find_entries(p)]
    if only is None:
        with replaced_folder(target) as new: _write(new, written + sources, pages, entries)
        return
    kept = [entry for entry in _entries(target) if entry[2].partition('#')[0] not in only]
    _write(target, written, pages, kept + entries)


_INDEX = 'window.SEARCH = '


def _entries(folder: Path) -> list:
    "Entries of the search in an earlier build."
    index = folder/'search.js'
    return json.loads(index.read_text(encoding='utf-8').removeprefix(_INDEX)) if index.exists() else []


def _write(folder: Path, written: list[Page], pages: list[Page], entries: list) -> None:
    for p in written:
        (folder/p.path).parent.mkdir(parents=True, exist_ok=True)
        write_whole(folder/p.path, framed(p, pages))
    for name in ('site.css', 'site.js'): shutil.copy(HERE/name, folder/name)
    write_whole(folder/'search.js', _INDEX + json.dumps(entries, ensure_ascii=False))
