"Tests and the processes that they start can only reach this machine (conftest.py, tests/no_network)."
import os
import socket
import subprocess
import sys

import pytest
from copies import status_of

pytestmark = pytest.mark.skipif(bool({'BUILD_KENLM', 'RESOLVE'} & os.environ.keys()), reason='asked to use the network')
ELSEWHERE = [('192.0.2.1', 80), ('2001:db8::1', 80), ('example.com', 80)]  # Reserved addresses for documentation


@pytest.mark.parametrize('address', ELSEWHERE)
def test_other_machines_cannot_be_reached(address):
    with pytest.raises(OSError, match=f'tests may reach this machine alone, not {address[0]}'):
        socket.create_connection(address, timeout=1)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s, pytest.raises(OSError, match='this machine alone'):
        s.sendto(b'', (ELSEWHERE[0]))


@pytest.mark.parametrize('host', ['127.0.0.1', 'localhost'])
def test_this_machine_can_be_reached(host):
    with socket.create_server(('127.0.0.1', 0)) as server:
        socket.create_connection((host, server.getsockname()[1]), timeout=10).close()


def test_child_processes_cannot_reach_other_machines():
    "A process, and one that it starts."
    child = f'import socket; socket.create_connection({ELSEWHERE[0]}, timeout=1)'
    code = f'import subprocess, sys; sys.exit(subprocess.run([sys.executable, "-c", {child!r}]).returncode)'
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and 'tests may reach this machine alone, not 192.0.2.1' in done.stderr


def test_processes_with_the_folders_of_this_one_cannot_reach_other_machines():
    "As sessions of Kaggle's notebooks are started, and copies."
    code = f'import socket; socket.create_connection({ELSEWHERE[0]}, timeout=1)'
    env = os.environ | {'PYTHONPATH': os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, '-c', code], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and 'tests may reach this machine alone, not 192.0.2.1' in done.stderr


def connect():
    with pytest.raises(OSError, match='this machine alone'): socket.create_connection(ELSEWHERE[0], timeout=1)


def test_copies_cannot_reach_other_machines(): assert status_of(connect) == 0
