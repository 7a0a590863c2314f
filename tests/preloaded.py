"""Imported last by the process of `copies`: its forks share the configuration's keys, Numba's own functions and the
dictionary, and search for cycles only in new objects."""
import gc
import sys

from b2t_kaggle.config.keys import config_fields
from b2t_kaggle.phonemes import pronunciations

config_fields()
if 'numba' in sys.modules: # Otherwise each fork that calls a compiled function registers them
    from numba.core.registry import cpu_target
    cpu_target.typing_context.refresh()
    cpu_target.target_context.refresh()
if 'stage_kills' in sys.modules: pronunciations('a') # Its forks need the dictionary
gc.collect()
gc.freeze()
