"""A mark, not a module: Python takes the package `config` in its place.

Notebooks on Kaggle know the kit's folder by this file, also those that were pushed when it was a module."""
