"""What `pip install` of this checkout would do on one of Kaggle's images, by pip's own resolver.

    python tools/image_plan.py gpu [EXTRA …]

An environment is made that holds the packages of tests/images/gpu.txt in name and version only, and pip plans in it
without installing anything. Ends with 1 if a package of the image would be replaced. Needs the network; the plan is
that of the Python which runs this, on Kaggle 3.12.
"""
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent


def canonical(name: str) -> str:
    "A package's name as indexes compare it."
    return re.sub('[-_.]+', '-', name).lower()


def read_pins(path: Path) -> dict[str, str]:
    "Packages and their versions, from lines `name==version`."
    lines = (line.split('#')[0].strip() for line in path.read_text(encoding='utf-8').splitlines())
    return {canonical(name): version for name, _, version in (line.partition('==') for line in lines if line)}


def make_image(folder: Path, pins: dict[str, str]) -> Path:
    "An environment in which packages seem to be installed; returns its Python."
    subprocess.run([sys.executable, '-m', 'venv', '--without-pip', folder], check=True)
    python = folder/'bin'/'python'
    code = 'import sysconfig; print(sysconfig.get_path("purelib"))'
    packages = Path(subprocess.run([python, '-c', code], check=True, capture_output=True, text=True).stdout.strip())
    for name, version in pins.items():
        metadata = packages/f'{name.replace("-", "_")}-{version}.dist-info'
        metadata.mkdir()
        (metadata/'METADATA').write_text(f'Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n')
        (metadata/'INSTALLER').write_text('pip\n')
        (metadata/'RECORD').touch()
    return python


def plan(
    python: Path,            # The environment's
    what: list[str],         # What pip is to install
) -> dict[str, str]:         # The packages that it would install, and their versions
    "What pip would do; raises `CalledProcessError` where it finds no solution."
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch)/'report.json'
        subprocess.run([sys.executable, '-m', 'pip', '--python', python, 'install', '--quiet', '--dry-run',
                        '--report', report, *what], check=True)
        found = json.loads(report.read_text(encoding='utf-8'))['install']
    return {canonical(x['metadata']['name']): x['metadata']['version'] for x in found}


def image_plan(image: str, extras: list[str]) -> tuple[dict[str, str], dict[str, tuple[str, str]]]:
    "What would come to an image, and what would be replaced there: (version now, version then)."
    pins = read_pins(ROOT/'tests'/'images'/f'{image}.txt')
    with tempfile.TemporaryDirectory() as scratch:
        python = make_image(Path(scratch)/'image', pins)
        installed = plan(python, [f'{ROOT}[{",".join(extras)}]' if extras else str(ROOT)])
    replaced = {name: (pins[name], version) for name, version in installed.items() if name in pins}
    return {name: version for name, version in installed.items() if name not in pins}, replaced


if __name__ == '__main__':
    new, replaced = image_plan(sys.argv[1], sys.argv[2:])
    print('new:', ', '.join(f'{name} {version}' for name, version in sorted(new.items())))
    for name, (before, after) in sorted(replaced.items()): print(f'replaced: {name} {before} by {after}')
    sys.exit(bool(replaced))
