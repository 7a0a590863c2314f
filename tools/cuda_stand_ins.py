"""Lets PyTorch's CUDA build run on a machine without an NVIDIA GPU, and without 4.5 GB of CUDA libraries.

PyPI has only this build of the PyTorch that PyTorch/XLA needs. Its libraries are linked to cuBLAS, cuDNN and others,
which are loaded when PyTorch is imported; on a CPU their functions are never called. This script writes libraries of
the same names in which every function is a trap, and metadata with which pip considers the packages installed.
`./kit env xla` runs it in the new environment, after installing PyTorch and before installing everything else.
"""
import re
import subprocess
import sys
import tempfile
from importlib.metadata import distribution
from pathlib import Path

from pip._vendor.packaging.requirements import Requirement

# Small, and also called on a CPU: PyTorch asks the runtime for the number of GPUs
REAL = 'nvidia-cuda-runtime', 'nvidia-cuda-cupti', 'nvidia-cufile'
# Prefix of the functions' names, by library
FUNCTIONS = {'libcublas': 'cublas(?!Lt)', 'libcublasLt': 'cublasLt', 'libcudnn': 'cudnn', 'libcufft': 'cufft',
             'libcurand': 'curand', 'libcusparse': 'cusparse(?!Lt)', 'libcusparseLt': 'cusparseLt', 'libnccl': 'p?nccl'}
TRAP = '.globl {0}\n.type {0},@function\n{0}: ud2\n'


def output(*command) -> str:
    "Output of a program."
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def write_library(path: Path, functions: list[str]):
    "Write a shared library with these functions, whose symbol version is the library's name."
    with tempfile.TemporaryDirectory() as folder:
        source, versions = Path(folder)/'traps.s', Path(folder)/'versions'
        no_stack = '.section .note.GNU-stack,"",@progbits\n'
        source.write_text('.text\n' + ''.join(map(TRAP.format, functions)) + no_stack)
        versions.write_text(f'{path.name} {{ global: *; }};\n')
        link = [f'-Wl,-soname,{path.name}', f'-Wl,--version-script={versions}']
        subprocess.run(['cc', '-shared', '-nostdlib', *link, '-o', path, source], check=True)


def write_metadata(site: Path, name: str, version: str):
    "Write the metadata by which pip recognises an installed package."
    folder = site/f'{name.replace("-", "_")}-{version}.dist-info'
    folder.mkdir(exist_ok=True)
    summary = 'Stand-in without content, for a machine without an NVIDIA GPU'
    (folder/'METADATA').write_text(f'Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nSummary: {summary}\n')
    (folder/'INSTALLER').write_text('b2t_kaggle\n')
    (folder/'RECORD').write_text('')


def main():
    torch = distribution('torch')
    site = Path(torch.locate_file(''))
    wanted = [r for r in map(Requirement, torch.requires or []) if r.name.startswith(('nvidia-', 'triton'))]
    wanted = [r for r in wanted if r.marker is None or r.marker.evaluate({'extra': ''})]
    wanted = [r for r in wanted if not r.name.startswith(REAL)]
    if not wanted: return print('This PyTorch needs no CUDA')
    folder = site/'torch'/'lib'
    libraries = [p for name in ('cpu', 'cuda', 'python') if (p := folder/f'libtorch_{name}.so').exists()]
    symbols = {line.split()[-1].split('@')[0] for p in libraries for line in output('nm', '-D', '-u', p).splitlines()}
    needed = {n for p in libraries for n in re.findall(r'\(NEEDED\).*\[(.*)\]', output('readelf', '-d', p))}
    for name in sorted(needed):
        prefix = FUNCTIONS.get(name.split('.')[0])
        if prefix: write_library(folder/name, sorted(s for s in symbols if re.match(prefix, s)))
    for r in wanted: write_metadata(site, r.name, re.search(r'==([^,;]+)', str(r.specifier))[1])
    print('Stand-ins for', *(r.name for r in wanted))


if __name__ == '__main__': sys.exit(main())
