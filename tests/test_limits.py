"Real limits of the system (few files, little memory, few processes, a read-only folder) are named in errors."
import os
import resource
import subprocess
import sys
from functools import partial

import numpy as np
import pytest

from b2t_kaggle.core.files import WriteError, write_whole
from b2t_kaggle.data.sessions import SPLITS, Trial, session_path, write_session


def explained(code, before=None):
    "The message for the error that ends a program."
    indented = code.replace('\n', '\n    ')
    program = f'from b2t_kaggle.core.files import explain_error\ntry:\n    {indented}\nexcept BaseException as e: ' \
              'print(explain_error(e))'
    found = subprocess.run([sys.executable, '-c', program], preexec_fn=before, capture_output=True, text=True)
    assert found.stderr == ''
    return found.stdout


FILES = 'files = [open("/dev/null") for _ in range(100)]'
MEMORY = 'import numpy as np\nx = np.ones(10**10)'
BYTES = 'x = bytearray(10**13)'
THREADS = '''import threading, time
for _ in range(10**5): threading.Thread(target=time.sleep, args=(999,), daemon=True).start()'''


@pytest.mark.parametrize('code, which, limit, words', [
    (FILES, resource.RLIMIT_NOFILE, 50, 'this process may open no more files (ulimit -n)'),
    (MEMORY, resource.RLIMIT_AS, 4 << 30, 'no memory is left, or this process has reached its limit (ulimit -v)'),
    (BYTES, resource.RLIMIT_AS, 4 << 30, 'no memory is left, or this process has reached its limit (ulimit -v)'),
    (THREADS, resource.RLIMIT_AS, 4 << 30, 'no more processes or threads may be started (ulimit -u'),
])
def test_errors_name_the_limit_that_was_reached(code, which, limit, words):
    assert explained(code, partial(resource.setrlimit, which, (limit, limit))).startswith(words)


@pytest.mark.skipif(os.getuid() != 0, reason='only root becomes another user, whose processes are counted')
def test_a_user_who_may_start_no_more_processes():
    code = '''import os, resource, subprocess
resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
os.setuid(54323)
started = [subprocess.Popen(['sleep', '1']) for _ in range(5)]'''
    assert explained(code).startswith('no more processes or threads may be started (ulimit -u')


@pytest.fixture
def mounted(tmp_path):
    "A function that mounts a file system with options."
    disk = tmp_path/'disk'
    disk.mkdir()
    def mount(options):
        command = ['mount', '-t', 'tmpfs', '-o', f'size=1m,{options}', 'tmpfs', disk]
        if subprocess.run(command, capture_output=True, timeout=30).returncode: pytest.skip('nothing can be mounted')
        return disk
    yield mount
    subprocess.run(['umount', '-l', disk], capture_output=True, timeout=30)


def test_a_full_disk(mounted):
    disk = mounted('nr_inodes=9')
    with pytest.raises(WriteError, match='not written, because the disk is full'):
        write_whole(disk/'0.txt', 'a'*(2 << 20))


def check(folder, before=None):
    "The last line of a stage on one session, and its whole output."
    day = 't15.2023.08.13'
    for i, split in enumerate(SPLITS):
        trial = Trial(day, split, 'trial_0000', i, 0, np.zeros((20, 512), 'float32'), np.array([17, 31, 40]), 'how')
        write_session(session_path(folder/'data', day, split), [trial])
    command = ['check', '--name', 'x', '--data', folder/'data', '--out', folder/'disk', '--work', folder/'work']
    found = subprocess.run([sys.executable, '-m', 'b2t_kaggle.cli', *command], preexec_fn=before, capture_output=True,
                           text=True)
    return found.stderr.splitlines()[-1], found.stderr


def test_a_run_in_a_read_only_folder(mounted, tmp_path):
    last, said = check(tmp_path, partial(mounted, 'ro'))
    assert 'Traceback' not in said
    assert last.startswith(f'Error: {tmp_path}/disk/x') and 'because Read-only file system' in last
