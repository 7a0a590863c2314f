"Terminals that are not UTF-8: what they cannot show is replaced, and no verb ends for want of a character."
import os
import subprocess
import sys

import pytest

# Each verb's help, tables with −, an error with …, and what a process prints that the command has started
CODE = '''
import subprocess, sys
import click
from b2t_kaggle.cli.command import main

def helps(command, path):
    yield [*path, '--help']
    for name in getattr(command, 'list_commands', lambda ctx: ())(None):
        yield from helps(command.get_command(None, name), [*path, name])

child = [sys.executable, '-c', ascii("import sys; print('─→ dün 日本'); print('…', file=sys.stderr)")[1:-1]]

@main.command()
def all_kinds():
    subprocess.run(child, check=True)
    print('─→ dün 日本', flush=True)
    raise OSError('no ─→ dün 日本 …')

for args in (*helps(main, []), ['keys'], ['devices'], ['keys', 'nö→'], ['all-kinds']):
    try: main(args)
    except SystemExit as e:
        if e.code not in (0, 1, 2): raise
'''


@pytest.mark.parametrize('encoding', ['ascii', 'latin-1', 'cp1252'])
def test_what_a_terminal_cannot_show_is_replaced(encoding, tmp_path):
    env = {k: v for k, v in os.environ.items() if k not in ('LC_ALL', 'LANG', 'PYTHONUTF8')}
    env |= dict(PYTHONIOENCODING=encoding, LC_ALL='C', PYTHONCOERCECLOCALE='0', PYTHONUTF8='0')
    (tmp_path/'verbs.py').write_text(CODE, encoding='utf-8')
    found = subprocess.run([sys.executable, tmp_path/'verbs.py'], env=env, capture_output=True)
    assert b'Traceback' not in found.stderr, found.stderr.decode('latin-1')
    shown = '─→ dün 日本'.encode(encoding, 'replace')
    assert found.stdout.count(shown) == 2
    assert found.stderr.splitlines()[-1].startswith(b'Error: no ')
