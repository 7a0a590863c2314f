"lock.txt has the requirements of settings.ini in the versions of constraints.txt, and other archives are refused."
import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT/'tools'))
import lock  # noqa: E402
from lock import LOCK, Locked, entry, groups, parse, pick, pins, wanted  # noqa: E402
from tiny_wheels import make_wheel  # noqa: E402

ENTRIES = parse(LOCK.read_text(encoding='utf-8'))
MACHINES = [dict(python_version=v, python_full_version=f'{v}.{patch}', sys_platform='linux', platform_machine=machine)
            for v, patch in (('3.11', 2), ('3.11', 7), ('3.12', 1), ('3.13', 0)) for machine in lock.MACHINES]


def fits(requirement, machine, extra=''):
    return not requirement.marker or requirement.marker.evaluate(default_environment() | machine | dict(extra=extra))


def locked(group, machine):
    "Version and hashes of each package in a group on a machine."
    found = {}
    for (name, version, marker), (hashes, where) in ENTRIES.items():
        if group not in where or not fits(Requirement(f'x; {marker}' if marker else 'x'), machine): continue
        assert name not in found, f'{name} stands twice in {group}'
        assert hashes, name
        found[name] = version, hashes
    return found


@pytest.mark.parametrize('group', groups())
def test_all_requirements_are_locked(group):
    "For each Python, on both machines."
    for machine in MACHINES:
        found = locked(group, machine)
        for r in map(Requirement, wanted(group)):
            if not fits(r, machine): continue
            assert r.specifier.contains(found[canonicalize_name(r.name)][0]), (r, machine)
        for pin in map(Requirement, pins(group)):
            name = canonicalize_name(pin.name)
            if name in found: assert pin.specifier.contains(found[name][0]), (pin, machine)


def test_groups_that_share_an_environment_agree():
    for machine in MACHINES:
        versions = {}
        for group in set(groups()) - {'xla', 'lock', 'audit'}:
            for name, (version, _) in locked(group, machine).items():
                assert versions.setdefault(name, version) == version, (name, group)


def test_every_pin_is_used():
    used = {f'{k.name}=={k.version}' for k in ENTRIES}
    asked = {re.sub('[-_.]+', '-', name.lower()) + f'=={version}' for group in ('dev', 'xla')
             for name, _, version in (pin.partition('==') for pin in pins(group))}
    assert asked - used == set()


def test_indirect_requirements_are_locked():
    "Packages of this environment need only packages that are locked with them."
    from importlib.metadata import distributions
    installed = {canonicalize_name(d.name): d for d in distributions()}
    here = {**locked('dev', default_environment()), **locked('build', default_environment())}
    for name in here.keys() & installed.keys():
        for r in map(Requirement, installed[name].requires or []):
            if not fits(r, {}): continue
            assert canonicalize_name(r.name) in here or lock.CUDA.match(r.name), f'{name} needs {r.name}'


def test_cuda_packages_are_separate(monkeypatch):
    apart = parse(pick('dev', cuda=True))
    assert apart and all(k.name.startswith(('nvidia-', 'cuda-', 'triton')) for k in apart)
    assert not apart.keys() & parse(pick('dev', cuda=False)).keys()
    for needs, expected in (['sympy'], False), (['sympy', 'nvidia-cublas==1'], True), (None, False):
        monkeypatch.setattr(lock, 'requires', lambda name, needs=needs: needs)
        assert lock.asks_for_cuda() is expected


def test_pytorch_without_cuda_is_requested_if_available(monkeypatch):
    "Under its own version name, with the same hashes; never for PyTorch/XLA."
    def torch(text): return {k.version: hashes for k, (hashes, _) in parse(text).items() if k.name == 'torch'}
    (version, hashes), = torch(pick('run', cuda=False)).items()
    for offered, expected in (True, f'{version}+cpu'), (False, version):
        monkeypatch.setattr(lock, 'without_cuda', lambda version, offered=offered: offered)
        assert torch(lock.part('run', large=True)) == {expected: hashes}
        for group in 'xla', 'build':
            large, rest = (parse(lock.part(group, large)) for large in (True, False))
            assert large | rest == parse(pick(group, cuda=False)) and not large.keys() & rest.keys()


