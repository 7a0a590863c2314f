"""Cells of notebooks as HTML: Markdown with formulas that matplotlib draws, and outputs."""
import html
import io
import re
import zlib
from collections.abc import Mapping
from functools import cache

from b2t_kaggle.core.pages import recolored

_CODE = re.compile(r'(^```.*?^```|`+[^`]*`+)', re.MULTILINE | re.DOTALL)
_FORMULA = re.compile(r'\$\$(?P<block>.+?)\$\$|(?<![\\$])\$(?P<line>[^$\s](?:[^$]*?[^$\s])?)\$(?!\d)', re.DOTALL)


@cache
def _formula(tex: str) -> str:
    "A formula as SVG on the baseline of the surrounding text; its internal names begin with `NAME`."
    from matplotlib.mathtext import math_to_image
    drawing = io.StringIO()
    try: depth = math_to_image(f'${" ".join(tex.split())}$', drawing, format='svg', dpi=72)
    except ValueError: return f'<code>{html.escape(tex)}</code>'
    svg = drawing.getvalue()
    svg = re.sub(r'<metadata>.*?</metadata>', '', svg[svg.index('<svg'):], flags=re.DOTALL)
    svg = re.sub(r'<g id="patch_1">.*?</g>', '', svg, flags=re.DOTALL)   # the paper
    width, height = (float(re.search(rf'{side}="([\d.]+)pt"', svg)[1])/10.5 for side in ('width', 'height'))
    svg = re.sub(r'\b(id="|href="#|url\(#)', r'\1NAME-', svg).replace('#000000', 'currentColor')
    svg = re.sub(r'(width|height)="[\d.]+pt" ?', '', svg, count=2)
    place = f'width:{width:.3f}em;height:{height:.3f}em;vertical-align:-{depth/10.5:.3f}em'
    label = html.escape(tex, quote=True)
    attributes = f'class="math" fill="currentColor" role="img" aria-label="{label}" style="{place}"'
    return svg.strip().replace('<svg ', f'<svg {attributes} ', 1)


def markdown(
    text: str, # Markdown of a notebook's cell
    place: str = '', # Place on the page, if the same text occurs several times
) -> str:
    "HTML of Markdown with formulas; wide tables can be scrolled."
    from nbconvert.filters import markdown2html
    drawn = []
    name = f'f{zlib.crc32((place + text).encode()):x}'
    def draw(m):
        made = _formula(m['block'] or m['line']).replace('NAME-', f'{name}-{len(drawn)}-')
        drawn.append(f'<p class="formula">{made}</p>' if m['block'] else made)
        return f'FORMULA{len(drawn) - 1}HERE'
    parts = _CODE.split(text)
    marked = ''.join(p if i % 2 else _FORMULA.sub(draw, p) for i, p in enumerate(parts))
    made = markdown2html(marked)
    made = re.sub('<table>', '<div class="scroll"><table>', made).replace('</table>', '</table></div>')
    made = re.sub(r'<p>FORMULA(\d+)HERE</p>', r'FORMULA\1HERE', made)
    return re.sub(r'FORMULA(\d+)HERE', lambda m: drawn[int(m[1])], made)


_ESCAPES = re.compile(r'\x1b\[[0-9;]*m')


def _own_table(made: str) -> str:
    "A table of pandas in the page's style, from its HTML."
    made = re.sub(r'<style.*?</style>', '', made, flags=re.DOTALL)
    made = re.sub(r'<table border="1" class="dataframe">', '<table>', made)
    made = re.sub(r' style="text-align: right;"', '', made)
    made = re.sub(r'<td>([-+\d.,]+(?: ?%)?)</td>', r'<td class="number">\1</td>', made)
    made = re.sub(r'<div>\s*(<table>.*</table>)\s*(?:<p>.*?</p>)?\s*</div>', r'\1', made, flags=re.DOTALL)
    head, rest = made.split('</thead>', 1)
    rows = re.findall('<tr>.*?</tr>', rest, flags=re.DOTALL)
    numeric = [all(column) for column in zip(*(['number' in kind for kind in re.findall('<td[^>]*>', row)]
                                               for row in rows))]
    return f'<div class="scroll">{_headings(head, numeric)}</thead>{rest}</div>\n'


def _headings(head: str, numeric: list[bool]) -> str:
    "Headings as HTML: right-aligned over numbers; lines may break after underscores."
    def cells(row):
        n_names = row[0].count('<th') - len(numeric) # Headings of the index have no column of cells
        kinds = iter(['']*n_names + [' class="number"' if right else '' for right in numeric])
        return re.sub('<th>([^<]*)', lambda m: f'<th{next(kinds, "")}>' + m[1].replace('_', '_<wbr>'), row[0])
    return re.sub('<tr>.*?</tr>', cells, head, flags=re.DOTALL)


def output(
    out: Mapping, # Output in a notebook
    name: str,    # Prefix of the names inside an SVG, unique for each output of a page
) -> str:
    "An output as HTML, empty if it shows nothing."
    kind = out['output_type']
    if kind == 'stream': return '' if out['name'] == 'stderr' else _plain(out['text'])
    if kind == 'error': raise ValueError(f'{out["ename"]}: {out["evalue"]}; pages do not show errors')
    forms = {form: ''.join(text) if isinstance(text, list) else text for form, text in out['data'].items()}
    if 'text/html' in forms:
        made = forms['text/html']
        if 'class="dataframe"' in made: return _own_table(made)
        return f'<div class="scroll">{made}</div>\n' if '<table' in made and 'class="scroll' not in made else made
    if 'image/svg+xml' in forms: return recolored(forms['image/svg+xml'], name)
    if 'image/png' in forms:
        data = forms['image/png'].replace('\n', '')
        return f'<img class="plot" alt="Figure {html.escape(name)}" src="data:image/png;base64,{data}">\n'
    if 'text/markdown' in forms: return markdown(forms['text/markdown'])
    shown = forms.get('text/plain', '')
    shown = re.sub(r'\n(Name: .*, )?(Length: \d+, )?dtype: \w+$', '', shown) # After a series of pandas
    return '' if re.match(r'<(Figure size|Axes|IPython)', shown) else _plain(shown)


def _plain(text) -> str:
    "Printed text, without text that a progress bar overwrote."
    lines = [line.rsplit('\r', 1)[-1] for line in _ESCAPES.sub('', ''.join(text)).split('\n')]
    shown = '\n'.join(lines).strip('\n')
    return f'<pre class="output">{html.escape(shown)}</pre>\n' if shown.strip() else ''
