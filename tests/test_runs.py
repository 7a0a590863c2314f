"Stamps: which files they record, and that older stamps stay valid."
import hashlib
import os
import subprocess
import sys
import time

import numpy as np
import pytest
from click.testing import CliRunner
from killed import LIMIT

from b2t_kaggle.cli import command as cli
from b2t_kaggle.config import preset
from b2t_kaggle.pipeline import execute as pipeline
from b2t_kaggle.pipeline import stamps
from b2t_kaggle.pipeline.run import Run
from b2t_kaggle.pipeline.stages import plan
from b2t_kaggle.pipeline.stamps import StageRun


def blocks_mark(path):
    "The older fingerprint of a large file: its size, and a hash of 16 blocks of 64 KiB."
    data = path.read_bytes()
    starts = [i*(len(data) - (1 << 16))//15 for i in range(16)]
    seen = b''.join(data[s:s + (1 << 16)] for s in starts) if len(data) > 1 << 20 else data
    return [len(data), hashlib.sha256(seen).hexdigest()[:16]]


@pytest.fixture
def files(tmp_path):
    "A language model, a checkpoint and a recording of more than a mebibyte each, by the key that names them."
    paths = {'lm.path': tmp_path/'lm.arpa', 'train.init_checkpoint_path': tmp_path/'first'/'best.pt',
             'data.dataset_dir': tmp_path/'data'/'t15.2023.08.11'/'data_train.hdf5'}
    for i, path in enumerate(paths.values()):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(np.random.default_rng(i).bytes(3_000_000))
    return paths


def run_of(files, tmp_path, **more):
    values = {k: str(p) for k, p in files.items()} | {'data.dataset_dir': str(tmp_path/'data')} | more
    return Run(tmp_path/'run', tmp_path/'work', values, cfg=preset('official'))


def do_all(run):
    "Execute each stage; each writes a file of more than a mebibyte."
    for name in plan(run.cfg):
        stage = StageRun(run, name).begin()
        out = stage.home/f'{"packed-" if stage.home == run.work else ""}{name}'/'best.pt'
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_bytes(np.random.default_rng(7).bytes(2_000_000))
        stage.finish([out])


def statuses(run): return {name: StageRun(run, name).status() for name in plan(run.cfg)}


def change_byte(path, at):
    "Change a byte without changing size or modification time."
    state = os.stat(path)
    with open(path, 'r+b') as f:
        f.seek(at)
        byte = f.read(1)[0]
        f.seek(at)
        f.write(bytes([byte ^ 1]))
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))


@pytest.mark.parametrize('key, stage', [('lm.path', 'lm'), ('train.init_checkpoint_path', 'train'),
                                        ('data.dataset_dir', 'check')])
def test_each_byte_of_a_large_file_counts(key, stage, files, tmp_path):
    "A byte outside those blocks is changed; the file's size and modification time are not."
    do_all(run_of(files, tmp_path))
    assert set(statuses(run_of(files, tmp_path)).values()) == {'done'}
    before = blocks_mark(files[key])
    change_byte(files[key], 100_000)
    assert blocks_mark(files[key]) == before
    assert statuses(run_of(files, tmp_path))[stage] == 'inputs or parameters changed'


def test_each_byte_of_a_large_output_counts(files, tmp_path):
    run = run_of(files, tmp_path)
    do_all(run)
    change_byte(run.dir/'train'/'best.pt', 100_000)
    assert statuses(run)['train'] == 'best.pt was changed'


def test_a_folder_in_place_of_an_output(files, tmp_path):
    run = run_of(files, tmp_path)
    do_all(run)
    stage = StageRun(run, 'infer')
    path = stage.home/next(iter(stage.stamp['outputs']))
    path.unlink()
    path.mkdir()
    assert stage.status() == f'{path.name} is no file'
    stage.begin()
    assert path.is_dir()


@pytest.mark.parametrize('damage', ['gone', 'a byte'])
def test_no_stage_accepts_damaged_outputs(damage, files, tmp_path):
    """Outputs that differ from the recorded ones are removed when their stage starts, except a trainer's; other files
    stay."""
    run = run_of(files, tmp_path)
    do_all(run)
    for name in 'pack', 'infer', 'train':
        stage = StageRun(run, name)
        path = stage.home/next(iter(stage.stamp['outputs']))
        if damage == 'gone': path.unlink()
        else: change_byte(path, 100_000)
        (path.parent/'other').touch()
        assert stage.status() == f'best.pt {"is missing" if damage == "gone" else "was changed"}'
        stage.begin()
        assert path.exists() == (name == 'train' and damage == 'a byte') and (path.parent/'other').exists()
        if name != 'train':
            with pytest.raises(stamps.PipelineError, match=f'stage {name}: .*best.pt disappeared before'):
                stage.finish([path])
        path.write_bytes(np.random.default_rng(7).bytes(2_000_000))
        stage.finish([path])
        assert StageRun(run, name).status() == 'done'


