"Detected devices on simulated machines, what a run would use there, and that detection imports no framework."
import os
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from b2t_kaggle.cli.devices import describe
from b2t_kaggle.devices.machine import (
    TPU_GENERATIONS,
    DeviceError,
    Gpu,
    detect,
    driver_gpus,
    find_tpu,
    seen_variables,
    torch_gpus,
    tpu_type,
)
from b2t_kaggle.devices.tensorflow import plan_tensorflow, tensorflow_address
from b2t_kaggle.devices.torch import pick_torch, plan_torch

ROOT = Path(__file__).parent.parent
FRAMEWORKS = ('torch', 'torch_xla', 'tensorflow', 'jax', 'keras')
PAIR = {'torch': '2.8.0+cpu', 'torch_xla': '2.8.0', 'libtpu': '0.0.17'}
KAGGLE_PACKAGES = PAIR | {'tensorflow-cpu': '2.20.0'}
KAGGLE = {'ISTPUVM': '1', 'TPU_PROCESS_ADDRESSES': 'local', 'TPU_WORKER_HOSTNAMES': 'localhost', 'TPU_WORKER_ID': '0',
          'TPU_SKIP_MDS_QUERY': '1', 'KAGGLE_USER': 'x'}
T4 = Gpu('Tesla T4', 15., '7.5', False)
P40 = Gpu('Tesla P40', 24., '6.1', False)
H200 = Gpu('NVIDIA H200', 140., '9.0', True)


def machine(root, accel=0, vfio=0, pci=(), memory_kib=None):
    "A file system with device files, PCI devices `(vendor, device)` and the kernel's report of its memory."
    files = {f'dev/accel{i}': '' for i in range(accel)} | {f'dev/vfio/{i}': '' for i in range(vfio)}
    if vfio: files['dev/vfio/vfio'] = ''
    for i, values in enumerate(pci):
        folder = f'sys/bus/pci/devices/0000:00:{i:02x}.0'
        files |= {f'{folder}/{name}': value for name, value in zip(('vendor', 'device'), values)}
    if memory_kib: files['proc/meminfo'] = f'MemTotal:       {memory_kib} kB\nMemFree:  1 kB\n'
    for name, text in files.items():
        (root/name).parent.mkdir(parents=True, exist_ok=True)
        (root/name).write_text(text + '\n')
    return root


def chips(device, n): return [('0x1ae0', device)] * n


NETWORK_CARD = ('0x1ae0', '0x0042') # Of the same vendor, in every virtual machine of Google


@dataclass
class Simulated:
    "A machine and the expected results."
    variables: dict[str, str] = field(default_factory=dict)
    files: dict = field(default_factory=dict)            # Arguments of `machine`
    packages: dict[str, str] = field(default_factory=dict)
    gpus: tuple[Gpu, ...] = ()
    kind: str = 'cpu'
    tpu: tuple = (None, None, None, None)                # Generation, chips, cores, XLA devices
    plan: tuple = ('cpu', None, None, 1)                 # For PyTorch: kind, name, precision, devices; None: unchecked
    words: list[str] = field(default_factory=list)       # Of the table


TYPED = KAGGLE | {'TPU_ACCELERATOR_TYPE': 'v5litepod-8'}


def no_torch_on(words, tpu=('v5e', 8, 8, 8), variables=TYPED, files=None, packages=PAIR):
    "A machine with a TPU that PyTorch/XLA cannot use."
    files = dict(vfio=8, pci=chips('0x0063', 8)) if files is None else files
    return Simulated(variables, files, packages, kind='tpu', tpu=tpu, words=words)


