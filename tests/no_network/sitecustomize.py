"""Make other machines unreachable. Python imports a module of this name at startup if it is on the path; conftest.py
puts it there for processes that tests start. Programs outside Python (Redis, ZeroMQ of a kernel) are not restricted."""
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
CHECKED_EVENTS = LOOKUPS | REVERSE | CONNECTIONS # Audit events; Python raises many others


def _as_ip(host):
    "An address that needs no lookup; `None` for a name."
    try: return ipaddress.ip_address(host.partition('%')[0])
    except ValueError: return None


def _guard(event, args):
    "Raise the error that Python raises on a machine without a network."
    if event not in CHECKED_EVENTS: return
    if event in CONNECTIONS: host = args[1][0] if isinstance(args[1], tuple) and args[1] else None
    else: host = args[0][0] if isinstance(args[0], tuple) else args[0]
    if isinstance(host, bytes): host = host.decode('ascii', 'replace')
    if not isinstance(host, str) or host in HERE: return  # A Unix socket of this machine
    ip = _as_ip(host)
    if event not in CONNECTIONS and (ip is None or (event in REVERSE and not ip.is_loopback)):
        raise socket.gaierror(socket.EAI_NONAME, f'tests may reach this machine alone, not {host}')
    if event in CONNECTIONS and not (ip and (ip.is_loopback or ip.is_unspecified)):
        raise OSError(errno.ENETUNREACH, f'tests may reach this machine alone, not {host}')


sys.addaudithook(_guard)

# These processes import a framework and end soon, so Python searches for cycles less often (a seventh of the processor
# time of the pipeline's tests)
gc.set_threshold(50_000, 20, 50)

# With JupyterLab installed, jsonschema imports an address checker in every process that reads a notebook. Compiling its
# grammar takes a second, and none of these processes uses it
sys.modules['rfc3987_syntax'] = None
