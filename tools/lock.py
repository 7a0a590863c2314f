"""lock.txt: versions and SHA-256 of everything that `./kit` installs, directly or as a dependency.

    python tools/lock.py all GROUP    entries of a group that are not installed here yet, for `pip install
                                      --require-hashes --no-deps -r`
    python tools/lock.py large GROUP  the large ones among them, with PyTorch without CUDA if pip finds it
    python tools/lock.py rest GROUP   the others
    python tools/lock.py cuda GROUP   CUDA's libraries of a group, if the installed PyTorch requires them
    python tools/lock.py wanted GROUP requirements of a group in settings.ini, for installing without hashes
    python tools/lock.py make         writes lock.txt (`./kit lock`, which installs uv): locked packages keep their
                                      versions if settings.ini and constraints.txt allow them, unless with `--upgrade`

Each package has an entry for each marker with which a group requires it, with all of its archives: source and wheels
for every platform, so that pip can choose. `# in` names the groups. PyTorch has two builds in one entry: PyPI's, and
the smaller one without CUDA (`2.13.0+cpu`), which `large` requires if an index or a folder has it; pip itself would
prefer a build whose hash is in an index.

uv resolves versions and finds hashes (`uv pip compile --generate-hashes`). This module adds what uv lacks: one file for
several groups that agree if they share an environment, a second build of a version that PyPI does not have, and no
CUDA libraries for builds without CUDA."""
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from configparser import ConfigParser
from importlib.metadata import PackageNotFoundError, distributions, requires
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit
from urllib.request import url2pathname

from pip._vendor.packaging.markers import Marker  # A new environment has only pip

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT/'lock.txt'
# The tests use all extras of `dev`; `run` is the kit without extras
EXTRAS = {'dev': ['dev', 'tf', 'llm', 'serve', 'sweep', 'kaggle'], 'xla': ['xla', 'dev'], 'run': []}
# Other packages to install: to build kenlm and pronouncing (without wheels); for ./kit lock; by a workflow
TOOLS = {'build': ['pip', 'setuptools', 'wheel', 'cmake'], 'lock': ['uv'], 'audit': ['pip-audit']}
PYTHONS = '3.11', '3.12', '3.13'
MACHINES = 'x86_64', 'aarch64'
CUDA = re.compile(r'(nvidia|cuda)-|triton\b')
# A few packages with about half of the installed size
LARGE = 'jedi', 'llvmlite', 'matplotlib', 'numpy', 'pandas', 'pyarrow', 'sympy', 'torch'


class Locked(NamedTuple):
    name: str
    version: str
    marker: str


def settings():
    config = ConfigParser(delimiters=['='])
    config.read(ROOT/'settings.ini', encoding='utf-8')
    return config['DEFAULT']


def groups() -> list[str]:
    "All groups, the largest first, because the others use its versions."
    own = [k.removesuffix('_requirements') for k in settings() if k.endswith('_requirements')]
    return list(dict.fromkeys(['dev', 'run', *(e for e in own if e != 'xla'), *TOOLS, 'xla']))


def extras(group: str) -> list[str]: return EXTRAS.get(group, [group])


def wanted(group: str) -> list[str]:
    "Requirements of a group in settings.ini."
    if group in TOOLS: return TOOLS[group]
    keys = ['requirements', *(f'{extra}_requirements' for extra in extras(group))]
    return [requirement for key in keys for requirement in settings()[key].split()]


def pins(group: str) -> list[str]:
    "The lines of constraints.txt; PyTorch/XLA's environment has another PyTorch."
    def lines(name): return [s for s in (ROOT/name).read_text().splitlines() if s and s[0] != '#']
    if group != 'xla': return lines('constraints.txt')
    return [s for s in lines('constraints.txt') if not s.startswith('torch==')] + lines('constraints-xla.txt')