SIMULATED = {
    'kaggle v5e-8': Simulated(
        KAGGLE | {'TPU_ACCELERATOR_TYPE': 'v5litepod-8', 'TPU_CHIPS_PER_HOST_BOUNDS': '2,4,1'},
        dict(vfio=8, pci=chips('0x0063', 8) + [NETWORK_CARD]), KAGGLE_PACKAGES,
        kind='tpu', tpu=('v5e', 8, 8, 8), plan=('xla', 'TPU v5e', 'bfloat16', 8),
        words=['ISTPUVM=1', 'TPU_PROCESS_ADDRESSES=local', 'v5e (v5litepod-8), chips: 8, cores: 8, each with 16 GB',
               '/dev/vfio/0 to 7 (8), 8 PCI devices',
               'xla (TPU v5e, 8 devices), bfloat16: the TPU is the fastest here',
               'tensorflow-cpu 2.20.0 has no kernels for a TPU']),
    'kaggle v6e-8': Simulated(
        KAGGLE | {'TPU_ACCELERATOR_TYPE': 'v6e-8'}, dict(vfio=8), KAGGLE_PACKAGES,
        kind='tpu', tpu=('v6e', 8, 8, 8), plan=('xla', 'TPU v6e', 'bfloat16', 8),
        words=['v6e (v6e-8), chips: 8, cores: 8, each with 32 GB and 918 TFLOP/s']),
    'kaggle v3-8': Simulated(
        KAGGLE | {'TPU_ACCELERATOR_TYPE': 'v3-8', 'TPU_CHIPS_PER_HOST_BOUNDS': '2,2,1'},
        dict(accel=4, pci=chips('0x0027', 4)), KAGGLE_PACKAGES,
        kind='tpu', tpu=('v3', 4, 8, 8), plan=('xla', 'TPU v3', 'bfloat16', 8),
        words=['chips: 4, cores: 8, each with 16 GB', '/dev/accel0 to accel3 (4)']),
    'kaggle, type unset, v2 or v3': Simulated(
        KAGGLE, dict(accel=4, pci=chips('0x0027', 4)), PAIR,
        kind='tpu', tpu=(None, 4, None, None), plan=('xla', 'TPU of unknown generation', 'bfloat16', 1),
        words=['unknown generation, chips: 4']),
    'colab v5e-1': Simulated(
        {'COLAB_TPU_1VM': '1', 'TPU_WORKER_ID': '0', 'TPU_HOST_BOUNDS': '1,1,1', 'TPU_CHIPS_PER_HOST_BOUNDS': '2,2,1',
         'TPU_ACCELERATOR_TYPE': 'v5e-1'}, dict(accel=1), PAIR,
        kind='tpu', tpu=('v5e', 1, 1, 1), plan=('xla', 'TPU v5e', 'bfloat16', 1),
        words=['COLAB_TPU_1VM=1', 'chips: 1, cores: 1']),
    'cloud v4-8': Simulated(
        {'TPU_NAME': 'mine', 'TPU_ACCELERATOR_TYPE': 'v4-8', 'TPU_WORKER_ID': '0'},
        dict(accel=4, pci=chips('0x005e', 4)), PAIR,
        kind='tpu', tpu=('v4', 4, 8, 4), plan=('xla', 'TPU v4', 'bfloat16', 4),
        words=['TPU_NAME=mine', 'chips: 4, cores: 8, each with 16 GB']),
    'cloud v5p-16 of two hosts': Simulated(
        {'TPU_ACCELERATOR_TYPE': 'v5p-16', 'TPU_WORKER_ID': '1', 'TPU_WORKER_HOSTNAMES': 'a,b', 'PJRT_DEVICE': 'TPU'},
        {}, PAIR, kind='tpu', tpu=('v5p', 4, 8, 4), plan=('xla', 'TPU v5p', 'bfloat16', 4),
        words=['PJRT_DEVICE=TPU']),
    'a generation to come': Simulated(
        {'TPU_ACCELERATOR_TYPE': 'tpu9-16', 'TPU_CHIPS_PER_HOST_BOUNDS': '2,2,1'}, dict(vfio=4), PAIR,
        kind='tpu', tpu=(None, 4, None, None), plan=('xla', 'TPU tpu9-16', 'bfloat16', 1),
        words=['unknown generation (tpu9-16), chips: 4']),
    'hardware without variables': Simulated(
        {}, dict(vfio=4, pci=chips('0x006f', 4)), PAIR,
        kind='tpu', tpu=(None, 4, None, None), plan=('xla', 'TPU of unknown generation', 'bfloat16', 1),
        words=['variables   none']),
    'variables without hardware': no_torch_on(
        ['ISTPUVM indicates a TPU, but', 'PJRT_DEVICE=TPU to try'], tpu=(None, None, None, None), files={},
        variables=KAGGLE),
    'TPU, torch_xla missing': no_torch_on(
        ['the TPU is not used: torch_xla is not installed (torch 2.8.0)',
         "pip install 'torch==2.8.0' 'torch_xla[tpu]==2.8.0'"],
        variables=TYPED, files=dict(vfio=8), packages={'torch': '2.8.0'}),
    'TPU, no pair': no_torch_on(
        ['torch 2.13.0 and torch_xla 2.8.0 do not match: their minor versions must be equal; '
         "pip install 'torch==2.8.0' 'torch_xla[tpu]==2.8.0'"],
        variables=TYPED, files=dict(vfio=8),
        packages=PAIR | {'torch': '2.13.0'}),
    'TPU, libtpu missing': no_torch_on(
        ["libtpu is not installed; pip install 'torch_xla[tpu]==2.9.0'"],
        packages={'torch': '2.9.1', 'torch_xla': '2.9.0'}),
    'TPU, kept off it': no_torch_on(
        ['PJRT_DEVICE=CPU keeps PyTorch/XLA off the TPU; unset it'], variables=TYPED | {'PJRT_DEVICE': 'CPU'}),
    'TPU, silent bfloat16': no_torch_on(
        ['XLA_USE_BF16=1 makes torch_xla store every float32 tensor as bfloat16; unset it'],
        variables=TYPED | {'XLA_USE_BF16': '1'}),
    'PJRT on the processor': Simulated(
        {'PJRT_DEVICE': 'CPU', 'CPU_NUM_DEVICES': '8'}, {}, PAIR,
        words=['PJRT_DEVICE=CPU CPU_NUM_DEVICES=8', "xla (XLA's processor backend"]),
    'GPUs': Simulated(
        {}, {}, {'torch': '2.10.0', 'tensorflow': '2.20.0'}, (H200, H200),
        kind='cuda', plan=('cuda', 'NVIDIA H200', 'bfloat16', 2),
        words=['cuda:1      NVIDIA H200, 140 GiB, compute capability 9.0', 'found a GPU; computes bfloat16',
               'torch_xla   not installed; only a TPU needs it',
               'tensorflow  cuda (NVIDIA H200, 2 devices), bfloat16']),
    'a GPU without bfloat16': Simulated(
        {'COLAB_TPU_1VM': ''}, dict(vfio=1, pci=[('0x10de', '0x1eb8'), NETWORK_CARD]),
        {'torch': '2.10.0', 'tensorflow-cpu': '2.20.0'}, (T4,),
        kind='cuda', plan=('cuda', 'Tesla T4', 'float16', 1),
        words=['cuda (Tesla T4), float16: found a GPU; does not compute bfloat16 (compute capability 7.5; 8.0 '
               'needed), but float16, with a scaled loss', 'tensorflow-cpu 2.20.0 is built without CUDA']),
    'T4 x 2': Simulated(
        {}, {}, {'torch': '2.10.0', 'tensorflow': '2.20.0'}, (T4, T4),
        kind='cuda', plan=('cuda', 'Tesla T4', 'float16', 2),
        words=['torch       cuda (Tesla T4, 2 devices), float16', 'tensorflow  cuda (Tesla T4, 2 devices), float16']),
    'a GPU without tensor cores': Simulated(
        {}, {}, {'torch': '2.10.0'}, (P40,),
        kind='cuda', plan=('cuda', 'Tesla P40', 'float32', 1),
        words=['float32: found a GPU; does not compute bfloat16 (compute capability 6.1; 8.0 needed), and has no '
               'tensor cores']),
    'nothing': Simulated(
        {'ISTPUVM': '0', 'COLAB_TPU_1VM': ''}, dict(memory_kib=25165824),
        words=['24 GiB memory', 'variables   none', 'packages    no framework', 'torch       not installed',
               'TensorFlow is not installed']),
}


