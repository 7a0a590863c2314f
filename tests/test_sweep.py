"""A sweep that is killed, two processes that share a study, and a training that asks its callback. Stages are
simulated: the files that papermill would produce are written directly."""
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from click.testing import CliRunner

from b2t_kaggle.cli import command as cli
from b2t_kaggle.pipeline import execute as pipeline
from b2t_kaggle.pipeline.run import Run
from b2t_kaggle.pipeline.stamps import StageRun
from b2t_kaggle.training.trackers import callback_from_env

pytest.importorskip('optuna', reason='Optuna is not installed: ./kit env sweep')

SPACE = ['--set', 'train.lr_max=1e-4:1e-2:log', '--set', 'model.n_units=8,16', '--set', 'train.accelerator=cpu']


class Stage:
    "Stand-in for papermill. A trial's PER falls with every step, to a level that depends on its values."
    def __init__(self, dies_in=None):
        self.dies_in = dies_in # Name of the run in which this process is killed, after its second step
        self.steps = []        # Name of the run of each step

    def __call__(self, run, name):
        stage = StageRun(run, name).begin()
        if name != 'train': return stage.finish([])
        callback = callback_from_env()
        checkpoint = run.dir/'checkpoint'
        step = int(checkpoint.read_text()) if checkpoint.exists() else 0
        level = .2 + 30*abs(run.cfg.train.lr_max - .003) + run.cfg.model.n_units/100
        is_pruned = False
        while step < 4 and not is_pruned:
            step += 1
            self.steps.append(run.dir.name)
            is_pruned = callback(step, level + 1/step)
            checkpoint.write_text(str(step))
            if run.dir.name == self.dies_in and step == 2: os.kill(os.getpid(), 9)
        stage.finish([], dict(steps=step, PER=level + 1/step), finished=step == 4)


def sweep(folder, *options):
    "Call `b2t sweep`; returns its output, and the table without times."
    import pandas as pd
    places = ['--out', str(folder/'out'), '--work', str(folder/'work')]
    keys = {option.partition('=')[0] for option in options}
    space = [word for value in SPACE[1::2] if value.partition('=')[0] not in keys for word in ('--set', value)]
    done = CliRunner().invoke(cli.main, ['sweep', '--name', 'toy', *places, '--startup', '2', *space, *options])
    path = folder/'out'/'toy'/'sweep.csv'
    return done, pd.read_csv(path).drop(columns='minutes') if path.exists() else None


@pytest.fixture
def stage(monkeypatch):
    stage = Stage()
    monkeypatch.setattr(pipeline, 'execute', stage)
    return stage


DIES = '''
    import sys
    sys.path.insert(0, sys.argv[1])
    from pathlib import Path
    from test_sweep import Stage, pipeline, sweep
    pipeline.execute = Stage(dies_in=sys.argv[3])
    sweep(Path(sys.argv[2]), '--trials', '6')
'''


def test_a_killed_sweep_equals_an_uninterrupted_one(stage, tmp_path):
    whole, expected = sweep(tmp_path/'whole', '--trials', '6')
    assert whole.exit_code == 0, whole.output
    assert set(expected.state) == {'complete', 'pruned'} and len(expected) == 6
    last = expected[expected.state == 'complete'].run.max() # The last complete point
    code = [sys.executable, '-c', textwrap.dedent(DIES), str(Path(__file__).parent), str(tmp_path/'killed'), last]
    killed = subprocess.run(code, capture_output=True, text=True, timeout=400,
                            env=os.environ | {'PYTHONPATH': os.pathsep.join(sys.path)})
    assert killed.returncode == -9, killed.stderr
    stage.steps = []
    done, table = sweep(tmp_path/'killed', '--trials', '6')
    assert done.exit_code == 0, done.output
    assert table.equals(expected)
    assert stage.steps[:2] == [last]*2 and last not in stage.steps[2:], 'it goes on behind its checkpoint'


