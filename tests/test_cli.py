"""Every option of every verb changes what is done, or is refused in one line.

Verbs and options are read from the commands. The functions that do the work are replaced by a recorder of their
arguments; a test of an option checks whether the record changes.
"""
import contextlib
import dis
import inspect
import os
import shutil
import subprocess
import sys
from pathlib import Path

import click
import h5py
import pytest
from click.testing import CliRunner

from b2t_kaggle.cli import command as cli
from b2t_kaggle.cli.command import VERBS as SECTIONS
from b2t_kaggle.cli.options import StageOption
from b2t_kaggle.config import load_config, preset, save_config
from b2t_kaggle.pipeline.run import Run
from b2t_kaggle.pipeline.stages import PLUGIN_VARIABLE, STAGES
from b2t_kaggle.pipeline.stages.infer import SPLIT_VARIABLE
from b2t_kaggle.pipeline.sweep import Sweep


def verbs(command=cli.main, path=()):
    "Path and command of each verb."
    for name in command.list_commands(None) if isinstance(command, click.Group) else ():
        yield from verbs(command.get_command(None, name), (*path, name))
    if path: yield ' '.join(path), command


VERBS = dict(verbs())


def options(verb): return [p for p in VERBS[verb].params if isinstance(p, click.Option)]


def is_of_runs(verb): return verb != 'runs' and any(p.name == 'work' for p in options(verb))


# Ways to call each verb; the words are files and runs in the current folder
LINES = {verb: [verb] for verb in VERBS if is_of_runs(verb)} | {
    'generate': ['generate --set audio.llm=llm'],
    'rescore': ['rescore --set rescore.llm=llm'],
    'combine': ['combine --set combine.sources=[first]'],
    'data simulate': ['data simulate sessions'],
    'data check': ['data check sessions'],
    'lm': ['lm', 'lm clean lists.jsonl -o sentences.txt'],
    'ensemble': ['ensemble first --name both'],
    'sweep': ['sweep --set train.lr_max=1e-4:1e-2:log'],
    'combine-files': ['combine-files lists.jsonl -o combined.csv'],
    'confusions': ['confusions lists.jsonl --lm lists.jsonl -o learned.json'],
    'decode-phonemes': ['decode-phonemes lists.jsonl --confusions lists.jsonl --lm lists.jsonl -o sentences.csv'],
}
# Options that are added, by parameter; brackets enclose options of both calls
VALUES = {
    'name': ['--name other'],
    'preset_': ['--preset quick'],
    'config_': ['--config config.yaml', '--config_path config.yaml'],
    'data': ['--data sessions'],
    'overrides': ['--set decode.beam=7', '--set simulate.seed=5', '--set data.dtype=float32'],
    'reset': ['--reset'],
    'out': ['--out elsewhere'],
    'work': ['--work elsewhere'],
    'force': ['--force check', '--force simulate'],
    'from_': ['--from first', '[--name variant] --from first'],
    'framework': ['--framework tensorflow'],
    'accelerator': ['--accelerator cpu'],
    'precision': ['--disable-mixed-precision', '--disable_mixed_precision'],
    'output_dir': ['--output-dir other', '[--output-dir other] --out elsewhere'],
    'batch_size': ['--batch-size 3', '[--set data.batch_size=4] --batch-size 3'],
    'eval_batch_size': ['--batch-size 3'],
    'num_batches': ['--num-batches 9'],
    'checkpoint': ['--checkpoint lists.jsonl', '--model_path lists.jsonl'],
    'split': ['--split val', '--eval_type test'],
    'first_weights': ['--model_path lists.jsonl'],
    'quick': ['--quick'],
    'phonemes': ['--phonemes config.yaml'],
    'confusions_path': ['--confusions config.yaml'],
    'lm_path': ['--lm config.yaml'],
    'words': ['--words lists.jsonl'],
    'output': ['-o other.csv'],
    'nbest': ['--nbest 3'],
    'texts': ['--text lists.jsonl'],
    'llm_prompt': ['--llm-prompt 12'],
    'tune': ['--tune val'],
    'lm': ['--lm lists.jsonl'],
    'blocks': ['--blocks lists.jsonl'],
    'trials': ['--trials 3'],
    'study': ['--study study.db'],
    'startup': ['--startup 3'],
    'method': ['--how prob'],
    'weights': ['--weights 1'],
    'folder': ['--folder sessions'],
    'plugin': ['--plugin mine.py'],
    'host': ['--host there', '--redis_ip there'],
    'port': ['--port 1', '--redis_port 1'],
    'lm__path': ['--lm_path lists.jsonl'],
    'decode__acoustic_scale': ['--acoustic_scale 0.325'],
    'decode__blank_penalty': ['--blank_penalty 90'],
    'decode__blank_skip': ['--ctc_blank_skip_threshold 1'],
    'do_opt': ['--do_opt'],
    'rescore__alpha': ['--alpha 0.5'],
    'rescore__swaps': ['--top_candidates_to_augment 5'],
    'gpu_number': ['--gpu_number 0'],
    'kaldi': ['--max_active 7000', '--beam 17'],
    'db': ['--db 3'],
    'username': ['--username me'],
    'password': ['--password secret'],
    'tls': ['--tls'],
    'tls_ca': ['--tls-ca lists.jsonl'],
    'tls_cert': ['--tls-cert lists.jsonl'],
    'tls_key': ['--tls-key lists.jsonl'],
    'llm': ['--llm llm'],
    'llm_adapter': ['--llm-adapter sessions'],
    'dtype': ['--dtype bfloat16'],
    'classes': ['--classes sil-first', '--order blank-last'],
    'before': ['--before first'],
}
CASES = [(verb, line, p.name, value) for verb, lines in LINES.items() for line in lines for p in options(verb)
         for value in VALUES[p.name]]