def simulate(name, root):
    s = SIMULATED[name]
    return detect(environ=s.variables, root=machine(root, **s.files), packages=s.packages, gpus=s.gpus,
                  imported=frozenset())


@pytest.mark.parametrize('name', SIMULATED)
def test_simulated(name, tmp_path):
    expected = SIMULATED[name]
    d = simulate(name, tmp_path)
    t = d.tpu
    assert d.kind == expected.kind
    assert (t is None) == (expected.kind != 'tpu')
    if t: assert (t.generation.name if t.generation else None, t.chips, t.cores, t.devices) == expected.tpu
    kind, device_name, precision, n = expected.plan
    got = plan_torch(d)
    assert (got.kind, got.n_devices) == (kind, n)
    assert device_name in (None, got.name) and precision in (None, got.precision)
    table = describe(d)
    for w in expected.words: assert w in table
    assert table.startswith(str(d) + '\n')


@pytest.mark.parametrize('name', [n for n in SIMULATED if SIMULATED[n].kind == 'tpu'])
def test_auto_and_by_name_agree(name, tmp_path):
    "If `auto` does not use a TPU, naming it raises an error with the same reason; otherwise both pick the same device."
    d = simulate(name, tmp_path)
    auto = plan_torch(d)
    if auto.kind == 'xla':
        for accelerator in ('tpu', 'xla'):
            assert replace(plan_torch(d, accelerator), reason='') == replace(auto, reason='')
    else:
        with pytest.raises(DeviceError) as e: plan_torch(d, 'tpu')
        assert str(e.value).removeprefix('accelerator tpu: ') in auto.reason


