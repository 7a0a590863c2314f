"Trains a toy on some logical devices of the processor, whose number is settled when TensorFlow starts: a process of its own. Called by test_trainer_tf.py."
import json
import sys
from pathlib import Path

import tensorflow as tf

sys.path.insert(0, str(Path(__file__).parents[1]))
from test_trainer import config
from b2t_kaggle.data.store import TrialStore
from b2t_kaggle.tensorflow.feed import start
from b2t_kaggle.tensorflow.trainer import Trainer, train


def steps(t, n):
    "Losses, gradient norms and lengths of some steps, and a validation."
    taken = [(t.train_step(b), b) for b in t.batches(t.step, t.step + n)]
    lengths = [t.replicas.strategy.experimental_local_results(b['x'])[0].shape[1] for _, b in taken]
    return dict(losses=[s.figures[0].tolist() for s, _ in taken], norms=[s.figures[1] for s, _ in taken], lengths=lengths, n=t.replicas.n,
                traces=t.program.f.experimental_get_tracing_count(), val=t.validate())


if __name__ == '__main__':
    what, n, data, out, overrides = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]), json.loads(sys.argv[5])
    if n > 1: tf.config.set_logical_device_configuration(tf.config.list_physical_devices('CPU')[0], [tf.config.LogicalDeviceConfiguration()] * n)
    stores, cfg = [TrialStore.open(data/f'{s}.arrow') for s in ('train', 'val')], config(**{'accelerator': 'cpu'} | overrides)
    if what == 'steps': result = steps(Trainer(*stores, cfg, start('cpu')), 6)
    else: result = train(*stores, cfg, out, progress=False)
    (out/'result.json').write_text(json.dumps(result))
