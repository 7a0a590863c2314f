"""Brain-to-Text '25 in one environment: from recording sessions to a submission.

The names that most programs need, in one example:

    from b2t_kaggle import *

    cfg = preset('demo')
    simulate_dataset('sessions')  # also writes lm_text.txt; or use a folder of recordings
    trials = {split: TrialStore.build('sessions', split, f'{split}.arrow') for split in ('train', 'val', 'test')}
    train(trials['train'], trials['val'], cfg, 'model')
    logits = infer('model/best.pt', trials['test'], 'logits.arrow')
    build_ngram('sessions/lm_text.txt', 'lm.arpa')
    decoder = LexiconBeamDecoder(build_lexicon(), load_ngram('lm.arpa'))
    write_submission('submission.csv', [decoder.decode(log_probs)[0].text for log_probs in logits])

Names and modules are imported at first use: `import b2t_kaggle` is fast, and unused frameworks need not be installed.
Everything else is in modules such as `b2t_kaggle.data.sessions`.
"""
__version__ = "0.1.0"
# Module -> its names here; `__init__.pyi` repeats them for type checkers, which do not run `__getattr__`
_NAMES = {
    'config': ('Config', 'load_config', 'preset'),
    'data.simulate': ('simulate_dataset',),
    'data.store': ('TrialStore',),
    'decoding.decoder': ('Hypothesis', 'LexiconBeamDecoder'),
    'decoding.streaming': ('Stream',),
    'lm.automaton': ('load_ngram',),
    'lm.ngram': ('NGram', 'build_ngram'),
    'logits': ('LogitStore',),
    'metrics': ('phoneme_error_rate', 'word_error_rate'),
    'phonemes': ('build_lexicon', 'normalize_sentence', 'sentence_to_phonemes'),
    'pipeline.explore': ('listen', 'open_run'),
    'pipeline.frameworks': ('infer', 'train'),
    'pipeline.submission': ('validate_submission', 'write_submission'),
    'rescoring.combine': ('combine',),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}
__all__ = list(_MODULES)


def __getattr__(name: str):
    "Import a public name, or its package, at first use (PEP 562)."
    from importlib import import_module
    if name in _MODULES:
        from b2t_kaggle.core.messages import with_parameters
        value = with_parameters(getattr(import_module(f'{__name__}.{_MODULES[name]}'), name))
        globals()[name] = value
        return value
    if name in {module.split('.')[0] for module in _NAMES}: return import_module(f'{__name__}.{name}')
    from difflib import get_close_matches
    similar = ' or '.join(get_close_matches(name, __all__, 3))
    hint = f'Did you mean {similar}?' if similar else f'It has {", ".join(__all__)}; the rest is in its modules'
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}. {hint}')


def __dir__() -> list[str]:
    "The public names here, and the modules imported so far."
    return sorted({*__all__, *(name for name in globals() if not name.startswith('_') or name.endswith('__'))})
