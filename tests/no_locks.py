"File systems without locks: a library that answers flock as they do, for processes that a test starts."
import os
import subprocess
from pathlib import Path

CODE = '''
#include <errno.h>
#include <stdlib.h>
int flock(int fd, int operation) { errno = atoi(getenv("FLOCK_ERRNO")); return -1; }
'''


def environment(folder: Path, number: int) -> dict[str, str]:
    "Environment variables of a process whose every flock ends with an error; the library is built in a folder."
    library = folder/'flock.so'
    if not library.exists():
        subprocess.run(['cc', '-x', 'c', '-shared', '-fPIC', '-o', library, '-'], input=CODE, text=True, check=True)
    return os.environ | {'LD_PRELOAD': str(library), 'FLOCK_ERRNO': str(number)}
