"""Imported last by the process of `copies`: its forks share the configuration's keys, and search for cycles only in new
objects."""
import gc

from b2t_kaggle.config.keys import config_fields

config_fields()
gc.collect()
gc.freeze()