# Stages without work, one of which waits for a file; each logs the beam that its kernel would use
WORKS = """
import sys, time
from pathlib import Path
from b2t_kaggle.pipeline import execute as pipeline
from b2t_kaggle.pipeline.run import Run
from b2t_kaggle.pipeline.stamps import StageRun
folder, beam = Path(sys.argv[1]), int(sys.argv[2])

def execute(run, name):
    stage = StageRun(Run(run.dir, run.work, run.unsaved(), save=False), name).begin()
    with open(folder/'seen', 'a') as f: f.write(f'{beam} {name} {stage.run.cfg.decode.beam}\\n')
    while name == 'lm' and not (folder/'go').exists(): time.sleep(.05)
    stage.finish([])

pipeline.execute = execute
try: pipeline.run_stages(Run(folder/'run', folder/'work', {'decode.beam': beam}, save=False), 'decode')
except pipeline.PipelineError as e: sys.exit(str(e))
"""


def works(folder, beam):
    return subprocess.Popen([sys.executable, '-c', WORKS, folder, str(beam)], stderr=subprocess.PIPE, text=True)


def wait_for(condition):
    end = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < end
        time.sleep(.05)


def test_two_starts_in_one_folder(tmp_path):
    """The first run finishes with its own values even if others are written into the folder; a second run is refused
    and leaves no trace."""
    seen = tmp_path/'seen'
    first = works(tmp_path, 7)
    wait_for(lambda: seen.exists() and 'lm' in seen.read_text())
    other = works(tmp_path, 8)
    said = other.communicate()[1]
    assert other.returncode == 1 and f'is in use (process {first.pid} of' in said and first.poll() is None
    Run(tmp_path/'run', tmp_path/'work', {'decode.beam': 9}) # Writes config.yaml
    (tmp_path/'go').touch()
    said = first.communicate()[1]
    assert first.returncode == 0, said
    stages = ['simulate', 'check', 'pack', 'train', 'infer', 'lm', 'decode']
    assert seen.read_text() == ''.join(f'7 {name} 7\n' for name in stages)
    assert StageRun(Run(tmp_path/'run', tmp_path/'work'), 'decode').stamp['inputs']['values']['decode.beam'] == 7
    assert Run(tmp_path/'run', tmp_path/'work').cfg.decode.beam == 7
    assert works(tmp_path, 8).wait() == 0 and seen.read_text().endswith('8 decode 8\n') # The first run is over


def test_a_configuration_that_changes_in_between(tmp_path, monkeypatch):
    "If `config.yaml` changes after a stage is announced and before its kernel reads it, the result does not count."
    def execute(run, name):
        overrides = run.unsaved()
        path = run.dir/'config.yaml'
        if name == edited: path.write_text(path.read_text().replace(*edits[name]))
        StageRun(Run(run.dir, run.work, overrides, save=False), name).begin().finish([])
    monkeypatch.setattr(pipeline, 'execute', execute)
    edits = {'decode': ('beam: 7\n', 'beam: 9\n'), 'simulate': ('val: 37\n', 'val: 38\n')}
    values = {'decode.beam': 7, 'simulate.val': 37}
    seven = Run(tmp_path/'run', tmp_path/'work', values)
    for edited in edits:
        with pytest.raises(stamps.PipelineError, match=f'stage {edited}: .*config.yaml was changed while'):
            pipeline.run_stages(seven, 'decode', force=[edited])
    edited = ''
    pipeline.run_stages(Run(seven.dir, seven.work, values), 'decode', force=edits)
    computed = [StageRun(seven, name).stamp['inputs']['values'] for name in edits]
    assert (computed[0]['decode.beam'], computed[1]['simulate.val']) == (7, 37)


@pytest.mark.parametrize('name', ['lm', 'simulate'])
def test_a_folder_in_place_of_a_stamp(name, tmp_path):
    path = StageRun(Run(tmp_path/'run', tmp_path/'work'), name).stamp_path
    path.mkdir(parents=True)
    r = CliRunner().invoke(cli.main, ['run', '--name', 'run', '--out', str(tmp_path), '--work', str(tmp_path/'work')])
    assert r.exit_code == 1 and f'Error: {path}: found a folder, expected a file' in r.stderr.splitlines()[-1]


def test_a_killed_run_does_not_block_others(tmp_path):
    first = works(tmp_path, 7)
    wait_for(lambda: (tmp_path/'seen').exists() and 'lm' in (tmp_path/'seen').read_text())
    first.kill()
    first.communicate()
    (tmp_path/'go').touch()
    assert works(tmp_path, 8).wait() == 0 and (tmp_path/'seen').read_text().endswith('8 lm 8\n8 decode 8\n')
