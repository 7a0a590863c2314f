"""Import Triton before the tests import TensorFlow; devices.tensorflow gives the reason."""
from b2t_kaggle.devices.tensorflow import load_triton

load_triton()
