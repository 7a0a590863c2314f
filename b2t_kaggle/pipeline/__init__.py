"The stages of a run: their definitions, their execution, and their results."


def __getattr__(name: str):
    "`run_stages` of `execute`, for notebooks on Kaggle that were pushed when this package was a module."
    if name != 'run_stages': raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    from b2t_kaggle.pipeline.execute import run_stages
    return run_stages
