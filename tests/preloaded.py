"The last import of the process of `copies`: copies share the keys, and look for cycles only in their own objects."
import gc

from b2t_kaggle.config.keys import config_fields

config_fields()
gc.collect()
gc.freeze()