def test_entries_are_read_as_written():
    k = Locked('a-b', '1.0', "python_version < '3.12'")
    text = entry(k, {'b'*64, 'a'*64}, {'run', 'dev'}) + entry(Locked('c', '2', ''), {'c'*64}, {'run'})
    found = parse('# head\n' + text)
    assert found == {k: ({'b'*64, 'a'*64}, {'run', 'dev'}), Locked('c', '2', ''): ({'c'*64}, {'run'})}
    assert ''.join(entry(k, *v) for k, v in found.items()) == text
    written = ''.join(entry(k, *v) for k, v in sorted(ENTRIES.items()))
    assert LOCK.read_text(encoding='utf-8').split('\n', 1)[1] == written


@pytest.fixture
def checkout(tmp_path):
    "A checkout with two small packages, one of them (`other`) for two extras, available only from a folder."
    folder = tmp_path/'checkout'
    (folder/'tools').mkdir(parents=True)
    for name in ('kit', 'tools/lock.py'): shutil.copy(ROOT/name, folder/name)
    extras = 'llm_requirements = other\ntf_requirements = other\n'
    (folder/'settings.ini').write_text(f'[DEFAULT]\nrequirements = small\n{extras}')
    (folder/'constraints.txt').write_text('small==1.0\n')
    wheels = {name: make_wheel(tmp_path/'wheels', name, '1.0').read_bytes() for name in ('tool', 'small', 'other')}
    lock_them(folder, {name: hashlib.sha256(archive).hexdigest() for name, archive in wheels.items()})
    return folder


def lock_them(checkout, found):
    groups_of = dict(tool={'build'}, small={'run', 'llm', 'tf'}, other={'llm', 'tf'})
    text = ''.join(entry(Locked(name, '1.0', ''), {found[name]}, groups_of[name]) for name in found)
    # An entry for another Python never counts as missing
    text += entry(Locked('old', '1.0', "python_version < '3'"), {'0'*64}, {'run', 'llm', 'tf'})
    (checkout/'lock.txt').write_text(text)
    return found


def kit(checkout, *args):
    env = os.environ | dict(B2T_ENVS=str(checkout.parent/'envs'), B2T_PYTHON=sys.executable, PIP_NO_INDEX='1',
                            PIP_FIND_LINKS=str(checkout.parent/'wheels'))
    env = {k: v for k, v in env.items() if k not in ('B2T_UNVERIFIED', 'PYTHONPATH')}
    return subprocess.run(['bash', checkout/'kit', *args], capture_output=True, text=True, timeout=300, env=env,
                          cwd=checkout.parent)


def test_the_kit_refuses_an_archive_that_is_not_the_locked_one(checkout):
    "lock.txt has one archive as it is and one with other content, and there is no index."
    envs = checkout.parent/'envs'
    found = {k.name: hashes for k, (hashes, _) in parse((checkout/'lock.txt').read_text()).items()}
    lock_them(checkout, dict(tool=found['tool'].pop(), small='0'*64))
    r = kit(checkout, 'env')
    assert r.returncode == 2 and r.stdout == ''
    assert 'Successfully installed tool' in r.stderr
    assert 'DO NOT MATCH THE HASHES' in r.stderr and found['small'].pop() in r.stderr
    assert "kit: the packages of 'run' are not installed" in r.stderr and 'B2T_UNVERIFIED=1' in r.stderr
    assert not list(envs.glob('env-*/ready-*')) and not list(envs.glob('env-*/lib/python*/site-packages/small.py'))


def test_checkouts_share_environments_and_installed_packages(checkout):
    r = kit(checkout, 'env', 'llm')
    assert r.returncode == 0 and 'Successfully installed' in r.stderr and 'other' in r.stderr, r.stderr
    env = Path(r.stdout.strip())
    names = {p.name.partition('-')[0] for p in env.glob('lib/python*/site-packages/*.dist-info')}
    assert names - {'pip', 'setuptools'} == {'tool', 'small', 'other'}
    # Another checkout with the same requirements; neither overwrites the other's code
    twin = checkout.parent/'twin'
    shutil.copytree(checkout, twin)
    for folder in (checkout, twin):
        (folder/'b2t_kaggle').mkdir()
        (folder/'b2t_kaggle'/'__init__.py').write_text('')
    for extra in ('tf', '', 'llm'):
        r = kit(twin, 'env', *extra.split())
        assert (r.returncode, r.stdout.strip(), r.stderr) == (0, str(env), '')
    for folder in (checkout, twin):
        r = kit(folder, 'python', '-c', 'import b2t_kaggle, small; print(b2t_kaggle.__file__)')
        assert Path(r.stdout.strip()) == folder/'b2t_kaggle'/'__init__.py', r.stderr
