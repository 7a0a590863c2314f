"Triton before TensorFlow, which the tests import themselves; devices.tensorflow says why."
from b2t_kaggle.devices.tensorflow import load_triton

load_triton()
