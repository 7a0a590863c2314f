"New configuration fields keep existing runs valid: stages finished before a field existed stay finished."
import pytest
from pydantic import Field

import b2t_kaggle.config as config
import b2t_kaggle.config.encoders.gru as gru
from b2t_kaggle.config import Config, TrainConfig, preset, with_overrides
from b2t_kaggle.config.encoders.gru import GRUConfig
from b2t_kaggle.pipeline.run import Run
from b2t_kaggle.pipeline.stages import plan
from b2t_kaggle.pipeline.stamps import StageRun
from b2t_kaggle.training.checkpoints import fingerprint


class GrownTrain(TrainConfig):
    new_trick: float = Field(0.25, ge=0)
    "What a later version adds."


class GrownGRU(GRUConfig):
    new_gate: bool = False
    "What a later version adds to a model."


class Grown(Config):
    train: GrownTrain = GrownTrain()


@pytest.fixture
def later(monkeypatch):
    "Simulate a version of the kit with two more fields."
    def grow():
        monkeypatch.setattr(gru, 'GRUConfig', GrownGRU)
        for module in (config, config.groups, config.keys, config.presets):
            if hasattr(module, 'Config'): monkeypatch.setattr(module, 'Config', Grown)
    return grow


def finish_all(folder):
    "A run whose stages all have stamps."
    run = Run(folder/'run', folder, {'n_units': 64, 'lr_max': 0.002})
    for name in plan(run.cfg): StageRun(run, name).begin().finish([])
    return [StageRun(run, name).status() for name in plan(run.cfg)]


def test_finished_stages_stay_finished(tmp_path, later):
    assert set(finish_all(tmp_path)) == {'done'}
    later()
    run = Run(tmp_path/'run', tmp_path)
    assert run.cfg.train.new_trick == 0.25 and run.cfg.model.new_gate is False
    assert run.cfg.model.n_units == 64 and run.cfg.train.lr_max == 0.002
    assert {name: StageRun(run, name).status() for name in plan(run.cfg)} == {name: 'done' for name in plan(run.cfg)}


@pytest.mark.parametrize('key, value', [('new_trick', 0.5), ('new_gate', True)])
def test_a_new_field_that_is_used_counts(tmp_path, later, key, value):
    finish_all(tmp_path)
    later()
    run = Run(tmp_path/'run', tmp_path, {key: value})
    statuses = {name: StageRun(run, name).status() for name in plan(run.cfg)}
    assert statuses['pack'] == 'done' and statuses['train'] == 'inputs or parameters changed'


def test_another_version_continues_from_the_checkpoint(tmp_path, monkeypatch):
    "All stages are repeated, as results may differ, but the model is not set aside and data are not simulated again."
    finish_all(tmp_path)
    before = {name: Run(tmp_path/'run', tmp_path).fingerprint(name) for name in plan(preset('demo'))}
    monkeypatch.setattr('b2t_kaggle.__version__', '99.0')
    run = Run(tmp_path/'run', tmp_path)
    assert {name: run.fingerprint(name) for name in before} == before
    assert StageRun(run, 'train').status() == 'inputs or parameters changed'
    assert 'changed: b2t_kaggle' in StageRun(run, 'train').reason()


def test_a_checkpoint_continues(later):
    before = fingerprint(preset('demo'), {})
    later()
    assert fingerprint(preset('demo'), {}) == before
    assert fingerprint(with_overrides(preset('demo'), {'new_trick': 1}), {}) != before
