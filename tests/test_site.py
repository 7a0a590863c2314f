"""The documentation site and the page of a run: visible and hidden parts, links, titles, and appearance.

`./kit docs` checks all pages when it builds them; here a few of each kind are tested. If Chromium and its driver are
installed, the pages are rendered in both colour schemes and at two widths.
"""
import ast
import html
import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest
from browser import CHROMIUM, CONTRAST, DRIVER, SCROLLED, TOO_WIDE, WIDTHS, browser

from b2t_kaggle.config import load_config
from b2t_kaggle.core.pages import figure
from b2t_kaggle.metrics import word_error_rate
from b2t_kaggle.metrics.comparison import result_table, results_of
from b2t_kaggle.pipeline.report import (
    configuration,
    example_trials,
    group_table,
    headline,
    provenance,
    report_page,
    timings,
)

ROOT = Path(__file__).parent.parent
NBS = ROOT/'nbs'
sys.path.insert(0, str(ROOT/'tools'))
from docs import api, build, cells, check, execute, names, order  # noqa: E402

NOTEBOOKS = [p for p in sorted(NBS.rglob('*.ipynb')) if '.ipynb_checkpoints' not in p.parts]
# A landing page, prose, an API with classes, formulas, a benchmark with outputs, a stage, and a long name
FEW = ('index', 'guides/design', 'guides/comparison', 'metrics/00_metrics', 'config/04_keys', 'config/07_config',
       'decoding/10_tuning', 'benchmarks/11_combination', 'stages/12_report',
       'pytorch/models/zipformer/04_convolution')


def prose(path):
    "The Markdown of a notebook."
    cells = json.loads(path.read_text())['cells']
    return [''.join(c['source']) for c in cells if c['cell_type'] == 'markdown']


def without_code(text): return re.sub(r'```.*?```|`[^`]*`', '', text, flags=re.DOTALL)


def test_every_notebook_has_one_title_and_is_one_page():
    for path in NOTEBOOKS:
        titles = [t for cell in prose(path) for t in re.findall(r'^# .+', without_code(cell), re.MULTILINE)]
        assert len(titles) == 1, (path, titles)
    listed = [p for members in order.groups(NBS).values() for p in members]
    assert sorted(listed) == NOTEBOOKS


def places(path):
    "Anchors of a notebook's headings."
    headings = re.findall(r'^#+ (.+)', without_code('\n'.join(prose(path))), re.MULTILINE)
    return {heading.lower().replace(' ', '-') for heading in headings}


def test_links_between_notebooks_lead_somewhere():
    lost = []
    for path in NOTEBOOKS:
        for link in re.findall(r'\]\(([^)\s]+)', without_code('\n'.join(prose(path)))):
            target, _, anchor = link.partition('#')
            there = (ROOT if path.name == 'index.ipynb' else path.parent)/target if target else path
            if re.match('[a-z]+:', target): continue
            if not there.exists() or anchor and anchor.lower() not in places(there): lost.append((path.name, link))
    assert lost == []


def test_formulas_can_be_drawn():
    "A formula that cannot be drawn would be on its page as code."
    texts = {(path.name, cell) for path in NOTEBOOKS for cell in map(without_code, prose(path)) if '$' in cell}
    assert [text for text in texts if re.search('(?<!<pre>)<code>', cells.markdown(text[1]))] == []


@pytest.fixture(scope='module')
def site(tmp_path_factory):
    "A site of a few pages, and its problems, without links to pages that are left out."
    paths = [NBS/f'{name}.ipynb' for name in FEW]
    few = {'Begin': paths[:1], 'How to': paths[1:3], 'Benchmarks': [paths[7]], 'Library': [*paths[3:7], *paths[8:]]}
    folder = tmp_path_factory.mktemp('site')/'pages'
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, 'groups', lambda _: few)
        patch.setattr(build, 'modules', lambda: [ROOT/'b2t_kaggle'/'metrics'/'__init__.py'])
        build.build(folder, execute=False, say=lambda _: None)
    return folder, [p for p in check.problems(folder) if not re.search(r'\.(ipynb|html)\S* leads nowhere', p)]


def test_pages_are_sound(site): assert site[1] == []


def text(site, name): return (site[0]/f'{name}.html').read_text()


