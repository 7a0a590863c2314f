"""The documentation site, generated from the notebooks.

Maintained libraries do as much as possible: nbconvert turns Markdown into HTML, Pygments colours code, Jinja2 fills
templates, matplotlib draws formulas, execnb executes. As of November 2026, no maintained site generator is enough: the
site shows parameters with the comments after them (docments), of modules whose frameworks cannot be installed together,
and the outputs of more than a hundred notebooks that are committed without outputs.

- nbdev's own site needs Quarto, which pip does not install; `show_doc` and fastcore's `docments` import the modules
  that they document, and only committed outputs are shown.
- Sphinx with MyST-NB, on which Jupyter Book was based, starts a kernel for each notebook, so that PyTorch or TensorFlow
  is imported for every page; its cache depends only on a notebook's own cells, and would be out of date when a module
  changes. autodoc imports modules, and does not know docments.
- MkDocs 1 has had no maintainer since 2024, Material for MkDocs is in its last year, and its successor Zensical is new.
  mkdocstrings reads sources without importing them, but does not support docments.

With each of them we would still need `api` and `execute`, and the pages of sources and benchmarks and the first page:
more than half of this package. lunr would save the thirty lines of the search, but add a script from another server to
pages that need none. Reconsider this when a generator reads docments and accepts outputs."""
