"""The documentation site, made of the notebooks.

Kept libraries do what they can: nbconvert turns Markdown into HTML, Pygments colours code, Jinja2 fills the frame,
matplotlib draws formulas, execnb executes. Why no kept generator of whole sites does it, as of November 2026: the site
shows parameters with the comments behind them (docments), of modules that need frameworks which are not installed
together, and the outputs of more than a hundred notebooks that are committed without them.

- nbdev's own site needs Quarto, a program beside pip's packages; `show_doc` and fastcore's `docments` import what they
  document, and the outputs shown are the committed ones.
- Sphinx with MyST-NB, on which Jupyter Book stood, executes notebooks with a kernel for each, so that PyTorch or
  TensorFlow is imported for every page; what it keeps is found by a notebook's own cells, and would be out of date when
  a module changes. autodoc imports, and does not know docments.
- MkDocs 1 is without a maintainer since 2024, Material for MkDocs in its last year, and its successor Zensical is new.
  mkdocstrings reads sources without importing them, but docments are none of its styles.

Each would leave us `api` and `execute`, and the pages of sources, benchmarks and the first page: more than half of this
package. lunr would save the thirty lines of the search, and bring a program from another server into pages that need
none. To be looked at again when one of these reads docments and takes outputs that are handed to it."""
