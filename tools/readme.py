"""Execute nbs/index.ipynb with this Python and write it as README.md, without pictures."""
from pathlib import Path

import nbformat
from nbconvert import MarkdownExporter
from nbconvert.preprocessors import ExecutePreprocessor

from b2t_kaggle.core.files import write_whole
from b2t_kaggle.pipeline.execute import kernel_manager

ROOT = Path(__file__).resolve().parent.parent


def markdown() -> str:
    "The executed page as Markdown, without cells that draw."
    page = nbformat.read(ROOT/'nbs'/'index.ipynb', as_version=4)
    execution = ExecutePreprocessor(kernel_name='python3', kernel_manager_class=kernel_manager(),
                                    extra_arguments=['--IPKernelApp.log_level=40'])
    execution.preprocess(page, dict(metadata=dict(path=ROOT/'nbs')))
    page.cells = [c for c in page.cells if not any('image/png' in o.get('data', {}) for o in c.get('outputs', []))]
    return MarkdownExporter().from_notebook_node(page)[0]


if __name__ == '__main__': write_whole(ROOT/'README.md', markdown().rstrip() + '\n')