def parse(text: str) -> dict[Locked, tuple[set[str], set[str]]]:
    "Hashes and groups of each entry of a lock file."
    found: dict[Locked, tuple[set[str], set[str]]] = {}
    for block in re.split(r'\n(?=\w)', text):
        head = re.match(r'([\w.-]+)==([^\s;]+)(?: ; (.*?))? \\\n', block)
        if not head: continue
        inside = re.search(r'# in (.*)', block)
        hashes, where = found.setdefault(Locked(head[1], head[2], head[3] or ''), (set(), set()))
        hashes |= set(re.findall(r'--hash=sha256:(\w{64})', block))
        where |= set(inside[1].split(', ') if inside else [])
    return found


def entry(locked: Locked, hashes: set[str], where: set[str]) -> str:
    head = f'{locked.name}=={locked.version}' + f' ; {locked.marker}'*bool(locked.marker)
    lines = [head, *(f'    --hash=sha256:{digest}' for digest in sorted(hashes))]
    return ' \\\n'.join(lines) + f'\n    # in {", ".join(sorted(where))}\n'


def pick(group: str, cuda: bool) -> str:
    "The entries of a group: all but CUDA's libraries, or only these."
    if group not in groups(): sys.exit(f'lock: unknown group {group!r}; choose one of {", ".join(groups())}')
    entries = parse(LOCK.read_text(encoding='utf-8'))
    return ''.join(entry(k, hashes, where) for k, (hashes, where) in entries.items()
                   if group in where and bool(CUDA.match(k.name)) == cuda)


def asks_for_cuda() -> bool:
    "Whether the installed PyTorch is a build with CUDA; only these require its libraries."
    try: return any(CUDA.match(r) for r in requires('torch') or [])
    except PackageNotFoundError: return False


def missing(text: str) -> str:
    "The entries that fit this Python and are not installed in their version, in any build."
    installed = {re.sub('[-_.]+', '-', d.name).lower(): d.version.partition('+')[0] for d in distributions() if d.name}
    return ''.join(entry(k, *v) for k, v in parse(text).items()
                   if installed.get(k.name) != k.version.partition('+')[0]
                   and (not k.marker or Marker(k.marker).evaluate()))


def resolve(uv: str, group: str, preferred: dict, folder: Path) -> dict[Locked, tuple[set[str], set[str]]]:
    "Resolve a group's requirements with uv, for all Pythons and systems at once."
    (folder/'wanted.in').write_text('\n'.join(wanted(group)) + '\n')
    (folder/'pins.txt').write_text('\n'.join(pins(group)) + '\n')
    # uv keeps the versions in an existing output file
    (folder/'out.txt').write_text(''.join(entry(k, *v) for k, v in preferred.items()))
    certificates = {'SSL_CERT_FILE': os.environ['PIP_CERT']} if 'PIP_CERT' in os.environ else {}
    subprocess.run(
        [uv, 'pip', 'compile', '--quiet', '--universal', '--generate-hashes', '--no-header', '--no-annotate',
         '--python-version', PYTHONS[0], '-c', 'pins.txt', '-o', 'out.txt', 'wanted.in'],
        check=True, cwd=folder, env=certificates | os.environ, stdout=subprocess.DEVNULL)
    found = parse((folder/'out.txt').read_text())
    return {locked: (hashes, {group}) for locked, (hashes, _) in found.items()}


def without_cuda(version: str, *options: str) -> dict | None:
    """pip's report on PyTorch's build without CUDA, or None if pip does not find it. PyPI has no version of that name,
    so pip downloads no large file from there."""
    command = [sys.executable, '-m', 'pip', 'install', '--quiet', '--dry-run', '--ignore-installed', '--no-deps',
               '--only-binary', ':all:', *options, '--report', '-', f'torch=={version}+cpu']
    done = subprocess.run(command, capture_output=True, text=True)
    return None if done.returncode else json.loads(done.stdout)['install'][0]


