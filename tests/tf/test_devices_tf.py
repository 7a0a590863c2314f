"""TensorFlow's devices: the real failure of a missing TPU, simulated TPUs and GPUs, and eight logical CPUs. Only
TensorFlow's own calls about a TPU or GPU are simulated."""
import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from urllib.error import URLError

import pytest

tf = pytest.importorskip('tensorflow', reason='needs TensorFlow: pip install b2t_kaggle[tf]')
from b2t_kaggle.devices import machine as detection
from b2t_kaggle.devices import tensorflow as devices
from b2t_kaggle.devices.machine import Device, DeviceError, Gpu, cpu_flags
from b2t_kaggle.devices.tensorflow import configure_mixed_precision, create_tpu_strategy, pick_tensorflow
from b2t_kaggle.tensorflow.feed import Strategy, start

ROOT = Path(__file__).parents[2]
KAGGLE = {'ISTPUVM': '1', 'TPU_PROCESS_ADDRESSES': 'local', 'TPU_WORKER_ID': '0', 'TPU_WORKER_HOSTNAMES': 'localhost',
          'TPU_ACCELERATOR_TYPE': 'v5litepod-8'}
NOT_FOUND = tf.errors.NotFoundError(None, None, 'TPUs not found in the cluster. Failed in initialization: No OpKernel')


@pytest.fixture(autouse=True)
def bare(monkeypatch):
    "Remove this machine's environment variables, and the TPU that an earlier test started."
    for k in detection.TPU_VARIABLES + detection._OTHER_VARIABLES: monkeypatch.delenv(k, raising=False)
    devices._start_tpu.cache_clear()
    yield
    devices._start_tpu.cache_clear()


def simulate_tpu(monkeypatch, cores, environ, replicas=None, **failures):
    """Replace TensorFlow's calls by those of a TPU with so many cores, and return them. `resolve`, `connect` or
    `initialize` may fail."""
    calls = []
    def call(name, result):
        def f(*args, **kwargs):
            calls.append((name, *args, *kwargs.values()))
            if name in failures: raise failures[name]
            return result
        return f
    logical = tf.config.list_logical_devices
    monkeypatch.setattr(tf.distribute.cluster_resolver, 'TPUClusterResolver', call('resolve', 'resolver'))
    monkeypatch.setattr(tf.config, 'experimental_connect_to_cluster', call('connect', None))
    monkeypatch.setattr(tf.tpu.experimental, 'initialize_tpu_system', call('initialize', None))
    def list_devices(kind=None): return [None] * cores if kind == 'TPU' else logical(kind)
    monkeypatch.setattr(tf.config, 'list_logical_devices', list_devices)
    strategy = SimpleNamespace(num_replicas_in_sync=replicas or cores)
    monkeypatch.setattr(tf.distribute, 'TPUStrategy', call('strategy', strategy))
    for k, v in environ.items(): monkeypatch.setenv(k, v)
    return calls


def test_no_tpu_really_fails(monkeypatch, capsys):
    monkeypatch.setenv('TPU_NAME', 'local')
    with pytest.raises(DeviceError, match="accelerator tpu: tensorflow.* has no kernels for a TPU; use PyTorch") as e:
        create_tpu_strategy('tpu')
    cause = e.value.__cause__.__cause__.__cause__
    assert isinstance(cause, tf.errors.NotFoundError)  # only initialize_tpu_system detects it
    strategy = create_tpu_strategy()
    assert strategy is tf.distribute.get_strategy() and strategy.num_replicas_in_sync == 1
    out = capsys.readouterr().out
    assert 'variables: TPU_NAME=local' in out and '1 replica: cpu' in out and 'the TPU is not used: tensorflow' in out
    monkeypatch.delenv('TPU_NAME')
    with pytest.raises(DeviceError, match='no TPU here'): pick_tensorflow('tpu')