# Functions that do the work, and slow functions before it
WORK = ('run.run_stages', 'run._sweep_runs', 'data.simulate_dataset', 'data.validate', 'data.list_sessions',
        'serve.run_stages', 'serve.serve_decoder', 'serve.check_redis', 'serve.open_decoder')
TOOLS = ('combine-files', 'confusions', 'decode-phonemes')
VARIABLES = SPLIT_VARIABLE, PLUGIN_VARIABLE, 'CUDA_VISIBLE_DEVICES' # How options reach the work
BEFORE = ('b2t_kaggle.cli.serve._tell_search', 'b2t_kaggle.cli.serve._llm', 'signal.signal', 'logging.basicConfig')


def seen(value):
    "A recorded value; runs are recorded with their folders and configuration, sweeps with their run and options."
    if isinstance(value, Run): return str(value.dir), str(value.work), value.cfg.dump(), value.origin
    if isinstance(value, Sweep): return seen(value.run), value.ranges, value.startup, value.storage
    text = repr(value)
    assert ' object at 0x' not in text, f'{text}: two equal ones would differ'
    return text


@pytest.fixture
def call(tmp_path, monkeypatch):
    """A function that calls a command line in a fresh copy of a folder, and returns the status, the output and the
    record."""
    start = tmp_path/'start'
    Run(start/'submissions'/'first', start/'data', {'decode.beam': 9}, preset('demo'), dict(preset='demo'))
    (start/'submissions'/'first'/'logits').mkdir()
    (start/'submissions'/'first'/'logits'/'val.arrow').touch()
    (start/'sessions').mkdir()
    (start/'lists.jsonl').touch()
    (start/'mine.py').write_text('def augment(x): return x')
    values = {'data.dtype': 'float32', 'simulate.seed': 3}
    save_config(load_config(base='triple_gru', overrides=values), start/'config.yaml')
    record = []
    def recorder(name):
        def write(*args, **options):
            given = {k: os.environ.get(k) for k in VARIABLES} | {k: seen(v) for k, v in options.items()}
            record.append((name, [seen(a) for a in args], given))
            return []
        return write
    for name in VARIABLES:
        monkeypatch.setenv(name, '') # So that it is removed afterwards if a line sets it
        monkeypatch.delenv(name)
    for name in WORK: monkeypatch.setattr(f'b2t_kaggle.cli.{name}', recorder(name))
    for name in TOOLS: monkeypatch.setattr(VERBS[name], 'callback', recorder(name))
    for name in BEFORE: monkeypatch.setattr(name, lambda *args, **options: None)
    monkeypatch.setattr('b2t_kaggle.cli.run.compiled_ahead', contextlib.nullcontext)

    def called(line):
        folder = tmp_path/'now'
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(start, folder)
        monkeypatch.chdir(folder)
        record.clear()
        for name in VARIABLES: os.environ.pop(name, None)
        done = CliRunner().invoke(cli.main, line.split() if isinstance(line, str) else line)
        return done.exit_code, done.output, list(record)
    return called


