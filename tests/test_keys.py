"""Keys of the configuration and stages: a changed key makes stale the stages that read it and all after them, and no
stage reads a key that its stamp does not cover."""
import os
import shutil
import sys
from collections import defaultdict
from contextlib import contextmanager
from functools import cache
from typing import Literal, get_args, get_origin

import pytest
from test_pipeline import SMALL, execute_here

from b2t_kaggle.config import Config, config_fields, flat_values, keys_with, with_overrides
from b2t_kaggle.config.encoders.encoder import encoder_config, encoder_names
from b2t_kaggle.config.schema import ChangesNothing, ConfigError, InputFile, MayChange, Section
from b2t_kaggle.pipeline import run as run_module
from b2t_kaggle.pipeline import stamps
from b2t_kaggle.pipeline.run import Run
from b2t_kaggle.pipeline.stages import plan
from b2t_kaggle.pipeline.stamps import StageRun

# Stages that read a key, or all keys of a group that are not listed separately; derived from the notebooks
READERS = {
    'simulate': 'simulate',
    'data': 'train',
    'data.dataset_dir': 'check',
    'data.sessions': 'check pack train',
    'data.bad_trials_dict': 'check pack train',
    'data.feature_subset': 'check pack train',
    'data.dtype': 'check pack train',
    'data.drop_instructions': 'pack train',
    'data.eval_batch_size': 'train infer generate',
    'data.on_device': '',
    'model': 'train',
    'augment': 'train',
    'train': 'train',
    'train.framework': 'train infer generate',
    'train.precision': 'train infer generate',
    'train.accelerator': '',
    'train.log': '',
    'train.replay': '',
    'train.time_budget': '',
    'infer': 'infer generate',
    'infer.logits': 'ensemble',
    'infer.average': 'ensemble',
    'infer.weights': 'ensemble',
    'lm': 'lm',
    'decode': 'decode',
    'rescore': 'rescore',
    'rescore.keep': 'rescore combine',
    'combine': 'combine',
    'audio': 'train generate',
    'generate': 'generate',
    'report': 'report',
    'session': '',
}
# Stages that read the outputs of a stage
FOLLOWERS = {
    'simulate': 'check pack lm',
    'check': 'pack lm',
    'pack': 'train infer ensemble lm decode generate rescore combine submit report',
    'train': 'infer',
    'infer': 'decode generate',
    'ensemble': 'decode',
    'lm': 'decode generate rescore combine',
    'decode': 'rescore combine submit',
    'generate': 'rescore combine submit',
    'rescore': 'combine submit',
    'combine': 'submit',
    'submit': 'report',
    'report': '',
}
# Inputs that are files, not folders
FILES = {'lm.path', 'lm.general', 'lm.texts', 'infer.logits', 'decode.boost', 'combine.sources', 'report.blocks',
         'audio.targets'}
# Configurations in which keys have an effect; FILE stands for an input file
BASES = {
    'most': {},
    'systems': {'data.dataset_dir': 'FILE', 'rescore.llm': 'FILE', 'combine.sources': 'FILE',
                'train.lr_scheduler_type': 'step'},
    'average': {'train.lr_scheduler_type': 'eden'},
    'checkpoint': {'infer.checkpoint': 'FILE'},
    'logits': {'infer.logits': 'FILE'},
    'audio LLM': {'audio.llm': 'FILE'},
    'participant': {'model.participants': {'t15': 512}},
    'frozen': {'train.init_checkpoint_path': 'FILE'},
}
# Configuration for keys, or prefixes of keys, that have no effect in most configurations
BASE_OF = {
    'data.dataset_dir': 'systems', 'rescore': 'systems', 'combine': 'systems', 'train.lr_step': 'systems',
    'infer.logits': 'logits',
    'infer.average': 'logits', 'infer.weights': 'logits', 'infer': 'checkpoint', 'audio': 'audio LLM',
    'generate': 'audio LLM', 'data.shares': 'participant', 'train.frozen': 'frozen',
}
# Values that cannot be derived from the current value
OTHER = {
    'audio.weights': {'ctc': .5},
    'data.sessions': ['t15.2023.08.13'],
    'data.bad_trials_dict': {'t15.2023.08.11': {'1': [2]}},
    'data.feature_subset': [*range(1, 512), 0],
    'data.must_include_days': [0],
    'model.name': 'triple_gru',
    'model.participants': {'t15': 512},
    'data.shares': {'t15': 1.},
    'infer.weights': [1.],
}
# Keys that a stage only prints
PRINTED = {('infer', 'train.refit')}
# Functions that plan stages or record inputs
PLANNING = {'plan', 'needs_of', 'config_with', 'time_left', 'marks', 'inputs', 'key', 'fingerprint'}