def hashes_without_cuda(version: str, folder: Path) -> set[str]:
    "Hashes of PyTorch's wheels without CUDA that pip finds here, for all Pythons on Linux."
    options = [('--target', str(folder/'none'), '--python-version', python, '--platform', f'manylinux_2_28_{machine}')
               for python in PYTHONS for machine in MACHINES]
    found = filter(None, (without_cuda(version, *o) for o in options))
    return {archive_hash(item['download_info']) for item in found}


def archive_hash(info: dict) -> str:
    "SHA-256 from pip's report, or computed for a wheel in a local folder, for which the report has none."
    url = info['url']
    if not url.startswith('file:'): return info['archive_info']['hashes']['sha256']
    return hashlib.sha256(Path(url2pathname(urlsplit(url).path)).read_bytes()).hexdigest()


def part(group: str, large: bool) -> str:
    "The large entries of `pick`, or the others. PyTorch/XLA's PyTorch is always PyPI's build."
    picked = ''.join(entry(k, *v) for k, v in parse(pick(group, cuda=False)).items() if (k.name in LARGE) == large)
    version = next((k.version for k in parse(picked) if k.name == 'torch'), None)
    if group == 'xla' or version is None or not without_cuda(version): return picked
    return picked.replace(f'torch=={version} ', f'torch=={version}+cpu ')


def preferences(group: str, old: dict, found: dict) -> dict:
    """Entries whose versions uv keeps: first those found for other groups, then those in the present lock file. For
    PyTorch/XLA, which has some older versions, those in the present lock file come first."""
    old = {k: v for k, v in old.items() if ('xla' in v[1] if group == 'xla' else v[1] != {'xla'})}
    first, then = (old, found) if group == 'xla' else (found, old)
    names = {k.name for k in first}
    return first | {k: v for k, v in then.items() if k.name not in names}


def make(upgrade: bool):
    "Writes lock.txt."
    uv = shutil.which('uv', path=str(Path(sys.executable).parent)) or shutil.which('uv')
    if not uv: sys.exit('lock: uv is missing; ./kit lock installs it')
    old = parse(LOCK.read_text(encoding='utf-8')) if LOCK.exists() else {}
    found: dict[Locked, tuple[set[str], set[str]]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for group in groups():
            preferred = preferences(group, {} if upgrade else old, found)
            for locked, (hashes, where) in resolve(uv, group, preferred, Path(scratch)).items():
                known = found.setdefault(locked, (set(), set()))
                known[0].update(hashes)
                known[1].update(where)
        for locked, (hashes, _) in found.items():
            if locked.name != 'torch': continue
            hashes |= hashes_without_cuda(locked.version, Path(scratch))
            # Keep hashes that another machine found: not every machine has an index with these builds
            hashes |= old.get(locked, (set(), set()))[0]
    head = '# Written by `./kit lock` from settings.ini and constraints*.txt; tools/lock.py says what is in here\n'
    LOCK.write_text(head + ''.join(entry(k, *v) for k, v in sorted(found.items())), encoding='utf-8')
    print(f'{LOCK.name}: {len(found)} entries, {len({k.name for k in found})} packages', file=sys.stderr)


def main(verb: str = '', *words: str):
    if verb == 'make' and set(words) <= {'--upgrade'}: make(bool(words))
    elif verb == 'all' and len(words) == 1: sys.stdout.write(missing(pick(words[0], cuda=False)))
    elif verb in ('large', 'rest') and len(words) == 1: sys.stdout.write(missing(part(words[0], verb == 'large')))
    elif verb == 'cuda' and len(words) == 1:
        sys.stdout.write(missing(pick(words[0], cuda=True)) if asks_for_cuda() else '')
    elif verb == 'wanted' and len(words) == 1: print('\n'.join(wanted(words[0])))
    else: sys.exit(__doc__)


if __name__ == '__main__': main(*sys.argv[1:])