@pytest.mark.parametrize('verb, line, name, value', CASES, ids=lambda text: text.replace(' ', '_'))
def test_an_option_has_an_effect_or_is_refused(verb, line, name, value, call):
    both, _, option = value.rpartition('] ')
    line = f'{line} {both[1:]}'
    refused, _, without = call(line)
    status, told, record = call(f'{line} {option}')
    if record != without or refused: return
    assert status in (1, 2), f'{line} {option} does what {line} does: {record}'
    error = told[told.index('Error: '):]
    assert error.count('\n') == 1, told
    option, = (p for p in options(verb) if p.name == name)
    assert any(n in error for n in (*option.opts, *filter(None, [getattr(option, 'key', None)]))), error


def test_every_option_is_read():
    "The code of each verb, including verbs outside a run, reads the value of each of its options."
    for verb, command in VERBS.items():
        code = inspect.unwrap(command.callback).__code__
        read = {i.argval for i in dis.get_instructions(code) if i.opname.startswith('LOAD')} | set(code.co_cellvars)
        arguments = code.co_varnames[:code.co_argcount + code.co_kwonlyargcount]
        passed_on = {p.name for p in options(verb) if p.name not in arguments}
        assert {p.name for p in options(verb)} - passed_on <= read, verb
        assert not passed_on or verb in LINES, f'{verb}: {passed_on} go to what no test looks at'


@pytest.mark.parametrize('line, option', [
    ('lm get -o folder', '--output'),
    ('lm build lists.jsonl -o new.arpa --sentences --no-numbers', '--numbers'),
    ('lm --preset quick clean lists.jsonl -o new.txt', '--preset'),
    ('convert lists.jsonl new.pt --set causal=true', '--set'),
])
def test_an_option_without_effect_is_refused(line, option, call):
    status, told, _ = call(line)
    error = told[told.index('Error: '):]
    assert status == 2 and option in error and error.count('\n') == 1, told


def test_a_preset_applies_to_a_simulated_folder(tmp_path):
    "Counted in the HDF5 files: `quick` has 40 training sentences in a session, `demo` has 120."
    few = ['--set', 'simulate.n_sessions=1', '--set', 'simulate.lm_sentences=0']
    done = CliRunner().invoke(cli.main, ['data', 'simulate', str(tmp_path/'new'), '--preset', 'quick', *few])
    assert done.exit_code == 0, done.output
    file, = (tmp_path/'new').glob('*/data_train.hdf5')
    with h5py.File(file) as f: assert len(f) == preset('quick').simulate.train == 40
    check = ['data', 'check', str(tmp_path/'new'), '--set', 'data.sessions=[t15.1999.01.01]']
    done = CliRunner().invoke(cli.main, check)
    assert done.exit_code == 1 and 'no such folder' in done.output
    done = CliRunner().invoke(cli.main, check[:3])
    assert done.exit_code == 0 and '1 session, no problems' in done.output


@pytest.mark.parametrize('line, end', [
    ('run --preset zipformer', 'did you mean zipformer-small or zipformer-streaming?'),
    ('run --force trian', 'did you mean train?'),
    ('run --accelerator gpu', 'did you mean cuda?'),
    ('run --set train.accelerator=gpu', 'did you mean cuda?'),
    ('run --set model.name=zip', 'did you mean zipformer?'),
    ('run --set trian.lr_max=1', 'did you mean train.lr_max?'),
    ('run --set learning_rte=1', '`b2t keys` lists them all'),
    ('run --set lr_max=0.1 --set train.lr_max=0.2', 'train.lr_max is given as 0.1 and as 0.2; leave one of them out'),
    ('sim', 'did you mean simulate?'),
    ('lm imprt', 'did you mean import?'),
    ('kaggle kernal', 'did you mean kernel?'),
    ('run --from frist --name new', 'did you mean first?'),
    ('compare fir first', 'did you mean first?'),
    ('ensemble fir --name new', 'did you mean first?'),
    ('lm get librispeech', '4gram?'),
])
def test_errors_suggest_the_intended_name(line, end, call):
    status, told, record = call(line)
    assert status in (1, 2) and told.endswith(f'{end}\n') and not record, told


