"A configuration grows without harm: what was finished before a field existed is still finished."
import pytest
import yaml
from pydantic import Field

import b2t_kaggle.config as config
import b2t_kaggle.config.encoders.gru as gru
from b2t_kaggle.config import Config, ConfigError, TrainConfig, load_config, preset, save_config, with_overrides
from b2t_kaggle.config.encoders.gru import GRUConfig
from b2t_kaggle.pipeline.fingerprints import Keyed
from b2t_kaggle.pipeline.run import Run
from b2t_kaggle.pipeline.stages import plan
from b2t_kaggle.pipeline.stamps import StageRun
from b2t_kaggle.training.recipe import TrainingError
from b2t_kaggle.training.resume import check_same, fingerprint


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
    "The version of the kit that has two fields more."
    def grow():
        monkeypatch.setattr(gru, 'GRUConfig', GrownGRU)
        for module in (config, config.groups, config.keys, config.overrides, config.presets):
            if hasattr(module, 'Config'): monkeypatch.setattr(module, 'Config', Grown)
    return grow


def finish_all(folder):
    "A run whose stages are all done, as far as stamps know."
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


def test_another_version_trains_on_from_the_checkpoint(tmp_path, monkeypatch):
    "Everything is done again, as it may come out otherwise; but a model is not set aside, nor are data simulated anew."
    finish_all(tmp_path)
    before = {name: Run(tmp_path/'run', tmp_path).fingerprint(name) for name in plan(preset('demo'))}
    monkeypatch.setattr('b2t_kaggle.__version__', '99.0')
    run = Run(tmp_path/'run', tmp_path)
    assert {name: run.fingerprint(name) for name in before} == before
    assert StageRun(run, 'train').status() == 'inputs or parameters changed'
    assert 'b2t_kaggle was' in StageRun(run, 'train').reason()


def test_a_checkpoint_continues(later):
    before = fingerprint(preset('demo'), {})
    later()
    assert fingerprint(preset('demo'), {}) == before
    assert fingerprint(with_overrides(preset('demo'), {'new_trick': 1}), {}) != before


def test_files_of_the_first_version_are_read(tmp_path):
    "It wrote no number, and the fields of every model."
    values = preset('demo').model_dump(mode='json')
    values['model'] |= dict(noise_units=256, adversarial_strength=0.5, adversarial_schedule='constant')
    assert Config.model_validate(values) == preset('demo')
    save_config(preset('triple_gru'), tmp_path/'config.yaml')
    assert load_config(tmp_path/'config.yaml') == preset('triple_gru')
    with pytest.raises(ValueError, match='schema 3 of the configuration is not known, expected 2'):
        Config.model_validate(dict(preset('demo').dump(), schema=3))


# Groups as they were written when the keys of an LLM had other names, the same now, and key and fingerprint of the
# last stage as they were then
LLMS = (
    ({'rescore': dict(model='llm', adapter='adapter', dtype='bfloat16', eight_bit=True, end=True)},
     {'rescore': dict(llm='llm', llm_adapter='adapter', llm_dtype='bfloat16', llm_quantization='eight_bit', end=True)},
     '15e47da5ef07520a', '22406827f9b88b2f'),
    ({'decode': dict(llm='llm', llm_adapter='adapter')}, {'decode': dict(llm='llm', llm_adapter='adapter')},
     '1efc131033937448', '6f3cf1b752622e02'),
    ({'audio': dict(language_model='llm', llm_dtype='bfloat16', quantization='four_bit')},
     {'audio': dict(llm='llm', llm_dtype='bfloat16', llm_quantization='four_bit')},
     '1f4ecfd02234ba50', '5cc1b240eca90af8'),
)


