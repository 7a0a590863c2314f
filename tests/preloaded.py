"What the process of `copies` imports last: its copies share the keys, and look for cycles only in what they make."
import gc

from b2t_kaggle.config.keys import config_fields

config_fields()
gc.collect()
gc.freeze()