def test_a_variant_that_cannot_start_leaves_no_files(call):
    line = 'run --from first --name new --llm'
    status, told, record = call(f'{line} nothing.gguf')
    assert status == 1 and told.endswith('nothing.gguf: there is no such file\n') and not record, told
    assert sorted(p.name for p in Path('submissions').iterdir()) == ['first']
    assert call('lm --from first --name new --set rescore.llm=nothing.gguf')[0] == 0 # The stage `lm` needs no LLM
    assert Path('submissions/new/config.yaml').exists()
    line = 'sweep --from first --name swept --set rescore.llm=nothing.gguf --set train.lr_max=1e-4:1e-2:log'
    assert call(line)[0] == 0 # Its trials end after training


@pytest.mark.parametrize('verb', ['run', 'train', 'infer'])
def test_a_line_of_the_tensorflow_port(verb, call):
    line = '--config_path config.yaml --batch_size 32 --output_dir trained/mine --disable_mixed_precision'
    status, told, record = call(f'{verb} {line} --model-path lists.jsonl' + ' --num_batches 9'*(verb != 'infer'))
    assert status == 0, told
    (name, ((folder, _, values, _), *_), _), = record
    batches = values['data']['eval_batch_size' if verb == 'infer' else 'batch_size']
    assert (Path(folder).name, values['train']['precision'], batches) == ('mine', 'float32', 32)
    used = values['train']['init_checkpoint_path'] if verb == 'train' else values['infer']['checkpoint']
    assert Path(used).name == 'lists.jsonl' and values['simulate']['seed'] == 3


def test_a_line_of_the_official_language_model(call):
    line = ('serve --name first --lm_path lists.jsonl --do_opt --nbest 50 --acoustic_scale 0.325 --blank_penalty 90 '
            '--alpha 0.55 --redis_ip there --gpu_number 0')
    record = call(line)[2]
    values, given = next((run[2], given) for name, (run, *_), given in record if name == 'serve.run_stages')
    assert given['CUDA_VISIBLE_DEVICES'] == '0' and record[0][:2] == ('serve.check_redis', ["'there'", '6379'])
    assert Path(values['lm']['path']).name == 'lists.jsonl' and values['rescore']['llm'] == 'facebook/opt-6.7b'
    assert (values['decode']['acoustic_scale'], values['decode']['blank_penalty']) == (0.325, 90)


def test_official_keys_without_effect_are_named(call, tmp_path):
    path = tmp_path/'start.yaml'
    path.write_text('gpu_number: "1"\nsave_all_val_steps: true\nsave_val_data: false\n'
                    'dataset: {data_transforms: {}}\n')
    _, told, record = call(f'train --config_path {path} --data sessions')
    assert f'{path}: keys without effect here: gpu_number, save_all_val_steps\n' in told and record


@pytest.mark.parametrize('spelling', ['triple-gru', 'triple_gru'])
def test_a_preset_as_help_spells_it(call, spelling):
    assert call(f'train --preset {spelling} --data sessions')[0] == 0


def test_names_of_runs(call):
    for name in ('.', '..', '/', '../x', 'a/../../y', '/tmp/x', 'a\tb', 'x'*256):
        status, told, record = call(['submit', '--name', name])
        assert status == 2 and not record and 'expected the name of a folder' in told, told
    for folder in ('/', '..', 'here/..'):
        record = call(['submit', '--output-dir', folder])[2]
        assert all('..' not in Path(run[0]).parts for _, (run, *_), _ in record), record


def test_verbs_that_read_refuse_unknown_runs(call):
    for line in ('report --name frist', 'serve --name frist', 'report --output-dir submissions/frist'):
        status, told, record = call(line)
        assert status == 2 and told.endswith('there is no such run; did you mean first?\n') and not record, told
    assert call('report --name first')[2] and call('report --name new --preset quick')[2]


