"KenLM's binary format, written by its own program."
import shutil
import subprocess
from pathlib import Path

import pytest


def kenlm_binary(arpa: Path, path: Path, kind: str = 'probing', bits: int | None = None) -> Path:
    "Write an n-gram model in KenLM's binary format; skips the test if its program is not on the PATH."
    program = shutil.which('build_binary') or pytest.skip('no build_binary here')
    quantise = ['-q', bits, '-b', bits, '-a', 22] if bits else []
    subprocess.run([*map(str, [program, '-S', '1G', *quantise, kind, arpa, path])], check=True, capture_output=True)
    return path