@pytest.mark.parametrize('environ, address', [
    (KAGGLE, 'local'),
    ({'TPU_WORKER_ID': '0'}, 'local'),
    ({'TPU_NAME': 'local'}, 'local'),
    ({'TPU_NAME': 'mine'}, 'mine'),
])
@pytest.mark.parametrize('accelerator', ['auto', 'tpu'])
def test_finds_a_tpu(environ, address, accelerator, monkeypatch, capsys):
    calls = simulate_tpu(monkeypatch, 8, environ)
    device = pick_tensorflow(accelerator)
    strategy = create_tpu_strategy(accelerator)
    assert (device.kind, device.n_devices, device.precision, strategy.num_replicas_in_sync) == ('tpu', 8, 'bfloat16', 8)
    once = [('resolve', address), ('connect', 'resolver'), ('initialize', 'resolver')]
    assert calls == once + [('strategy', 'resolver')]
    out = capsys.readouterr().out
    assert '8 replicas: tpu' in out and all(f'{k}={v}' in out for k, v in environ.items())


GRAPH_ERROR = ('Graph execution error:\n\nDetected at node x defined at (most recent call last):\n'
               '<stack traces unavailable>\nRET_CHECK failure\nmore')


@pytest.mark.parametrize('failures, message', [
    ({'resolve': ValueError('Please provide a TPU Name to connect to.')}, 'provide a TPU Name'),
    ({'resolve': URLError('no route')}, 'no route'),
    ({'connect': tf.errors.UnavailableError(None, None, 'the connection is refused')}, 'connection is refused'),
    ({'initialize': RuntimeError('of a tf.function')}, 'of a tf.function'),
    ({'initialize': NOT_FOUND}, 'TPUs not found'),
    ({'initialize': tf.errors.InternalError(None, None, GRAPH_ERROR)}, 'RET_CHECK failure. Check the address'),
])
def test_a_tpu_that_does_not_start(failures, message, monkeypatch, capsys):
    simulate_tpu(monkeypatch, 8, {'TPU_NAME': 'mine'}, **failures)
    with pytest.raises(DeviceError, match="accelerator tpu: TensorFlow does not start the TPU 'mine': ") as e:
        create_tpu_strategy(accelerator='tpu')
    assert message in str(e.value)
    assert create_tpu_strategy().num_replicas_in_sync == 1
    out = capsys.readouterr().out
    assert message in out and 'TPU_NAME=mine' in out and 'the TPU is not used' in out


@pytest.mark.parametrize('build, message', [
    ('tensorflow-cpu', '^accelerator tpu: tensorflow-cpu 2.20.0 has no kernels for a TPU; '
                       'use PyTorch .--framework pytorch.'),
    ('tensorflow', 'TPUs not found.* If it was not built for TPUs, tensorflow 2.20.0 has no kernels for a TPU; '
                   'use PyTorch'),
])
def test_the_build_explains_the_failure(build, message, monkeypatch):
    simulate_tpu(monkeypatch, 8, KAGGLE, initialize=NOT_FOUND)
    monkeypatch.setattr(detection, 'installed_packages', lambda: {build: '2.20.0'})
    with pytest.raises(DeviceError, match=message): pick_tensorflow('tpu')
    d = pick_tensorflow()
    assert (d.kind, d.precision) == ('cpu', 'float32') and 'has no kernels for a TPU' in d.reason


def test_a_tpu_that_pytorch_uses_is_left_alone(monkeypatch):
    calls = simulate_tpu(monkeypatch, 8, KAGGLE)
    monkeypatch.setitem(sys.modules, 'torch_xla', ModuleType('torch_xla'))
    message = 'accelerator tpu: PyTorch/XLA is imported in this process, and only one of the two can use a TPU'
    with pytest.raises(DeviceError, match=message): create_tpu_strategy(accelerator='tpu')
    d = pick_tensorflow()
    assert d.kind == 'cpu' and 'the TPU is not used: PyTorch/XLA is imported' in d.reason and not calls


def test_a_build_for_tpus_continues_without_xla(monkeypatch, capsys):
    simulate_tpu(monkeypatch, 8, KAGGLE, initialize=tf.errors.InternalError(None, None, 'held by another process'))
    monkeypatch.setattr(detection, 'installed_packages', lambda: {'tensorflow-tpu': '2.20.0', 'libtpu': '0.0.31'})
    message = "TensorFlow does not start the TPU 'local': held by another process"
    with pytest.raises(DeviceError, match=f'accelerator tpu: {message}'): pick_tensorflow('tpu')
    replicas = start()
    out = capsys.readouterr().out
    assert f'the TPU is not used: {message}' in out and 'compiles for TPUs only, so this is slow' in out
    text = tf.constant('text')   # unknown to XLA
    assert replicas.compile(tf.strings.length)(text) == 4
    compiling = Strategy(replace(replicas.device, jit=True), replicas.distribution)
    with pytest.raises(tf.errors.InvalidArgumentError): compiling.compile(tf.strings.length)(text)


