"The list of an environment's packages (tools/sbom.py) agrees with pip's own."
import json
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest
from packaging.utils import canonicalize_name

TOOL = Path(__file__).parent.parent/'tools'/'sbom.py'
DIGEST = '0123456789abcdef'*4


def run(*command): return json.loads(subprocess.run(command, capture_output=True, check=True, timeout=120).stdout)


def locked(name):
    "Hash of one of a package's archives in lock.txt."
    return re.search(rf'^{name}==.*\n +--hash=sha256:(\w+)', (TOOL.parent.parent/'lock.txt').read_text(), re.M)[1]


@pytest.fixture(scope='module')
def bill(tmp_path_factory):
    """The list for this environment, after simulated installations of pip from an archive and from a folder, and of
    NumPy from a locked archive."""
    folder = tmp_path_factory.mktemp('env')
    version = __import__('pip').__version__
    items = [dict(metadata=dict(name='Pip', version=version), download_info=info)
             for info in (dict(archive_info=dict(hashes=dict(sha256=DIGEST))), dict(dir_info={}))]
    items.append(dict(metadata=dict(name='numpy', version=__import__('numpy').__version__),
                      download_info=dict(archive_info=dict(hashes=dict(sha256=locked('numpy'))))))
    (folder/'report-.json').write_text(json.dumps(dict(version='1', install=items)))
    return run(sys.executable, TOOL, folder)


def test_names_and_versions_agree_with_pip(bill):
    found = run(sys.executable, '-m', 'pip', 'inspect', '--local')['installed']
    expected = {canonicalize_name(p['metadata']['name']): p['metadata']['version'] for p in found}
    expected.pop('b2t-kaggle', None)
    ours = {c['purl'].removeprefix('pkg:pypi/').partition('@') for c in bill['components']}
    ours = {name: unquote(version) for name, _, version in ours if name != 'b2t-kaggle'}
    assert ours == expected
    refs = [c['bom-ref'] for c in bill['components']]
    assert len(set(refs)) == len(refs)


def test_hashes_requirements_and_licences(bill):
    by_name = {c['name']: c for c in bill['components']}
    assert {name for name, c in by_name.items() if 'hashes' in c} == {'pip', 'numpy'}
    properties = {name: [(p['name'], p['value']) for p in c['properties']] for name, c in by_name.items()}
    assert properties.pop('numpy') == [('in lock.txt', 'yes')]
    assert {('in lock.txt', 'no')} == set(sum(properties.values(), []))
    assert by_name['pip']['hashes'] == [{'alg': 'SHA-256', 'content': DIGEST}]
    needs = {d['ref']: d['dependsOn'] for d in bill['dependencies']}
    assert by_name['numpy']['purl'] in needs[by_name['pandas']['purl']]
    assert set(sum(needs.values(), [])) <= needs.keys()
    assert by_name['click']['licenses'] == [{'expression': 'BSD-3-Clause'}]
