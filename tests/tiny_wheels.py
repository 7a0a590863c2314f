"""Wheels and source archives of a few lines, for tests in which pip uses a folder instead of the internet."""
import io
import tarfile
import zipfile
from pathlib import Path


def make_wheel(folder, name, version, *lines, tag='py3-none-any', files=None):
    "Write a wheel with these lines in its METADATA, such as 'Requires-Dist: numpy', and these files; returns its path."
    stem = f'{name}-{version}'
    info = f'{stem}.dist-info'
    metadata = '\n'.join(['Metadata-Version: 2.1', f'Name: {name}', f'Version: {version}', *lines, ''])
    contents = {f'{name}.py': f'version = {version!r}\n'} | (files or {})
    contents |= {f'{info}/METADATA': metadata,
                 f'{info}/WHEEL': f'Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tag}\n'}
    record = ''.join(f'{path},,\n' for path in [*contents, f'{info}/RECORD'])
    Path(folder).mkdir(parents=True, exist_ok=True)
    path = Path(folder)/f'{stem}-{tag}.whl'
    with zipfile.ZipFile(path, 'w') as wheel:
        for file, text in contents.items(): wheel.writestr(file, text)
        wheel.writestr(f'{info}/RECORD', record)
    return path


# A build that needs no package from the internet: the backend is in the archive
BACKEND = """
import sys
sys.path.insert(0, {tests!r})
from tiny_wheels import make_wheel
def build_wheel(folder, config_settings=None, metadata_directory=None):
    return make_wheel(folder, {name!r}, {version!r}).name
"""


def make_sdist(folder, name, version):
    "Write a source archive of a package with one module, like PyPI's for packages without wheels; returns its path."
    stem = f'{name}-{version}'
    texts = {'PKG-INFO': f'Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n',
             'pyproject.toml': '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n',
             'backend.py': BACKEND.format(tests=str(Path(__file__).parent), name=name, version=version)}
    Path(folder).mkdir(parents=True, exist_ok=True)
    path = Path(folder)/f'{stem}.tar.gz'
    with tarfile.open(path, 'w:gz') as archive:
        for file, text in texts.items():
            member = tarfile.TarInfo(f'{stem}/{file}')
            member.size = len(text.encode())
            archive.addfile(member, io.BytesIO(text.encode()))
    return path