@pytest.mark.parametrize('cores, replicas', [(1, 1), (8, 1), (7, 7)])
def test_too_few_cores_are_detected(cores, replicas, monkeypatch, capsys):
    simulate_tpu(monkeypatch, cores, KAGGLE, replicas)
    message = f'TensorFlow uses {replicas} of 8 cores; check that no variable'
    with pytest.raises(DeviceError, match=f'accelerator tpu: {message}'): create_tpu_strategy(accelerator='tpu')
    with pytest.warns(RuntimeWarning, match=f'uses {replicas} of 8 cores'):
        assert create_tpu_strategy().num_replicas_in_sync == replicas
    assert f', {replicas} replica' in capsys.readouterr().out


def test_an_unknown_number_of_cores_is_reported(monkeypatch, capsys):
    simulate_tpu(monkeypatch, 1, {'TPU_NAME': 'mine'})
    assert create_tpu_strategy(accelerator='tpu').num_replicas_in_sync == 1
    assert 'TensorFlow uses 1 of its cores (number of cores unknown)' in capsys.readouterr().out


def test_a_tpu_without_cores(monkeypatch):
    simulate_tpu(monkeypatch, 0, KAGGLE)
    with pytest.raises(DeviceError, match='has no kernels|sees no core'): pick_tensorflow('tpu')
    assert pick_tensorflow().kind == 'cpu'


def simulate_gpus(monkeypatch, capability, n=2, driver=2):
    "Simulate TensorFlow's calls on a machine with GPUs; returns the visible devices that were set."
    shown = []
    logical = tf.config.list_logical_devices
    details = dict(device_name='NVIDIA X', compute_capability=capability)
    def list_devices(kind=None): return [None] * n if kind == 'GPU' else logical(kind)
    def strategy(names): return SimpleNamespace(names=names, num_replicas_in_sync=len(names))
    for module in (detection, devices):
        monkeypatch.setattr(module, 'driver_gpus', lambda: (Gpu('NVIDIA X', 15., '0.0', False),) * driver)
    monkeypatch.setattr(tf.config, 'get_visible_devices', lambda kind=None: ['gpu'] * n)
    monkeypatch.setattr(tf.config.experimental, 'get_device_details', lambda gpu: details)
    monkeypatch.setattr(tf.config, 'list_logical_devices', list_devices)
    monkeypatch.setattr(tf.config, 'set_visible_devices', lambda gpus, kind: shown.append((gpus, kind)))
    monkeypatch.setattr(tf.distribute, 'MirroredStrategy', strategy)
    monkeypatch.setattr(detection, 'installed_packages', lambda: {'tensorflow': '2.20.0'})
    return shown


def test_gpus(monkeypatch):
    simulate_gpus(monkeypatch, (8, 0))
    assert devices.tensorflow_gpus() == (Gpu('NVIDIA X', 15., '8.0', True),) * 2
    for accelerator in ('auto', 'cuda'):
        d = pick_tensorflow(accelerator)
        assert (d.kind, d.name, d.precision, d.n_devices) == ('cuda', 'NVIDIA X', 'bfloat16', 2)
        assert create_tpu_strategy(accelerator=accelerator).names == ['GPU:0', 'GPU:1']
    simulate_gpus(monkeypatch, (7, 5), n=1)
    d = pick_tensorflow()
    assert (d.precision, d.n_devices) == ('float16', 1) and 'TensorFlow sees 1 of 2 GPUs' in d.reason
    assert 'TF32' not in d.reason
    assert create_tpu_strategy(device=d) is tf.distribute.get_strategy()


def test_gpus_that_are_not_asked_for_are_hidden(monkeypatch):
    shown = simulate_gpus(monkeypatch, (8, 0))
    assert pick_tensorflow('cpu').kind == 'cpu' and shown == [([], 'GPU')]
    def too_late(*args): raise RuntimeError('Visible devices cannot be modified after being initialized')
    monkeypatch.setattr(tf.config, 'set_visible_devices', too_late)
    with pytest.raises(DeviceError, match='TensorFlow already holds the GPU'): pick_tensorflow('cpu')