def test_trials_are_runs_and_failures_are_reported(stage, tmp_path, monkeypatch):
    done, table = sweep(tmp_path, '--trials', '2')
    best = table.run[0]
    assert f'b2t run --name {best} continues it' in done.output and (tmp_path/'out'/'toy'/'sweep.csv').exists()
    run = Run(tmp_path/'out'/best, tmp_path/'work')
    assert run.cfg.model.n_units == table['model.n_units'][0] and run.cfg.train.num_training_batches == 370
    # Another range or common value makes another sweep
    other, _ = sweep(tmp_path, '--set', 'model.n_units=8,32')
    assert other.exit_code == 1 and 'range of model.n_units was' in other.output
    other, _ = sweep(tmp_path, '--set', 'train.seed=4')
    assert other.exit_code == 1 and 'train.seed was its default, is now 4' in other.output

    def explodes(run, name):
        if name == 'train': raise pipeline.PipelineError('stage train failed: TrainingError: the loss is nan')
        StageRun(run, name).begin().finish([])

    monkeypatch.setattr(pipeline, 'execute', explodes)
    done, table = sweep(tmp_path/'bad', '--trials', '2')
    assert done.exit_code == 1 and 'no trial was completed' in done.output and set(table.state) == {'fail'}
    assert 'toy-001: failed: stage train failed: TrainingError: the loss is nan' in done.output

    def damaged(run, name): raise pipeline.PipelineError('stage check failed: no sessions')

    monkeypatch.setattr(pipeline, 'execute', damaged)
    done, table = sweep(tmp_path/'none', '--trials', '2')
    assert str(done.exception) == 'stage check failed: no sessions' and table is None


def test_machines_share_a_study(stage, tmp_path):
    "A journal in a shared folder; each machine has its own runs, and does not change the other's."
    study = ['--study', str(tmp_path/'shared.journal')]
    sweep(tmp_path/'one', '--trials', '3', *study)
    import optuna

    from b2t_kaggle.training.trackers import open_storage
    optuna.load_study(study_name='toy', storage=open_storage(study[1])).ask() # A third machine has the fourth point
    done, table = sweep(tmp_path/'two', '--trials', '5', *study)
    assert len(table) == 5 and 'running elsewhere or lost there: toy-003' in done.output
    runs = {folder: {p.name for p in (tmp_path/folder/'out').iterdir()} for folder in ('one', 'two')}
    assert runs == {'one': {'toy', 'toy-000', 'toy-001', 'toy-002'}, 'two': {'toy', 'toy-004'}}


def test_refused_ranges(stage, tmp_path):
    "A range is refused before a folder or a study is created, so that the command can be corrected and repeated."
    for options, why in ((['--set', 'train.lr_max=1e-2:1e-4'], 'write the lower end first'),
                         (['--set', 'model.rnn_dropout=0:3'], 'model.rnn_dropout'),
                         (['--set', 'model.bidirectional=0:1'], 'valid boolean (found 0.5)'),
                         (['--set', 'train.optimizer=adamw,adam'], 'did you mean adamw?'),
                         (['--set', 'train.lr_mx=1:2'], 'did you mean train.lr_max, '),
                         (['--set', 'train.lr_max=fast,slow'], "found 'fast'"),
                         (['--set', 'data.batch_size=2,16'], 'data.batch_size is 2, fewer trials'),
                         (['--set', 'data.days_per_batch=2,9'], 'there are 8 sessions'),
                         (['--set', 'train.cr_ctc=0,0.2', '--set', 'model.name=gru,triple_gru', '--set', 'lr_max=1:2'],
                          'train.lr_max is given as 1e-4:1e-2:log and as 1:2'),
                         (['--set', 'train.refit=0,0.1', '--set', 'train.early_stopping=false,true'],
                          'train.refit 0.1, train.early_stopping True: train'),
                         (['--set', 'train.init_checkpoint_path=/no/best.pt,null'], '/no/best.pt does not exist'),
                         (['--set', 'infer.checkpoint=/no/best.pt'], 'nothing to do'),
                         (['--set', 'batch_size=8,16', '--batch-size', '8'], 'by --set, and as 8 by --batch-size'),
                         (['--force', 'train'], '--force is for one run')):
        done, _ = sweep(tmp_path, *options)
        assert done.exit_code and why in done.output, done.output
        assert not list(tmp_path.iterdir()), options
    assert not stage.steps


def test_a_sweep_that_is_called_again_says_that_it_is_done(stage, tmp_path):
    first, expected = sweep(tmp_path, '--trials', '2')
    stage.steps = []
    again, table = sweep(tmp_path, '--trials', '2')
    assert again.exit_code == 0 and 'All 2 trials are already done; --trials 4 runs more' in again.output
    assert table.equals(expected) and not stage.steps and 'are already done' not in first.output
    more, table = sweep(tmp_path, '--trials', '3')
    assert more.exit_code == 0 and len(table) == 3 and 'are already done' not in more.output
