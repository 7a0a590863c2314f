"File systems without locks: a library whose `flock` fails as it does there, for processes that a test starts."
import os
import subprocess
from pathlib import Path

CODE = '''
#include <errno.h>
#include <stdlib.h>
int flock(int fd, int operation) { errno = atoi(getenv("FLOCK_ERRNO")); return -1; }
'''


def environment(folder: Path, number: int) -> dict[str, str]:
    "Build the library in a folder, and return environment variables that make every `flock` of a process fail."
    library = folder/'flock.so'
    if not library.exists():
        subprocess.run(['cc', '-x', 'c', '-shared', '-fPIC', '-o', library, '-'], input=CODE, text=True, check=True)
    return os.environ | {'LD_PRELOAD': str(library), 'FLOCK_ERRNO': str(number)}