class NoOther(Exception): pass # The configuration accepts no other value of this key


def readers(key): return set(READERS.get(key, READERS[key.split('.')[0]]).split())


def and_followers(stages):
    "Stages and all after them."
    found = set(stages)
    for name in FOLLOWERS: # In order
        if name in found: found |= set(FOLLOWERS[name].split())
    return found


@pytest.fixture(scope='module')
def inputs(tmp_path_factory):
    "Two folders with different contents; any key may name them, or a file in them."
    folders = [tmp_path_factory.mktemp(name) for name in ('first', 'second')]
    for size, folder in enumerate(folders, 3):
        (folder/'t15.2023.08.11').mkdir()
        for name in 'config.json', 'best.pt', 'a_val.jsonl', 't15.2023.08.11/data_train.hdf5':
            (folder/name).write_bytes(bytes(size))
    return folders


def place(key, folder): return str(folder/'a_val.jsonl' if key in FILES else folder)


def bases_of(key):
    "Configurations in which a key has an effect; also one without training, if another stage reads the key too."
    if key.startswith('model.') and key not in flat_values(Config()):
        yield next(n for n in encoder_names() if key.split('.')[1] in encoder_config(n).model_fields)
    else: yield next((name for begin, name in BASE_OF.items() if key.startswith(begin)), 'most')
    if {'train', 'infer'} <= readers(key): yield 'checkpoint'


def values_of(base, inputs):
    "Values of a configuration in addition to those of the small run."
    if base in BASES: return {k: place(k, inputs[0]) if v == 'FILE' else v for k, v in BASES[base].items()}
    fields = encoder_config(base).model_fields # The encoder's sizes differ from the small run's
    return {'model.name': base} | {f'model.{k}': f.default for k, f in fields.items() if f'model.{k}' in SMALL}


def words(annotation):
    "Literal values that a type allows."
    if get_origin(annotation) is Literal: yield from get_args(annotation)
    else:
        for part in get_args(annotation): yield from words(part)


def candidates(key, cfg, inputs):
    group, name = key.split('.')
    field = type(getattr(cfg, group)).model_fields[name]
    value = getattr(getattr(cfg, group), name)
    if key in OTHER: yield OTHER[key]
    if any(isinstance(fact, InputFile) for fact in config_fields()[key].facts):
        yield from (place(key, inputs[1]), [place(key, inputs[1])])
    yield from words(field.annotation)
    if isinstance(value, bool): yield not value
    elif isinstance(value, int | float): yield from (value + 1, value*2, value/2, value - 1, value + .25, value - .25)
    elif isinstance(value, list): yield from ([v*2 for v in value], [v + 1 for v in value], [v - 1 for v in value])
    elif value is None: yield from (1, .5)
    else: yield 'other'


def changed(key, cfg, inputs):
    "The configuration with another value of a key."
    for value in candidates(key, cfg, inputs):
        try: other = with_overrides(cfg, {key: value})
        except ConfigError: continue
        if flat_values(other)[key] != flat_values(cfg)[key]: return other
    raise NoOther(key)


class Reads:
    "Records the keys that the code of each stage reads, except reads by the configuration itself."
    def __init__(self):
        self.of = defaultdict(set)
        self.stage = None
        self.groups = {} # By identity

    def note(self, section, names):
        frame = sys._getframe(2)
        if frame.f_globals.get('__name__', '').startswith(('b2t_kaggle.config', 'pydantic')): return
        while frame := frame.f_back:
            if frame.f_code.co_name in PLANNING: return
        self.of[self.stage] |= {f'{self.groups[id(section)]}.{name}' for name in names}

    @contextmanager
    def recorded(self):
        get, dump, begin = Section.__getattribute__, Section.model_dump, StageRun.begin
        def noted_get(section, name):
            if id(section) in self.groups and name in type(section).model_fields: self.note(section, [name])
            return get(section, name)
        def noted_dump(section, **options):
            names = type(section).model_fields.keys() - set(options.get('exclude') or ())
            if id(section) in self.groups: self.note(section, names)
            return dump(section, **options)
        def noted_begin(stage):
            begin(stage)
            self.stage, self.cfg = stage.name, stage.run.cfg
            self.groups = {id(section): group for group, section in self.cfg}
            return stage
        with pytest.MonkeyPatch.context() as m:
            m.setattr(Section, '__getattribute__', noted_get)
            m.setattr(Section, 'model_dump', noted_dump)
            m.setattr(StageRun, 'begin', noted_begin)
            yield


