"Terminals that are not UTF-8: characters that they cannot show are replaced, and no verb fails because of a character."
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# Each verb's help, tables with −, an error with …, and output of a process that the command starts
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
def test_characters_that_a_terminal_cannot_show_are_replaced(encoding, tmp_path):
    env = {k: v for k, v in os.environ.items() if k not in ('LC_ALL', 'LANG', 'PYTHONUTF8')}
    env |= dict(PYTHONIOENCODING=encoding, LC_ALL='C', PYTHONCOERCECLOCALE='0', PYTHONUTF8='0')
    (tmp_path/'verbs.py').write_text(CODE, encoding='utf-8')
    found = subprocess.run([sys.executable, tmp_path/'verbs.py'], env=env, capture_output=True)
    assert b'Traceback' not in found.stderr, found.stderr.decode('latin-1')
    shown = '─→ dün 日本'.encode(encoding, 'replace')
    assert found.stdout.count(shown) == 2
    assert found.stderr.splitlines()[-1].startswith(b'Error: no ')


HOSTILE = '\x1b]0;title\x07\x9b31m\r\x08'


def test_files_and_names_cannot_control_the_terminal(tmp_path):
    "Names of systems and corpora, sentences, a run's folder, preset, plugin, model and data, and broken keys."
    from click.testing import CliRunner

    from b2t_kaggle.cli import main
    from b2t_kaggle.config import preset, save_config
    rows = [dict(trial=str(i), text=f'how are {HOSTILE} you', reference='how are we', corpus=HOSTILE + 'c')
            for i in range(12)]
    for name in 'ab':
        lines = (json.dumps(row | dict(system=name + HOSTILE, model=HOSTILE)) for row in rows)
        (tmp_path/f'{name}{HOSTILE}.jsonl').write_text('\n'.join(lines))
    files = sorted(map(str, tmp_path.glob('*.jsonl')))
    runs = tmp_path/'runs'
    cfg = preset('demo')
    cfg.data.dataset_dir = Path(f'/x{HOSTILE}')
    save_config(cfg, runs/f'run{HOSTILE}'/'config.yaml')
    save_config(preset('demo'), runs/'variant'/'config.yaml')
    for origin in ({'from': HOSTILE}, dict(plugin=f'/p{HOSTILE}.py'), dict(preset=HOSTILE)):
        (runs/f'{min(origin)}{HOSTILE}').mkdir()
        save_config(preset('demo'), runs/f'{min(origin)}{HOSTILE}'/'config.yaml')
        (runs/f'{min(origin)}{HOSTILE}'/'origin.json').write_text(json.dumps(dict(preset='demo') | origin))
    (runs/'broken').mkdir()
    (runs/'broken'/'config.yaml').write_text('"\\e]0;title\\a": 1\n')
    lines = [['compare', *files], ['combine-files', *files, '-o', tmp_path/f'o{HOSTILE}.jsonl'],
             ['combine-files', *files, '-o', tmp_path/'o.jsonl', '--tune', files[0], '--tune', files[1]],
             ['runs', '--out', runs]]
    for line in lines:
        done = CliRunner().invoke(main, list(map(str, line)), catch_exceptions=False)
        assert done.exit_code == 0, done.output
        assert all(c.isprintable() or c == '\n' for c in done.output), repr(done.output)
    assert done.output.count('\n') == 7, done.output