def test_visible_and_hidden_parts(site):
    metrics = text(site, 'metrics/00_metrics')
    assert '<section class="name" id="word_error_rate">' in metrics
    assert 'Texts, one per trial' in metrics and '<i>returns</i>' in metrics
    assert 'source/metrics/__init__.html#L' in metrics
    for hidden in ('default_exp', '#| ', 'from fastcore', '_count_each</b>'): assert hidden not in metrics, hidden
    benchmark = text(site, 'benchmarks/11_combination')
    assert 'Executed 2026-' in benchmark and '2.85%' in benchmark # A plain vote
    assert 'skip_exec' not in text(site, 'stages/12_report')
    assert text(site, 'decoding/10_tuning').count('class="math"') > 5
    first = text(site, 'index')
    assert './kit run' in first and '<span>word error rate</span><b>' in first and first.count('<h1') == 1


def test_a_source_link_leads_to_the_line(site):
    page = text(site, 'metrics/00_metrics').split('id="bleu"')[1]
    line = int(re.search(r'source/metrics/__init__.html#L(\d+)', page)[1])
    assert (ROOT/'b2t_kaggle'/'metrics'/'__init__.py').read_text().splitlines()[line - 1].startswith('def bleu(')


def search_entries(folder): return json.loads((folder/'search.js').read_text().removeprefix('window.SEARCH = '))


def cards_of(page): return re.findall('<section class="name" id="([^"]*)"', page)


@pytest.mark.parametrize('page, first', [
    ('metrics/00_metrics', ['phoneme_error_rate', 'word_error_rate']),
    ('config/04_keys', ['Config']), ('config/07_config', ['load_config']),
    ('pytorch/models/zipformer/04_convolution', ['ConvolutionModule', 'FeedforwardModule'])])
def test_a_page_of_a_module_begins_with_its_main_names(site, page, first):
    """First the public names of the package, or else the names that most notebooks import; each name has a card, or a
    line in the table above."""
    made = text(site, page)
    cards = cards_of(made)
    assert sorted(cards[:len(first)]) == first and len(set(cards)) == len(cards)
    story = made.index('id="step-by-step"')
    assert all(made.index(f'id="{name}"') < story for name in first)
    assert all(made.index(f'id="{name}"') > story for name in cards[len(first):])
    place = ROOT/'b2t_kaggle'/re.sub(r'\d+_', '', page)
    module = next(p for p in (place.with_suffix('.py'), place.parent/'__init__.py') if p.exists())
    public = [n.name for n in ast.parse(module.read_text()).body
              if isinstance(n, (ast.FunctionDef, ast.ClassDef)) and not n.name.startswith('_')]
    assert sorted(public) == sorted(cards)
    table = made[made.find('id="also-here"'):story]
    assert set(re.findall('<td><a href="#([^"]*)"', table)) == set(public) - set(first)


def test_imported_names_are_counted():
    code = 'from b2t_kaggle import preset\nfrom b2t_kaggle.lm.ngram import build_ngram as b\nimport b2t_kaggle\n%run x'
    assert list(names.imported(code)) == [('config', 'preset'), ('lm.ngram', 'build_ngram')]


def test_one_page_is_written_into_a_site(site, tmp_path):
    "Other pages are bitwise unchanged, and the search lists the page once."
    folder = tmp_path/'pages'
    shutil.copytree(site[0], folder)
    before = {p: p.read_bytes() for p in folder.rglob('*') if p.is_file()}
    entries = search_entries(folder)
    page = folder/'metrics'/'00_metrics.html'
    page.write_text('an older one')
    written, known = build.build(folder, execute=False, only=['metrics/00_metrics'], say=lambda _: None)
    assert written == ['metrics/00_metrics.html'] and check.problems(folder, written, known) == []
    assert 'id="word_error_rate"' in page.read_text()
    assert sorted(search_entries(folder)) == sorted(entries)
    assert {p for p, content in before.items() if p.read_bytes() != content} <= {page, folder/'search.js'}