def test_xla_on_the_processor(tmp_path):
    d = simulate('PJRT on the processor', tmp_path)
    device = plan_torch(d, 'xla')
    assert (device.kind, device.n_devices, device.precision) == ('xla', 8, 'float32')
    assert 'PJRT_DEVICE=CPU' in device.reason
    assert plan_torch(d, 'xla', 'bfloat16').precision == 'bfloat16'


def test_precision_on_a_gpu(tmp_path):
    old = simulate('a GPU without bfloat16', tmp_path)
    new = replace(old, gpus=(H200,))
    for precision in ('float32', 'float16'):
        for d in (old, new):
            got = plan_torch(d, 'cuda', precision)
            assert got.precision == precision and f'{precision} asked for' in got.reason
    assert (plan_torch(old).precision, plan_torch(new).precision) == ('float16', 'bfloat16')
    assert plan_torch(replace(old, gpus=()), 'cpu', 'float16').precision == 'float16'


def test_emulated_types_do_not_count(monkeypatch):
    "PyTorch reports that a T4 supports bfloat16, unless it is asked to exclude emulation."
    import torch
    t4 = SimpleNamespace(name='Tesla T4', total_memory=15 * 2**30, major=7, minor=5)
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: 2)
    monkeypatch.setattr(torch.cuda, 'get_device_properties', lambda i: t4)
    monkeypatch.setattr(torch.cuda, 'is_bf16_supported', lambda including_emulation=True: including_emulation)
    gpus = torch_gpus()
    assert gpus == (T4, T4) and not T4.bfloat16


def test_float16_is_not_for_tpus(tmp_path):
    for name, accelerator in (('kaggle v5e-8', 'tpu'), ('kaggle v5e-8', 'auto'), ('PJRT on the processor', 'xla')):
        d = simulate(name, tmp_path/name/accelerator)
        with pytest.raises(DeviceError) as e: plan_torch(d, accelerator, 'float16')
        assert str(e.value) == 'TPUs do not support precision float16; set train.precision=bfloat16 or auto'


def test_precision_on_a_tpu(tmp_path):
    d = simulate('kaggle v5e-8', tmp_path)
    assert (plan_torch(d, 'tpu').precision, plan_torch(d, 'tpu', 'float32').precision) == ('bfloat16', 'float32')
    assert 'float32 asked for' in plan_torch(d, 'tpu', 'float32').reason


@pytest.mark.parametrize('name, accelerator, precision, message', [
    ('nothing', 'gpu', 'auto', "accelerator 'gpu' does not exist; choose one of auto, cpu, cuda, tpu, xla"),
    ('nothing', 'cpu', 'float8', "precision 'float8' does not exist; choose one of auto, float32, bfloat16, float16"),
    ('nothing', 'cuda', 'auto', 'accelerator cuda: PyTorch finds no CUDA device (torch not installed)'),
    ('nothing', 'tpu', 'auto', 'accelerator tpu: no TPU here'),
    ('nothing', 'xla', 'auto', 'must be requested by PJRT_DEVICE=CPU'),
    ('GPUs', 'tpu', 'auto', 'accelerator tpu: no TPU here'),
    ('PJRT on the processor', 'tpu', 'auto', 'accelerator tpu: no TPU here'),
])
def test_errors(name, accelerator, precision, message, tmp_path):
    with pytest.raises(DeviceError) as e: plan_torch(simulate(name, tmp_path), accelerator, precision)
    assert message in str(e.value)