def execute_all(run, until=None):
    "Execute the stages that are not done; returns the keys that each stage reads."
    reads = Reads()
    with reads.recorded():
        for name in plan(run.cfg, until):
            if StageRun(run, name).status() != 'done': execute_here(run, name)
    return reads.of


@pytest.fixture(scope='module')
def small(tmp_path_factory):
    "A finished run, and the keys that its stages read."
    tmp = tmp_path_factory.mktemp('runs')
    run = Run(tmp/'runs'/'small', tmp/'work', SMALL | {'train.num_training_batches': 2})
    return run, execute_all(run)


@pytest.fixture(scope='module')
def copy(small, tmp_path_factory):
    "A function that copies the run and changes values."
    def copied(values):
        folder = tmp_path_factory.mktemp('copy')
        for path in small[0].dir, small[0].work: shutil.copytree(path, folder/path.name, copy_function=os.link)
        return Run(folder/'small', folder/'work', values)
    return copied


@pytest.fixture(autouse=True)
def known_contents(monkeypatch):
    "Fingerprints of files that do not change are computed once."
    found = run_module.content_fingerprints
    known = cache(lambda path: found([path])[path])
    for module in (run_module, stamps):
        monkeypatch.setattr(module, 'content_fingerprints', lambda paths: {p: known(p) for p in paths})


def done(run):
    "The run with a stamp for every stage, without executing them."
    for name in plan(run.cfg):
        stage = StageRun(run, name)
        if stage.status() != 'done': stage.begin().finish([])
    return run


def with_config(run, cfg):
    "The run with another configuration, which is not saved."
    with pytest.MonkeyPatch.context() as m:
        m.setattr(Run, '_read', lambda self: None) # Reading the saved one would take time
        return Run(run.dir, run.work, cfg=cfg, save=False)


def statuses(run): return {name: StageRun(run, name).status() for name in plan(run.cfg)}


def test_each_key_makes_its_readers_stale(small, copy, inputs):
    """Exactly the stages that read a key, and those after them, become stale; training starts again unless the key may
    change."""
    runs_of = {}
    wrong = {}
    for key, base in ((key, base) for key in config_fields() for base in bases_of(key)):
        if base not in runs_of: runs_of[base] = done(copy(values_of(base, inputs)))
        before = runs_of[base]
        after = with_config(before, changed(key, before.cfg, inputs))
        found = statuses(after)
        stale = {name for name, status in found.items() if status != 'done'}
        expected = and_followers(readers(key)) & set(found)
        facts = set(map(type, config_fields()[key].facts))
        if stale != expected or (ChangesNothing in facts) != (not readers(key)): wrong[key, base] = stale, expected
        goes_on = facts & {MayChange, ChangesNothing} and key != 'data.dataset_dir' # The other one has other sessions
        is_anew = 'train' in found and after.fingerprint('train') != before.fingerprint('train')
        if is_anew != ('train' in stale and not goes_on): wrong[key, base, 'fingerprint'] = is_anew
    assert not wrong


def test_no_stage_reads_keys_that_its_stamp_omits(small, copy, inputs, tmp_path):
    "Changing any key that a stage's code reads changes the stage's key, except keys that change no result."
    run, _ = small
    logits, sentences = ([path(split) for split in ('val', 'test')] for path in (run.logits, run.hypotheses))
    theirs = [tmp_path/f.name for f in sentences]
    for f, path in zip(sentences, theirs): path.write_text(f.read_text().replace('"small"', '"theirs"'))
    given = {'infer.checkpoint': str(run.dir/'train'/'best.pt'), 'infer.adapt': 'dietcorp'}
    others = (given, 'infer'), ({'infer.logits': list(map(str, logits))}, 'ensemble'), \
             ({'combine.sources': list(map(str, theirs))}, 'combine')
    seen = set()
    for run, reads in small, *((other := copy(values), execute_all(other, until)) for values, until in others):
        for stage, key in {(stage, key) for stage, keys in reads.items() for key in keys} - PRINTED:
            seen.add((stage, key))
            try: other = with_config(run, changed(key, run.cfg, inputs))
            except NoOther: continue
            if key in keys_with(run.cfg, ChangesNothing) or plan(run.cfg) != plan(other.cfg): continue
            assert run.key(stage) != other.key(stage), f'{stage} reads {key}, and its stamp does not depend on it'
    for stage, key in ('simulate', 'simulate.snr'), ('pack', 'data.dtype'), ('infer', 'infer.adapt'), \
                      ('decode', 'decode.beam'), ('ensemble', 'infer.average'), ('combine', 'combine.sources'):
        assert (stage, key) in seen
