"""The packages of this environment as CycloneDX 1.5 (JSON), on standard output: `./kit sbom [EXTRA]`.

Names, versions, licences and dependencies are read from the installed metadata. The SHA-256 of an archive is read from
the reports that pip wrote when `./kit` installed it (`report-*.json` in the environment's folder); packages that were
installed in other ways have none. The property `in lock.txt` says whether lock.txt has that archive. cyclonedx-bom,
which needs 30 more packages, finds the same packages and licences, but no hashes of archives from an index."""
import json
import platform
import re
import sys
from importlib.metadata import Distribution, distributions
from pathlib import Path
from urllib.parse import quote

from lock import LOCK, parse, settings, wanted
from packaging.requirements import Requirement


def normalize(name: str) -> str: return re.sub('[-_.]+', '-', name).lower()  # PEP 503


def purl(name: str, version: str) -> str: return f'pkg:pypi/{normalize(name)}@{quote(version)}'


def known_hashes(reports: list[Path]) -> dict[str, str]:
    "The SHA-256 of the archive of each package, by purl; later reports take precedence."
    known = {}
    for report in reports:
        for item in json.loads(report.read_text(encoding='utf-8'))['install']:
            digest = item['download_info'].get('archive_info', {}).get('hashes', {}).get('sha256')
            if digest: known[purl(item['metadata']['name'], item['metadata']['version'])] = digest
    return known


def licences(package: Distribution) -> list[dict]:
    "Licences in the package's metadata: an SPDX expression, else classifiers, else the first line of its text."
    metadata = package.metadata
    if expression := metadata.get('License-Expression'): return [dict(expression=expression)]
    names = [c.split(' :: ')[-1] for c in metadata.get_all('Classifier', []) if c.startswith('License :: ')]
    names = names or (metadata.get('License') or '').strip().splitlines()[:1]
    return [dict(license=dict(name=name)) for name in names]


def needs(requires: list[str], installed: dict[str, str]) -> list[str]:
    "Purls of the installed packages that these requirements name, without extras."
    requirements = [Requirement(r) for r in requires]
    names = {normalize(r.name) for r in requirements if r.marker is None or r.marker.evaluate({'extra': ''})}
    return sorted(installed[name] for name in names if name in installed)


def locked() -> set[str]:
    "Hashes of all archives in lock.txt."
    return set().union(*(hashes for hashes, _ in parse(LOCK.read_text(encoding='utf-8')).values()))


def the_kit() -> dict:
    "The kit itself from settings.ini, because it is not installed in its environment."
    name, version = settings()['lib_name'], settings()['version']
    ref = purl(name, version)
    return {'type': 'application', 'bom-ref': ref, 'name': name, 'version': version, 'purl': ref,
            'licenses': [dict(expression='Apache-2.0')]}


def component(package: Distribution, hashes: dict[str, str], in_lock: set[str]) -> dict:
    ref = purl(package.name, package.version)
    out = {'type': 'library', 'bom-ref': ref, 'name': package.name, 'version': package.version, 'purl': ref}
    if found := licences(package): out['licenses'] = found
    if ref in hashes: out['hashes'] = [dict(alg='SHA-256', content=hashes[ref])]
    out['properties'] = [dict(name='in lock.txt', value='yes' if hashes.get(ref) in in_lock else 'no')]
    return out


def bill_of_materials(reports: list[Path]) -> dict:
    "Bill of materials of this environment; identical for identical environments."
    packages = {normalize(p.name): p for p in reversed(list(distributions()))}  # Python imports the first on the path
    installed = {name: purl(p.name, p.version) for name, p in sorted(packages.items())}
    hashes = known_hashes(reports)
    in_lock = locked()
    kit = the_kit()
    machine = dict(python=platform.python_version(), machine=f'{sys.platform} {platform.machine()}')
    properties = [dict(name=name, value=value) for name, value in machine.items()]
    depends = {installed[name]: needs(packages[name].requires or [], installed) for name in installed}
    depends[kit['bom-ref']] = needs(wanted('run'), installed)
    return dict(
        bomFormat='CycloneDX', specVersion='1.5', version=1, metadata=dict(component=kit, properties=properties),
        components=[component(packages[name], hashes, in_lock) for name in installed],
        dependencies=[dict(ref=ref, dependsOn=refs) for ref, refs in depends.items()],
    )


if __name__ == '__main__':
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else sys.prefix)
    reports = sorted(folder.glob('report-*.json'), key=lambda p: p.stat().st_mtime)
    json.dump(bill_of_materials(reports), sys.stdout, indent=1)
    print()