@pytest.mark.parametrize('change, message', [
    (dict(packages={'torch': '2.13.0+cpu'}),
     "torch_xla is not installed (torch 2.13.0+cpu); pip install 'torch==2.8.0' 'torch_xla[tpu]==2.8.0'"),
    (dict(packages={'torch_xla': '2.8.0'}),
     "torch is not installed (torch_xla 2.8.0); pip install 'torch==2.8.0' 'torch_xla[tpu]==2.8.0'"),
    (dict(packages={'torch': '2.9.1', 'torch_xla': '2.8.0'}), "pip install 'torch==2.8.0' 'torch_xla[tpu]==2.8.0'"),
    (dict(imported=frozenset({'tensorflow'})), 'TensorFlow is imported in this process'),
    (dict(variables={'PJRT_DEVICE': 'CPU', 'XLA_DOWNCAST_BF16': '1'}), 'XLA_DOWNCAST_BF16=1 makes torch_xla store'),
])
def test_packages_that_xla_cannot_use(change, message, tmp_path):
    d = simulate('PJRT on the processor', tmp_path)
    with pytest.raises(DeviceError) as e: plan_torch(replace(d, **change), 'xla')
    assert message in str(e.value)
    works = replace(d, imported=frozenset({'tensorflow', 'torch_xla'})) # torch_xla before TensorFlow
    assert plan_torch(works, 'xla').kind == 'xla'


TF_TPU = {'tensorflow-tpu': '2.20.0', 'libtpu': '0.0.31'}
NO_KERNELS = ('has no kernels for a TPU; use PyTorch (--framework pytorch), or tensorflow-tpu in a separate '
              'environment: pip install')

# Simulated machine, packages (None: the machine's own), accelerator -> kind, precision, devices, words of the reason;
# or words of the error
TENSORFLOW = {
    'TPU, by itself': ('kaggle v5e-8', TF_TPU, 'auto', ('tpu', 'bfloat16', 8, 'the TPU is the fastest here')),
    'TPU, asked for': ('kaggle v3-8', TF_TPU, 'tpu', ('tpu', 'bfloat16', 8, 'asked for')),
    'two cores per device': ('cloud v4-8', TF_TPU, 'tpu', ('tpu', 'bfloat16', 4, 'asked for')),
    "Kaggle's TPU image": (
        'kaggle v5e-8', None, 'auto',
        ('cpu', 'float32', 1, f'the TPU is not used: tensorflow-cpu 2.20.0 {NO_KERNELS}')),
    "Kaggle's TPU image, asked for": (
        'kaggle v5e-8', None, 'tpu', f'accelerator tpu: tensorflow-cpu 2.20.0 {NO_KERNELS}'),
    'a build of which only the start tells': (
        'kaggle v6e-8', {'tensorflow': '2.20.0'}, 'auto',
        ('tpu', 'bfloat16', 8, 'whether tensorflow 2.20.0 is built for TPUs is known once it starts')),
    'a nightly build without kernels': (
        'kaggle v6e-8', {'tf-nightly-cpu': '2.22.0'}, 'auto',
        ('cpu', 'float32', 1, f'tf-nightly-cpu 2.22.0 {NO_KERNELS}')),
    'an unknown generation': ('kaggle, type unset, v2 or v3', TF_TPU, 'tpu', ('tpu', 'bfloat16', 1, 'asked for')),
    'a libtpu that ends the process': (
        'kaggle v5e-8', TF_TPU | {'libtpu': '0.0.32.1'}, 'auto',
        "ends the process that imports it with libtpu 0.0.32.1; pip install 'tensorflow-tpu==2.20.0' 'libtpu==0.0.31'"),
    'variables and no TPU': (
        'variables without hardware', TF_TPU, 'auto',
        ('cpu', 'float32', 1, 'the TPU is not used: ISTPUVM indicates a TPU, but there is no device file')),
    'the build for TPUs, on the processor': (
        'kaggle v5e-8', TF_TPU, 'cpu',
        ('cpu', 'float32', 1, 'tensorflow-tpu 2.20.0 compiles for TPUs only, so this is slow')),
    'no TPU, asked for': ('nothing', {'tensorflow-cpu': '2.21.0'}, 'tpu', 'accelerator tpu: no TPU here'),
    'nothing': ('nothing', {'tensorflow-cpu': '2.21.0'}, 'auto', ('cpu', 'float32', 1, 'by way of float32')),
    'no TensorFlow': ('nothing', None, 'auto', 'pip install b2t_kaggle[tf]'),
    'GPUs': (
        'GPUs', None, 'auto',
        ('cuda', 'bfloat16', 2, 'found a GPU; computes bfloat16; GRU layers in float32, with factors in TF32')),
    'GPUs, a build of another name': (
        'GPUs', {'tensorflow-rocm': '2.14.0'}, 'auto', ('cuda', 'bfloat16', 2, 'found a GPU')),
    'GPUs left alone': ('GPUs', None, 'cpu', ('cpu', 'float32', 1, 'asked for')),
    'a GPU without bfloat16': (
        'a GPU without bfloat16', {'tensorflow': '2.20.0'}, 'cuda',
        ('cuda', 'float16', 1, 'does not compute bfloat16')),
    'a build without CUDA': (
        'a GPU without bfloat16', None, 'auto', ('cpu', 'float32', 1, 'tensorflow-cpu 2.20.0 is built without CUDA')),
    'a build without CUDA, asked for': (
        'a GPU without bfloat16', None, 'cuda', 'TensorFlow finds no GPU (tensorflow-cpu 2.20.0)'),
    'xla': ('GPUs', None, 'xla', 'TensorFlow compiles with XLA on every device: use auto, cpu, cuda or tpu'),
    'what there is not': ('GPUs', None, 'gpu', "accelerator 'gpu' does not exist"),
}