def test_one_page_of_the_command(tmp_path):
    """The page is chosen by a shorter name than its file's, and written to a folder without a site; an unknown name is
    an error."""
    docs = [sys.executable, '-m', 'b2t_kaggle.cli', 'docs', '--plain', '--output', tmp_path/'site', '--only']
    done = subprocess.run([*docs, 'metrics'], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.endswith(f'{tmp_path/"site"/"metrics/00_metrics.html"}\n'), done.stderr
    assert [p.name for p in (tmp_path/'site').rglob('*.html')] == ['00_metrics.html']
    done = subprocess.run([*docs, 'metrix'], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and '--only metrix: found 0 pages, expected one; similar are ' in done.stderr
    assert 'metrics' in done.stderr and 'Traceback' not in done.stderr


def test_a_build_reports_its_progress(tmp_path, monkeypatch):
    said = []
    def work(path): return [[]], 1.5
    class Pool:
        def __init__(self, *args, **options): pass
        def __enter__(self): return self
        def __exit__(self, *args): pass
        def submit(self, f, path):
            done = Future()
            done.set_result(work(path))
            return done
    monkeypatch.setattr(execute, 'ProcessPoolExecutor', Pool)
    todo = {NBS/f'{name}.ipynb': tmp_path/f'{i}.json' for i, name in enumerate(FEW[:3])}
    assert execute._execute_all(todo, {}, 1, lambda line, **_: said.append(line)) == []
    assert [line.split()[0] for line in said] == ['1/3', '2/3', '3/3']


def test_the_search_knows_names_and_sections(site):
    entries = search_entries(site[0])
    assert ['metrics', 'word_error_rate', 'metrics/00_metrics.html#word_error_rate'] in [e[:3] for e in entries]
    assert any(e[:3] == ['Design', 'Two boundaries', 'guides/design.html#two-boundaries'] for e in entries)


def test_other_folders_are_not_changed(tmp_path):
    (tmp_path/'thesis.txt').touch()
    with pytest.raises(FileExistsError, match='has other contents than a site'):
        build.write_site(tmp_path, [], [])
    assert (tmp_path/'thesis.txt').exists()


FUNCTION = '''
def f(
    # Above,
    a: int, # and behind
    b=3, # With | a bar
    *rest: str, # More
) -> dict[str, int]: # What comes back
    "Does `it`."
class C:
    "A class."
    n: int = 1 # How many
    def g(self, x): # Not of x alone
        "Halves."
'''


def test_parameters_from_comments():
    f, c = ast.parse(FUNCTION).body
    rows = api.parameters(f, api.comments(FUNCTION))
    assert [re.sub('<.*?>', '', row['name']) for row in rows] == ['a', 'b', '*rest', 'returns']
    assert [row['meaning'] for row in rows] == ['Above, and behind', 'With | a bar', 'More', 'What comes back']
    assert [row['default'] for row in rows] == ['', '<code>3</code>', '', '']
    assert '<td>Does <code>x</code>.</td>' in api.filled([dict(name='a', default='', meaning='Does <code>x</code>.')])
    assert [row['meaning'] for row in api.fields(c, api.comments(FUNCTION))] == ['How many']
    assert '<div class="method"><p><code>g(x)</code></p>' in api.card(c, api.comments(FUNCTION), 'x.html')


@pytest.mark.parametrize('code, shown', [
    ('test_eq(f(1), 2)', False), ('print(1)', True), ('x = 1\nx', True), ('fig, ax = plt.subplots()', True),
    ('x = 1', False), ('import os', False), ('#| hide\nprint(1)', False), ('#| export\ndef f(): print(1)', False),
    ('with a:\n    plot_history(x)', True), ('rows.append(1)', False), ('model(x);', False)])
def test_cells_that_show_something(code, shown): assert execute.shows(code) == shown


def test_a_notebook_is_executed_up_to_the_last_cell_that_shows_something(tmp_path, monkeypatch):
    import matplotlib
    def execute_cells(*codes):
        cells = [dict(cell_type='code', id=f'c{i}', metadata={}, outputs=[], execution_count=None, source=code)
                 for i, code in enumerate(codes)]
        path = tmp_path/'some.ipynb'
        path.write_text(json.dumps(dict(cells=cells, metadata={}, nbformat=4, nbformat_minor=5)))
        with matplotlib.rc_context(): return execute._work(path)

    monkeypatch.chdir(tmp_path)
    made, seconds = execute_cells('x = 1', 'print(x)', '#| eval: false\nprint(2)', '#| hide\nx = 3', 'x + 1', 'y = 1/0')
    assert [out['text'] for out in made[1]] == [['1\n']] and made[0] == made[2] == made[3] == made[5] == []
    assert made[4][0]['data']['text/plain'] == ['4'] and seconds >= 0
    with pytest.raises(ZeroDivisionError): execute_cells('y = 1/0', 'print(y)')


def test_outputs_are_kept_until_code_or_library_change():
    def notebook(*cells): return dict(cells=[dict(cell_type='code', source=[c]) for c in cells])
    one = notebook('from b2t_kaggle.metrics import bleu', 'print(1)')
    key = execute.key(one)
    assert execute.key(one) == key != execute.key(notebook('from b2t_kaggle.metrics import bleu', 'print(2)'))
    assert execute.key(dict(cells=[*one['cells'], dict(cell_type='markdown', source=['more'])])) == key
    files = execute.modules_of(['from b2t_kaggle.metrics import bleu'])
    modules = {p.relative_to(ROOT/'b2t_kaggle').as_posix() for p in files}
    assert {'metrics/__init__.py', 'phonemes.py'} <= modules and 'pytorch/trainer.py' not in modules


def test_problems_are_found(tmp_path):
    (tmp_path/'a.html').write_text('<h1>a</h1><h1>b</h1><p id="x"></p><p id="x"></p><table></table>'
                                   '<pre>#| hide</pre><pre class="output">Out[3]: </pre><a href="b.html">b</a>'
                                   '<a href="#y">y</a><a href="https://example.org">e</a>')
    found = check.problems(tmp_path)
    assert [p.removeprefix('a.html: ') for p in found] == [
        'found 2 titles (h1), expected one', '2 places are called x', '1 tables may be wider than the page',
        'a directive shows', 'Out[3]: shows', 'b.html leads nowhere', '#y: there is no such place']


@pytest.fixture(scope='module')
def report(tmp_path_factory):
    "The page of a run with every kind of content."
    words = 'we will see what the others have to say about it'.split()
    def found(i): return ' '.join([*words[i % 2:3 + i % 8], *['too']*(i % 3)])
    rows = [dict(trial=i, reference=' '.join(words[:3 + i % 8]), text=found(i), corpus='Random',
                 session=f't15.2023.08.{10 + i % 6}', block=i, phonemes='HH AW SIL', greedy='HH AH SIL')
            for i in range(24)]
    results = results_of(rows)
    changed = {'neural_dim': 128, 'data.feature_subset': list(range(0, 512, 4)),
               'data.dataset_dir': '/a/long/path/to/the/recordings/hdf5_data_final'}
    cfg = load_config(base='demo', overrides=changed)
    metrics = dict(steps=600, weights=dict(alpha=0.5, length_penalty=0.123456), PER=0.1)
    stamps = dict(train=dict(seconds=170.0, made=0, metrics=metrics, outputs={'train/best.pt': [1 << 28, 'ab' * 8]}))
    def draw(n=1):
        import matplotlib.pyplot as plt
        fig, axes = plt.subplots(1, n, figsize=(10, 3))
        for ax in np.atleast_1d(axes):
            ax.plot([3, 2, 1], label='loss')
            ax.legend()
        return fig
    pieces = [headline(results, dict(WER='cross-validated')),
              *(group_table(result_table(results), by) for by in ('corpus', 'length', 'session')),
              example_trials(results), figure(draw(), 'Loss'), figure(draw(2), 'Two losses'),
              timings(stamps), configuration(cfg, 'demo'),
              provenance(dict(data='simulated'), stamps)]
    path = tmp_path_factory.mktemp('run')/'report.html'
    path.write_text(report_page({f'Section {i}': piece for i, piece in enumerate(pieces)}, 'seed1'))
    return path


def test_the_page_of_a_run_is_sound(report):
    assert check.problems(report.parent, elsewhere={'errors.html'}) == [] # The stage writes it next to the report
    shown = report.read_text()
    assert "{'" not in shown and 'alpha 0.5, length penalty 0.1235' in shown
    assert not re.search(r'(?:src|href)="(?!data:|#|errors\.html)', shown), 'it needs another file'


@pytest.fixture(scope='module')
def chromium():
    if not (CHROMIUM and DRIVER): pytest.skip('pages are not looked at: apt-get install chromium chromium-driver')
    with browser() as one: yield one


def wrong_in(chromium, path, width):
    "Parts of a page that a reader cannot see or read, in both colour schemes."
    found = []
    for dark in (False, True):
        chromium.show(path, WIDTHS[width], dark)
        where = path.name, width, 'dark' if dark else 'light'
        found += [(*where, 'is too wide', part) for part in chromium.run(TOO_WIDE)]
        found += [(*where, m) for m in chromium.messages() if 'ERR_FILE_NOT_FOUND' not in m]
        least, element = chromium.run(CONTRAST)
        if least < 4.5: found.append((*where, 'contrast', least, element))
    return found


@pytest.mark.parametrize('width', WIDTHS)
def test_pages_fit_and_can_be_read(chromium, site, report, width):
    for path in [*(site[0]/f'{name}.html' for name in FEW), site[0]/'source'/'metrics.html', report]:
        assert wrong_in(chromium, path, width) == []
    assert chromium.run(SCROLLED) == [], 'a table of the report has to be scrolled sideways'


def test_inserted_words_are_not_green(chromium, report):
    chromium.show(report, WIDTHS['desktop'])
    red, green, _ = map(int, re.findall(r'\d+', chromium.run(
        "return getComputedStyle(document.querySelector('ins')).backgroundColor"))[:3])
    assert red >= green


@pytest.mark.parametrize('width', WIDTHS)
def test_pages_of_a_complete_build_fit_and_can_be_read(chromium, width):
    "Guides, benchmarks, and every tenth of the other pages; .ci/docs names the site that it has built."
    if 'SITE' not in os.environ: pytest.skip('SITE=FOLDER names a site that ./kit docs has built')
    folder = Path(os.environ['SITE'])
    paths = sorted(folder.rglob('*.html'))
    assert len(paths) > len(NOTEBOOKS)
    first = [p for p in paths if p.parent.name in ('guides', 'benchmarks') or p == folder/'index.html']
    others = [p for p in paths if p not in first][::10]
    assert [problem for p in [*first, *others] for problem in wrong_in(chromium, p, width)] == []


@pytest.fixture(scope='module')
def first_page(site, tmp_path_factory):
    "The first page with its animation; its notebook is executed unless its outputs are cached."
    folder = tmp_path_factory.mktemp('first')
    ran = execute.outputs([build.TRIAL], 1, lambda *_, **__: None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, 'outputs', lambda *_: ran)
        build.build(folder/'pages', only=['index'], say=lambda _: None)
    return folder/'pages'/'index.html', ran[build.TRIAL]


def test_the_first_page_shows_a_trial_as_it_is_decoded(first_page):
    page, ran = first_page
    svg = re.search('<figure class="moving">(<svg.*?</svg>)', page.read_text(), re.DOTALL)[1]
    assert 10_000 < len(svg) < 300_000
    ElementTree.fromstring(svg)
    printed = ''.join(''.join(out['text']) for outs in ran for out in outs if out.get('name') == 'stdout')
    said, found = (re.search(f'{name}: +(.*)', printed)[1] for name in ('said', 'found'))
    shown = [html.unescape(words) for words in re.findall('class="trial-words"[^>]*>([^<]*)<', svg)]
    assert shown[0] == '' and shown[-1] == found and len(shown) > 4
    assert word_error_rate([said], [found]) < 0.7
    assert html.escape(f'Said: {said} Found: {found}.') in re.search('aria-label="([^"]*)"', svg)[1]
    classes = re.findall(r'<mask id="trial-(\w+)">', svg)
    assert classes == ['bins', 'phonemes'] and not re.search('(?:href|src)="(?!data:|#)', svg)


SEEN = '''
const svg = document.querySelector('figure.moving svg')
for (const a of svg.getAnimations({subtree: true})) { a.pause(); a.currentTime = 1000*SECONDS }
const words = [...svg.querySelectorAll('.trial-words')].filter(e => getComputedStyle(e).opacity === '1')
const cover = svg.querySelector('.trial-cover')
const left = cover.getBoundingClientRect().left - svg.getBoundingClientRect().left
return [words.map(e => e.textContent), getComputedStyle(cover).display === 'none' ? null : left]
'''


def seen_at(chromium, seconds): return chromium.run(SEEN.replace('SECONDS', str(seconds)))


def test_the_picture_moves_unless_reduced_motion_is_preferred(chromium, first_page):
    page, ran = first_page
    chromium.show(page, WIDTHS['phone'])
    seen = [seen_at(chromium, s) for s in (0.1, 4, 8, 100.1)]
    assert all(len(words) == 1 for words, _ in seen), seen
    (first, *_), (last, *_) = seen[0][0], seen[2][0]
    assert first == '' and len(last.split()) > 2
    assert seen[0][1] < seen[1][1] < seen[2][1]
    assert wrong_in(chromium, page, 'phone') == []
    chromium.command('Emulation.setEmulatedMedia', features=[dict(name='prefers-reduced-motion', value='reduce')])
    (words,), cover = seen_at(chromium, 0.1)
    found = html.unescape(re.findall('class="trial-words"[^>]*>([^<]*)<', page.read_text())[-1])
    assert words == found and cover is None
    assert chromium.run('return document.getAnimations().length') == 0


def test_the_search_finds(chromium, site):
    chromium.show(site[0]/'index.html', WIDTHS['desktop'])
    found = chromium.ask('/execute/async', dict(args=[], script='''
        const done = arguments[0], input = document.getElementById('query')
        input.value = 'word_error_rate'
        const links = () => [...document.querySelectorAll('#found a')].map(a => a.getAttribute('href'))
        input.oninput().then(() => done(links()))'''))
    assert found[0] == 'metrics/00_metrics.html#word_error_rate'


def test_a_page_that_is_too_wide_is_found(chromium, tmp_path):
    page = tmp_path/'wide.html'
    page.write_text('<body><main><div style="width:2000px;color:#777;background:#777">wide</div></main></body>')
    chromium.show(page, WIDTHS['phone'])
    assert chromium.run(TOO_WIDE) and chromium.run(CONTRAST)[0] < 1.1


def test_markdown_has_formulas_and_tables_that_scroll():
    made = cells.markdown(r'The loss $-\log p(y|x)$ of `$HOME`, 5 $ and 6 $.' + '\n\n$$x^2$$\n\n| a |\n|---|\n| 1 |')
    assert made.count('<svg') == 2
    assert '<code>$HOME</code>, 5 $ and 6 $.' in made and '<div class="scroll"><table>' in made
    assert '<code>\\nosuch{x}</code>' in cells.markdown(r'$\nosuch{x}$')
    ids = [re.findall('id="([^"]+)', cells.markdown('$x^2$', place)) for place in ('', 'also here')]
    assert ids[0] and not {*ids[0]} & {*ids[1]} # A page may have the same text twice


def shown(**data): return cells.output(dict(output_type='execute_result', data=data), 'one')


def test_outputs_of_a_notebook():
    printed = dict(output_type='stream', name='stdout', text=['1 %\r100 %\n', '\x1b[1mdone\x1b[0m\n'])
    assert cells.output(printed, '') == '<pre class="output">100 %\ndone</pre>\n'
    assert cells.output(dict(output_type='stream', name='stderr', text='warning'), '') == ''
    assert shown(**{'text/plain': '<Figure size 640x480 with 1 Axes>'}) == ''
    assert shown(**{'text/plain': "{'a': 1}"}) == '<pre class="output">{&#x27;a&#x27;: 1}</pre>\n'
    assert shown(**{'text/plain': repr(pd.Series([1], ['a']))}) == '<pre class="output">a    1</pre>\n'
    with pytest.raises(ValueError, match='OSError: no room'):
        cells.output(dict(output_type='error', ename='OSError', evalue='no room'), '')


def test_tables_of_pandas_have_the_style_of_the_page():
    made = shown(**{'text/plain': 'x', 'text/html': pd.DataFrame(dict(rate=[1.5]), index=['a'])._repr_html_()})
    assert '<td class="number">1.5</td>' in made and 'border' not in made and '<style' not in made
    two = pd.DataFrame(dict(rate_of_all=[1.5, 2], text=['b', '3']), index=['a', 'b'])._repr_html_()
    made = shown(**{'text/plain': 'x', 'text/html': two})
    assert '<th></th>' in made and '<th class="number">rate_<wbr>of_<wbr>all</th>' in made and '<th>text</th>' in made