def test_gpus_that_tensorflow_does_not_see(monkeypatch):
    simulate_gpus(monkeypatch, (8, 0), n=0)
    assert 'TensorFlow sees 0 of 2 GPUs' in pick_tensorflow().reason
    with pytest.raises(DeviceError, match='accelerator cuda: TensorFlow finds no GPU'): pick_tensorflow('cuda')


def test_tpus_are_preferred_to_gpus_and_gpus_to_the_cpu(monkeypatch):
    simulate_gpus(monkeypatch, (8, 0))
    simulate_tpu(monkeypatch, 8, KAGGLE, initialize=NOT_FOUND)
    d = pick_tensorflow()
    assert (d.kind, d.n_devices) == ('cuda', 2) and 'the TPU is not used' in d.reason


def test_eight_logical_processors(tmp_path):
    code = """
import tensorflow as tf
cpu = tf.config.list_physical_devices('CPU')[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 8)
from b2t_kaggle.devices.tensorflow import create_tpu_strategy, pick_tensorflow
strategy = create_tpu_strategy(accelerator='cpu')
ids = strategy.run(lambda: tf.distribute.get_replica_context().replica_id_in_sync_group)
print([int(i) for i in strategy.experimental_local_results(ids)], pick_tensorflow().n_devices)
"""
    env = {k: v for k, v in os.environ.items() if k not in detection.TPU_VARIABLES}
    env |= {'PYTHONPATH': str(ROOT), 'CUDA_VISIBLE_DEVICES': '-1'}
    r = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, timeout=400, cwd=tmp_path, env=env)
    assert r.returncode == 0, r.stderr
    variables, strategy, ids = r.stdout.splitlines()
    assert variables == 'variables: CUDA_VISIBLE_DEVICES=-1'
    assert strategy.startswith('MirroredStrategy, 8 replicas: cpu (') and ids == f'{list(range(8))} 8'


def test_an_optimiser_of_pytorch_after_tensorflow():
    "The optimiser imports Triton, which crashes a process that imported TensorFlow first."
    if not find_spec('triton'): pytest.skip('this PyTorch has no Triton; builds for GPUs do')
    code = ('from b2t_kaggle.tensorflow import layers\nimport torch\n'
            'torch.optim.SGD([torch.zeros(1, requires_grad=True)])')
    r = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, timeout=300,
                       env=os.environ | {'PYTHONPATH': str(ROOT)})
    assert r.returncode == 0, r.stderr


def test_cpus_compute_bfloat16_in_float32():
    "CPUs without AMX multiply bfloat16 numbers in float32, so float32 is their default."
    if 'amx_bf16' in cpu_flags(): pytest.skip('seen on processors without AMX')
    with tf.device('CPU'):
        a = tf.ones([16, 16], tf.bfloat16)
        hlo = tf.function(lambda a: a @ a, jit_compile=True).experimental_get_compiler_ir(a)(stage='optimized_hlo')
    products = [line for line in hlo.splitlines() if ' dot(' in line]
    assert len(products) == 1 and ' = f32[16,16]' in products[0]


def test_mixed_precision_follows_the_device(monkeypatch):
    import keras
    before = keras.mixed_precision.global_policy()
    try:
        for kind, precision, policy in [
            ('tpu', 'bfloat16', 'mixed_bfloat16'),
            ('tpu', 'float32', 'float32'),
            ('cuda', 'float16', 'mixed_float16'),
            ('cpu', 'float32', 'float32'),
        ]:
            configured = configure_mixed_precision(Device(kind, '', precision, ''))
            assert configured == policy == keras.mixed_precision.global_policy().name
        assert configure_mixed_precision() == configure_mixed_precision('auto') == 'float32'  # on a CPU
        monkeypatch.setattr(devices, 'pick_tensorflow', lambda: Device('cuda', '', 'bfloat16', ''))
        for device in (None, 'auto'):
            assert configure_mixed_precision(device) == 'mixed_bfloat16'
            assert tf.config.experimental.tensor_float_32_execution_enabled()
        monkeypatch.setattr(devices, 'pick_tensorflow', lambda: pytest.fail('started an accelerator'))
        assert configure_mixed_precision('float32') == 'float32'
        assert not tf.config.experimental.tensor_float_32_execution_enabled()
    finally: configure_mixed_precision('bfloat16' if before.name == 'mixed_bfloat16' else 'float32')