@pytest.mark.parametrize('name', TENSORFLOW)
def test_tensorflow(name, tmp_path):
    machine_name, packages, accelerator, expected = TENSORFLOW[name]
    d = simulate(machine_name, tmp_path)
    if packages: d = replace(d, packages=packages)
    if isinstance(expected, str):
        with pytest.raises(DeviceError) as e: plan_tensorflow(d, accelerator)
        assert expected in str(e.value)
    else:
        got = plan_tensorflow(d, accelerator)
        assert (got.kind, got.precision, got.n_devices) == expected[:3] and expected[3] in got.reason
        assert plan_tensorflow(d, accelerator, 'float32').precision == 'float32'
        with pytest.raises(DeviceError, match='precision'): plan_tensorflow(d, accelerator, 'float8')
        if got.kind == 'tpu':
            with pytest.raises(DeviceError, match='^TPUs do not support precision float16'):
                plan_tensorflow(d, accelerator, 'float16')
        else: assert plan_tensorflow(d, accelerator, 'float16').precision == 'float16'


def test_tensorflow_and_torch_xla_share_no_tpu(tmp_path):
    d = replace(simulate('kaggle v5e-8', tmp_path), packages=TF_TPU, imported=frozenset({'torch_xla'}))
    with pytest.raises(DeviceError, match='only one of the two can use a TPU'): plan_tensorflow(d, 'tpu')


@pytest.mark.parametrize('name', ['kaggle v5e-8', 'cloud v4-8', 'variables without hardware'])
def test_tensorflow_address(name, tmp_path):
    assert tensorflow_address(simulate(name, tmp_path)) == 'local'


def test_a_pod_is_found_by_its_name(tmp_path):
    d = detect(environ={'TPU_NAME': 'pod', 'TPU_WORKER_HOSTNAMES': 'a,b'}, root=machine(tmp_path, accel=4), gpus=())
    assert tensorflow_address(d) == 'pod' and tensorflow_address(replace(d, variables={'TPU_NAME': 'pod'})) == 'local'


def test_vfio_alone_is_not_a_tpu(tmp_path):
    "A machine that passes any other device to a program has the same kind of device file."
    assert find_tpu({}, machine(tmp_path, vfio=2, pci=[NETWORK_CARD, ('0x10de', '0x0063')])) is None


def test_driver_is_silent_or_odd(monkeypatch):
    for text in ('', 'NVIDIA-SMI has failed, because, it failed\n'):
        monkeypatch.setattr('b2t_kaggle.devices.machine._nvidia_smi', lambda: text)
        assert driver_gpus() == ()
    assert detect(environ={'CUDA_VISIBLE_DEVICES': ''}, root='/nowhere', packages={}).gpus == ()


def test_generations_are_consistent():
    for name, g in TPU_GENERATIONS.items():
        assert tpu_type(f'{name}-8') == (g, 8) and g.cores % g.devices == 0
        # Every generation since v2 performs between 60 and 600 operations per byte; a wrong unit would be outside
        assert 60 < g.tflops * 1000 / g.hbm_gbps < 600


def test_pick_refuses_before_it_imports(monkeypatch):
    monkeypatch.delenv('PJRT_DEVICE', raising=False)
    if detect().tpu: pytest.skip('there is a TPU')
    before = 'torch_xla' in sys.modules
    for accelerator in ('tpu', 'xla', 'mps'):
        with pytest.raises(DeviceError, match='accelerator'): pick_torch(accelerator)
    assert ('torch_xla' in sys.modules) == before


def test_variables_without_information():
    assert seen_variables({'ISTPUVM': 'False', 'COLAB_TPU_1VM': ' ', 'XLA_USE_BF16': '0', 'PATH': '/bin'}) == {}


