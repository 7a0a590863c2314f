"""XLA programs that earlier tests have compiled are found again in the cache."""
import pytest

tf = pytest.importorskip('tensorflow', reason='needs TensorFlow: pip install b2t_kaggle[tf]')
from compiled import number_names

from b2t_kaggle.tensorflow.layers import keras


def names(test):
    "Names of two functions and two layers that a test makes."
    number_names(test)
    functions = [tf.function(lambda x: x + 1).get_concrete_function(tf.constant(n)) for n in range(2)]
    return [f.name for f in functions], [keras.layers.Dense(1).name for _ in range(2)]


def test_names_depend_on_the_test_alone():
    "Names do not depend on earlier tests, and no two tests give a function the same name."
    functions, layers = names('one')
    assert (functions, layers) == names('one') and len({*functions, *layers}) == 4
    others, same = names('another')
    assert not {*functions} & {*others} and layers == same
