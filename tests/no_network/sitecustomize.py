"""Nothing but this machine can be reached. Python imports a module of this name when it starts, if it is on the path:
conftest.py puts it there, for what tests start. What is not Python (Redis, a kernel's ZeroMQ) is not asked."""
import errno
import gc
import ipaddress
import os
import socket
import sys

HERE = {'', 'localhost', 'localhost.localdomain', os.uname().nodename}
LOOKUPS = {'socket.getaddrinfo', 'socket.gethostbyname'}
REVERSE = {'socket.gethostbyaddr', 'socket.getnameinfo'}
CONNECTIONS = {'socket.connect', 'socket.sendto', 'socket.sendmsg'}
HEARD = LOOKUPS | REVERSE | CONNECTIONS # Python tells of every file that it opens, and of much more


def _as_ip(host):
    "An address that needs no look-up; None for a name."
    try: return ipaddress.ip_address(host.partition('%')[0])
    except ValueError: return None


def _guard(event, args):
    "Raises what Python raises on a machine without a network."
    if event not in HEARD: return
    if event in CONNECTIONS: host = args[1][0] if isinstance(args[1], tuple) and args[1] else None
    else: host = args[0][0] if isinstance(args[0], tuple) else args[0]
    if isinstance(host, bytes): host = host.decode('ascii', 'replace')
    if not isinstance(host, str) or host in HERE: return  # A socket of this machine
    ip = _as_ip(host)
    if event not in CONNECTIONS and (ip is None or (event in REVERSE and not ip.is_loopback)):
        raise socket.gaierror(socket.EAI_NONAME, f'tests may reach this machine alone, not {host}')
    if event in CONNECTIONS and not (ip and (ip.is_loopback or ip.is_unspecified)):
        raise OSError(errno.ENETUNREACH, f'tests may reach this machine alone, not {host}')


sys.addaudithook(_guard)

# What tests start imports a framework and ends soon: Python looks for cycles less often (a seventh of the processor
# time of the pipeline's tests)
gc.set_threshold(50_000, 20, 50)

# The checker of addresses that jsonschema takes where JupyterLab is installed: a second, in every process that reads a
# notebook, to compile a grammar that none of them uses
sys.modules['rfc3987_syntax'] = None