def python(code, tmp_path, **env):
    "Run code in a new process, with the packages in `tmp_path` before ours and without the variables of this machine."
    accelerators = ('TPU_', 'PJRT', 'XLA_', 'COLAB', 'ISTPU', 'CPU_NUM')
    clean = {k: v for k, v in os.environ.items() if not k.startswith(accelerators)}
    return subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, timeout=400, cwd=tmp_path,
                          env=clean | {'PYTHONPATH': f'{tmp_path}{os.pathsep}{ROOT}'} | env)


def test_imports_no_framework(tmp_path):
    code = ("import sys\nfrom b2t_kaggle.cli.devices import describe\n"
            "from b2t_kaggle.devices.machine import *\n"
            "for f in (None, 'xla', 'tensorflow'): print(describe(detect(f)))\n"
            f"print('LOADED', [m for m in {FRAMEWORKS!r} if m in sys.modules])")
    tpu = {'ISTPUVM': '1', 'TPU_ACCELERATOR_TYPE': 'v5litepod-8', 'PJRT_DEVICE': 'TPU'}
    for env in ({}, tpu, {'PJRT_DEVICE': 'CPU'}):
        r = python(code, tmp_path, **env)
        assert r.returncode == 0, r.stderr
        assert r.stdout.endswith('LOADED []\n')
        assert 'packages    ' in r.stdout and all(f'{k}={v}' in r.stdout for k, v in env.items())


def test_only_torch_is_imported_when_it_is_requested(tmp_path):
    code = ("import sys\nfrom b2t_kaggle.devices.torch import *\nfrom b2t_kaggle.devices.machine import detect\n"
            f"detect('torch')\npick_torch('cpu')\nprint([m for m in {FRAMEWORKS[:3]!r} if m in sys.modules])")
    r = python(code, tmp_path)
    assert r.stdout == "['torch']\n", r.stderr


def fake_package(root, name, version, **modules):
    for module, text in modules.items():
        (root/name).mkdir(exist_ok=True)
        (root/name/f'{module}.py').write_text(text)
    info = root/f'{name}-{version}.dist-info'
    info.mkdir()
    (info/'METADATA').write_text(f'Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n')


def test_tensorflow_by_any_name(tmp_path):
    "Without site-packages, so that it is the only TensorFlow."
    fake_package(tmp_path, 'tensorflow', '0', __init__='')
    (tmp_path/'tensorflow-0.dist-info').rename(info := tmp_path/'tf_nightly-2.22.0.dev20261101.dist-info')
    (info/'METADATA').write_text('Metadata-Version: 2.1\nName: tf_nightly\nVersion: 2.22.0.dev20261101\n')
    (info/'top_level.txt').write_text('tensorflow\n')
    code = ("from b2t_kaggle.devices.machine import detect\nfrom b2t_kaggle.devices.tensorflow import *\n"
            "d = detect(environ={}, root='/nowhere', gpus=())\n"
            "print(d.packages, tensorflow_build(d), plan_tensorflow(d).reason, sep='; ')")
    env = os.environ | {'PYTHONPATH': f'{tmp_path}{os.pathsep}{ROOT}'}
    r = subprocess.run([sys.executable, '-S', '-c', code], capture_output=True, text=True, timeout=60, cwd=tmp_path,
                       env=env)
    expected = "{'tf-nightly': '2.22.0.dev20261101'}; tf-nightly; tf-nightly 2.22.0.dev20261101 sees no GPU"
    assert r.stdout.startswith(expected), r.stdout + r.stderr


START = """
import os
from b2t_kaggle.devices.torch import *
from b2t_kaggle.devices.machine import DeviceError
try: print(pick_torch('{}'), os.environ['PJRT_DEVICE'])
except DeviceError as e: print('ERROR', e)
"""


def test_start_counts_devices_and_prevents_a_fallback_to_the_cpu(tmp_path):
    "A torch_xla that reports 4 devices: the runtime's number replaces the plan's (8, from the type)."
    import torch
    fake_package(tmp_path, 'torch_xla', torch.__version__.split('+')[0], __init__='',
                 runtime='def global_runtime_device_count(): return 4')
    fake_package(tmp_path, 'libtpu', '0.0.17')
    code = ("import os\nfrom b2t_kaggle.devices import machine\nfrom b2t_kaggle.devices.torch import pick_torch\n"
            f"find_tpu, root = machine.find_tpu, {str(machine(tmp_path, vfio=8))!r}\n"
            "machine.find_tpu = lambda variables, _: find_tpu(variables, root)\n"
            "print(pick_torch(), os.environ['PJRT_DEVICE'])")
    r = python(code, tmp_path, ISTPUVM='1', TPU_ACCELERATOR_TYPE='v5litepod-8')
    expected = 'xla (TPU v5e, 4 devices), bfloat16: the TPU is the fastest here; computes bfloat16 TPU\n'
    assert r.stdout == expected, r.stderr