def test_settings_are_not_dropped_silently(call):
    status, told, record = call('run --name first --preset demo')
    assert status == 2 and 'drop settings of first: decode.beam=9; add --reset' in told and not record, told
    assert '--config would drop' in call('run --name first --config config.yaml')[1]
    for rest in '--reset', '--set beam=9': assert call(f'run --name first --preset demo {rest}')[0] == 0


def imported(line, folder):
    "Modules that a command line imports in a separate process."
    code = 'import runpy, sys\ntry: runpy.run_module("b2t_kaggle.cli", run_name="__main__")\n'
    code += 'except SystemExit as e: print(e.code, *sys.modules, file=sys.stderr)'
    done = subprocess.run([sys.executable, '-c', code, *line.split()], capture_output=True, text=True, cwd=folder)
    code, *modules = done.stderr.split()
    assert code == '0' and done.stdout, done.stderr
    return set(modules)


@pytest.mark.skipif(not Path('/dev/full').exists(), reason='no /dev/full here')
@pytest.mark.parametrize('line', ['--help', 'keys lr_max', 'data --help'])
def test_a_stream_that_cannot_be_written_is_named(line):
    command = [sys.executable, '-m', 'b2t_kaggle.cli', *line.split()]
    with open('/dev/full', 'w') as full: done = subprocess.run(command, stdout=full, stderr=-1, text=True)
    assert (done.returncode, done.stderr) == (1, 'Error: <stdout>: No space left on device\n')


def test_help_imports_few_modules(tmp_path):
    modules = imported('--help', tmp_path)
    assert {m.split('.')[0] for m in modules} & {'numpy', 'pandas', 'pydantic', 'numba', 'torch', 'yaml'} == set()
    assert {m for m in modules if m.startswith('b2t_kaggle')} == {f'b2t_kaggle{m}' for m in (
        '', '.cli', '.cli.command', '.core', '.core.files', '.core.messages', '.devices',
        '.devices.interrupts')}


@pytest.mark.parametrize('line, other', [('keys lr_max', 'pandas numba'), ('runs', 'pandas numba'),
                                         ('lm get --help', ''), ('train --help', '')])
def test_a_verb_imports_what_it_uses(line, other, tmp_path):
    heavy = {'torch', 'tensorflow', 'transformers', 'redis', 'optuna', *other.split()}
    assert {m.split('.')[0] for m in imported(line, tmp_path)} & heavy == set()


def test_help_of_a_verb_begins_with_its_short_line():
    told = CliRunner().invoke(cli.main, ['--help']).output
    assert len(SECTIONS) == 5 and '...' not in told.partition('To start:')[2]
    for verb, (_, line) in {v: entry for verbs in SECTIONS.values() for v, entry in verbs.items()}.items():
        assert f'  {verb} ' in told and f' {line}\n' in told and len(line) <= 55
        assert VERBS[verb].get_short_help_str(200).rstrip('.') == line
    assert sorted(SECTIONS['Stages of a run']) == sorted(STAGES)
    for name, (_, line) in SECTIONS['Stages of a run'].items():
        if name not in ('ensemble', 'lm'): assert line[1:] == STAGES[name].does[1:]


@pytest.mark.parametrize('group', ['audio', 'data', 'kaggle', 'lm'])
def test_help_of_a_group_does_not_cut_lines(group, monkeypatch):
    monkeypatch.setenv('COLUMNS', '80')
    told = CliRunner().invoke(cli.main, [group, '--help']).output
    lines = told.rpartition(':\n')[2].splitlines()
    assert len(lines) == len(VERBS[group].list_commands(None)) and not [line for line in lines if line.endswith('...')]


def test_options_of_all_stages_follow_the_verbs_own():
    shared = {p.name for p in VERBS['pack'].params}
    for verb, command in VERBS.items():
        told = CliRunner().invoke(cli.main, [*verb.split(), '--help']).output
        parts = told.partition('\nOptions of every stage:\n')
        own = {p.name for p in command.params if isinstance(p, StageOption)}
        assert own in (set(), shared) and told.count('Options of every stage') == bool(own), verb
        for p in options(verb): assert max(p.opts, key=len) in parts[2 if p.name in own else 0], (verb, p.name)
