"""Imported last by the process of `copies`: its forks share the configuration's keys and Numba's own functions, and
search for cycles only in new objects."""
import gc
import sys

from b2t_kaggle.config.keys import config_fields

config_fields()
if 'numba' in sys.modules: # Otherwise each fork that calls a compiled function registers them
    from numba.core.registry import cpu_target
    cpu_target.typing_context.refresh()
    cpu_target.target_context.refresh()
gc.collect()
gc.freeze()