def test_start_that_fails(tmp_path):
    import torch
    fake_package(tmp_path, 'torch_xla', torch.__version__.split('+')[0],
                 __init__="raise ImportError('_XLAC.so: undefined symbol: _ZN5torch')")
    fake_package(tmp_path, 'libtpu', '0.0.17')
    r = python(START.format('xla'), tmp_path, PJRT_DEVICE='CPU')
    assert r.stdout.startswith('ERROR') and 'undefined symbol' in r.stdout and 'torch_xla match' in r.stdout, r.stderr
    r = python(START.format('tpu'), tmp_path, PJRT_DEVICE='TPU', TPU_LIBRARY_PATH='/nowhere/libtpu.so')
    assert r.stdout.startswith('ERROR TPU_LIBRARY_PATH=/nowhere/libtpu.so is not a file'), r.stdout + r.stderr


def test_auto_continues_without_a_tpu_that_does_not_start(tmp_path):
    import torch
    fake_package(tmp_path, 'torch_xla', torch.__version__.split('+')[0],
                 __init__="raise ImportError('the TPU is held by another process')")
    fake_package(tmp_path, 'libtpu', '0.0.17')
    code = """
import os
from dataclasses import replace
from b2t_kaggle.devices import machine, torch
detected = machine.detect('torch')
tpu = machine.find_tpu(machine.seen_variables({'TPU_ACCELERATOR_TYPE': 'v5litepod-8'}))
torch.detect = lambda *args: replace(detected, tpu=replace(tpu, hardware=('/dev/vfio/0',)))
print(torch.pick_torch('auto', 'float32'))
print(os.environ.get('PJRT_DEVICE'))
try: torch.pick_torch('tpu')
except machine.DeviceError as e: print('ERROR', e)
"""
    r = python(code, tmp_path)
    auto, left, named = r.stdout.splitlines()
    assert auto.startswith('cpu') and 'held by another process' in auto, r.stdout + r.stderr
    assert 'the TPU is not used: PyTorch/XLA does not start' in auto
    assert left == 'None' and named.startswith('ERROR PyTorch/XLA does not start')


PRODUCTS = """
import torch
from b2t_kaggle.devices.products import linear, product, products_with
def layouts(n, m):
    return (torch.randn(n, m), torch.randn(m, n).t(), torch.randn(n, 2*m)[:, :m], torch.randn(m, 2*n)[:, :n].t(),
            torch.randn(1, m).expand(n, m))
for x in layouts(64, 256):
    for weight in layouts(300, 256):
        product(x, weight), products_with(weight, 64)(x)
        linear(x.detach().requires_grad_(), weight.detach().requires_grad_()).sum().backward()
"""


def test_onednn_multiplies_without_its_reference(tmp_path):
    "For matrices with any strides; oneDNN's reference implementation takes a minute for the products of one step."
    from b2t_kaggle.devices.products import _is_onednn_faster
    if not _is_onednn_faster(): pytest.skip('products are not oneDNN\'s on this processor')
    r = subprocess.run([sys.executable, '-c', PRODUCTS], capture_output=True, text=True, timeout=400, cwd=tmp_path,
                       env=os.environ | {'PYTHONPATH': str(ROOT), 'ONEDNN_VERBOSE': 'profile_exec'})
    assert r.returncode == 0, r.stderr
    executed = [line.split(',') for line in r.stdout.splitlines() if 'primitive,exec,cpu,inner_product' in line]
    assert len(executed) >= 5 * 5 * 4
    assert [e for e in executed if e[6].startswith('ref')] == []


def test_command(tmp_path):
    r = subprocess.run([sys.executable, '-m', 'b2t_kaggle.cli', 'devices'], capture_output=True, text=True, timeout=400,
                       cwd=tmp_path, env=os.environ | {'PYTHONPATH': str(ROOT)})
    assert r.returncode == 0, r.stderr
    labels = ['cpu', 'variables', 'packages', 'torch']
    assert [line.split()[0] for line in r.stdout.splitlines() if line.split()[0] in labels] == labels