@pytest.mark.parametrize('old, new, key, mark', LLMS)
def test_an_llm_of_an_older_configuration_is_the_same(old, new, key, mark, tmp_path, monkeypatch):
    monkeypatch.setattr('b2t_kaggle.__version__', '0.1.0')
    monkeypatch.chdir(tmp_path)
    for name in 'llm', 'adapter':
        (tmp_path/name).mkdir()
        (tmp_path/name/f'{name}_config.json').write_text(name)
    (tmp_path/'old.yaml').write_text(yaml.safe_dump(dict(schema=2) | old))
    cfg = load_config('old.yaml')
    (group, values), = old.items()
    assert cfg == with_overrides(Config(), {f'{group}.{k}': v for k, v in values.items()}) == Config.model_validate(new)
    keyed = Keyed(with_overrides(cfg, {'simulate.neural': 1}), tmp_path)
    assert (keyed.key('report'), keyed.fingerprint('report')) == (key, mark)
    save_config(cfg, 'new.yaml')
    saved = yaml.safe_load((tmp_path/'new.yaml').read_text())[group]
    assert new[group].keys() <= saved.keys() and not (old[group].keys() - new[group].keys()) & saved.keys()


# The group of the demo as a run saved it before there was `simulate.neural`
FIRST_NOISE = dict(n_sessions=8, train=120, val=24, test=24, max_words=6, snr=1.0, structured_noise=0.0, drift=1.0,
                   lm_sentences=20000, seed=0)


@pytest.mark.parametrize('written', [{}, dict(neural=1)])
def test_a_run_with_the_first_noise_stays_finished(written, tmp_path, monkeypatch):
    "Its data have the key and lie in the folder of then; a new run has the noise of a recording, and data of its own."
    monkeypatch.setattr('b2t_kaggle.__version__', '0.1.0')
    config_file = tmp_path/'old'/'config.yaml'
    config_file.parent.mkdir()
    config_file.write_text(yaml.safe_dump(preset('demo').dump() | dict(simulate=FIRST_NOISE | written)))
    text = config_file.read_text()
    old, new = (Run(tmp_path/name, tmp_path) for name in ('old', 'new'))
    assert (old.cfg.simulate.neural, new.cfg.simulate.neural) == (1, 2)
    assert (old.key('simulate'), old.data_dir.name) == ('0c2f90b36ca48a03', 'simulated-938f34b403505ed6')
    for name in plan(old.cfg): StageRun(old, name).begin().finish([])
    again = Run(tmp_path/'old', tmp_path)
    assert {StageRun(again, name).status() for name in plan(again.cfg)} == {'done'}
    assert config_file.read_text() == text
    assert new.data_dir != old.data_dir
    assert {StageRun(new, name).status() for name in plan(new.cfg)} == {'never ran'}
    (tmp_path/'by_hand.yaml').write_text('simulate: {train: 120}')
    assert load_config(tmp_path/'by_hand.yaml', base='demo') == preset('demo') == new.cfg


def test_two_names_of_a_key(tmp_path):
    (tmp_path/'a.yaml').write_text('rescore: {model: opt, llm: gpt2}')
    with pytest.raises(ConfigError, match='model is the former name of llm, and they have different values'):
        load_config(tmp_path/'a.yaml')
    with pytest.raises(ConfigError, match='eight_bit is the former name of llm_quantization'):
        with_overrides(Config(), {'rescore.eight_bit': 'false', 'rescore.llm_quantization': 'four_bit'})
    (tmp_path/'a.yaml').write_text('rescore: {model: opt}')
    assert load_config(tmp_path/'a.yaml', overrides={'rescore.llm': 'gpt2'}).rescore.llm == 'gpt2'


def test_a_training_of_an_older_version_goes_on(tmp_path):
    "Its checkpoint has the former names."
    def values(name, bits): return fingerprint(with_overrides(Config(), {'audio.llm': name, 'quantization': bits}), {})
    old = {'audio.language_model': 'Qwen/Qwen2-Audio-7B-Instruct', 'audio.quantization': 'four_bit',
           'model.name': 'gru', 'schema': '2'}
    check_same(old, values('there/Qwen2-Audio-7B-Instruct', 'four_bit'), tmp_path)
    with pytest.raises(TrainingError, match='audio.llm was Qwen/Qwen2-Audio-7B-Instruct, is now openai/whisper-small'):
        check_same(old, values('openai/whisper-small', 'four_bit'), tmp_path)
