"""A sweep that is killed before its writes, to files and to its storage, and called again gives the same table and
leaves no other files. Trainings are simulated (`test_sweep.Stage`)."""
import os
import signal
import sqlite3
import sys
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pandas as pd
import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
from copies import TRAINER, start, status_of  # noqa: E402
from stage_kills import _is_write  # noqa: E402

pytest.importorskip('optuna', reason='Optuna is not installed: ./kit env sweep')


def do(folder: Path, study: str | None, at: int, counted: Path | None = None) -> None:
    "Run a sweep of four points, to be killed before write `at`; if it survives, write down the number of writes."
    from optuna.storages.journal import JournalFileSymlinkLock
    from test_sweep import Stage, pipeline, sweep
    n = 0
    def count():
        nonlocal n
        if n == at: os.kill(os.getpid(), signal.SIGKILL)
        n += 1
    def watch(event, args):
        if _is_write(event, args, f'{folder}/'): count()
    def connect(*args, connect=sqlite3.connect, **options):
        connection = connect(*args, **options)
        changes = 'INSERT', 'UPDATE', 'DELETE', 'COMMIT'
        connection.set_trace_callback(lambda statement: count() if statement.startswith(changes) else None)
        return connection
    with open(os.devnull, 'w') as null:
        for stream in 1, 2: os.dup2(null.fileno(), stream)
    sys.addaudithook(watch)
    wait = patch.object(JournalFileSymlinkLock.__init__, '__defaults__', (3,)) # Seconds for a killed process's lock
    with patch.object(pipeline, 'execute', Stage()), patch('sqlite3.connect', connect), wait:
        done, _ = sweep(folder, '--trials', '4', *(['--study', study] if study else []))
    assert done.exit_code == 0, done.output
    if counted: counted.write_text(str(n))


def table(folder: Path) -> str:
    return pd.read_csv(folder/'out'/'toy'/'sweep.csv').drop(columns='minutes').to_csv()


@pytest.mark.parametrize('kind', ['database', 'journal'])
def test_a_sweep_that_is_killed_at_a_write_has_the_same_table(kind, tmp_path, request):
    start([*TRAINER, 'stage_kills', 'test_sweep', 'optuna', 'sqlalchemy.dialects.sqlite', 'alembic.command'])
    def study(folder): return str(folder/'journal') if kind == 'journal' else None
    whole = tmp_path/'whole'
    whole.mkdir()
    assert status_of(do, whole, study(whole), 10**9, tmp_path/'counted') == 0
    count, expected = int((tmp_path/'counted').read_text()), table(whole)
    assert count > 50
    kills = np.random.default_rng(list(kind.encode())).permutation(count)[:request.config.getoption('--faults')//2]
    for at in sorted(map(int, kills)):
        folder = tmp_path/f'{at}'
        folder.mkdir()
        killed = status_of(do, folder, study(folder), at)
        assert killed == -signal.SIGKILL, f'it was not killed before write {at} of {count}'
        assert status_of(do, folder, study(folder), 10**9) == 0, f'it does not continue after a kill before write {at}'
        assert table(folder) == expected, f'it differs after a kill before write {at} of {count}'
        left = [p for p in folder.rglob('.*') if '.tmp' in p.name]
        assert not left, f'it leaves something after a kill before write {at}: {left}'
