"""Whole cycles with Kaggle's own client against a local server, with every kind of fault. The client connects to the
address in `http_proxy` if it is configured for a local Kaggle."""
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from kaggle_server import BATCHES, CSV, DROP, HALF, LATE, SUBMISSION, Kaggle, output_of, serve

from b2t_kaggle.cli.command import main
from b2t_kaggle.core.files import replaced_folder, write_whole
from b2t_kaggle.devices.interrupts import Ended
from b2t_kaggle.kaggle import cycle

api = pytest.importorskip('kaggle.api.kaggle_api_extended',
                          reason="needs Kaggle's client: pip install b2t_kaggle[kaggle]")
NBS = Path(__file__).parents[1]/'nbs'
LINE = ('go', '--accelerator', 'T4 x2', '--lm', 'none', '--submit')
NAME = 'ada/b2t-transformer-t4-x2'
FOLDER = 'kaggle-b2t-transformer-t4-x2'
LLM = 'qwen-lm/qwen-3/transformers/0.6b/1'
PARTS = [f'{NAME}-train-1', f'{NAME}-train-2', f'{NAME}-submit']


def write_wheels(image, folder, *packages):
    with replaced_folder(folder) as new:
        new.mkdir()
        for name in ('manifest.json', 'b2t_kaggle-0.1.0-py3-none-any.whl', 'jiwer-4-py3-none-any.whl'):
            (new/name).write_text(name)
    return dict(wheels=[], install='pip')


@pytest.fixture
def kaggle():
    kaggle = Kaggle()
    server = serve(kaggle)
    kaggle.port = server.server_port
    yield kaggle
    server.shutdown()
    server.server_close()


@pytest.fixture
def b2t(kaggle, tmp_path, monkeypatch):
    "Run `b2t kaggle …` as a user of this server, without waiting; returns its exit status and output."
    monkeypatch.chdir(tmp_path)
    variables = {'http_proxy': f'http://127.0.0.1:{kaggle.port}', 'no_proxy': '', 'NO_PROXY': '',
                 'KAGGLE_USERNAME': 'ada', 'KAGGLE_KEY': 'key', 'HOME': str(tmp_path), 'TMPDIR': str(tmp_path)}
    for name, value in variables.items(): monkeypatch.setenv(name, value)
    monkeypatch.delenv('KAGGLE_API_TOKEN', raising=False)
    monkeypatch.setattr(api.KaggleApi, 'args', ['--local'])
    monkeypatch.setattr(cycle, 'build_wheels', write_wheels)
    monkeypatch.setattr(cycle, 'POLL', 0.01)
    monkeypatch.setattr('time.sleep', lambda seconds: None)
    def run(*args):
        result = CliRunner().invoke(main, ['kaggle', *map(str, args)])
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
        return result.exit_code, result.output
    return run


def assert_complete(kaggle, parts=PARTS):
    "Check that each object was made once, with the right inputs."
    assert {name: len(versions) for name, versions in kaggle.kernels.items()} == dict.fromkeys(parts, 1)
    (wheels, versions), = kaggle.datasets.items()
    assert wheels.startswith('ada/b2t-wheels-gpu-') and len(versions[-1]) >= 3
    bodies = [kaggle.kernels[name][0]['body'] for name in parts]
    assert [body.get('kernelDataSources', []) for body in bodies] == [[], *([part] for part in parts[:-1])]
    assert all(body['datasetDataSources'] == [wheels] for body in bodies)
    assert [(s['content'], s['fileName']) for s in kaggle.submissions] == [(CSV, 'submission.csv')]


def test_a_cycle(kaggle, b2t, tmp_path):
    status, output = b2t(*LINE)
    assert status == 0, output
    assert_complete(kaggle)
    assert kaggle.kernels[PARTS[1]][0]['steps'] == BATCHES
    for line in ('queued, until Kaggle has a machine', 'continues after batch 60,000', '    train: 100%', 'is valid'):
        assert line in output, output
    body = kaggle.kernels[PARTS[0]][0]['body']
    assert (body['machineShape'], body['enableInternet'], body['competitionDataSources']) == (
        'NvidiaTeslaT4', False, ['brain-to-text-25'])
    assert (tmp_path/FOLDER/'output'/'b2t-transformer-t4-x2-submit'/'submission.csv').is_file()
    n = len(kaggle.asked)
    assert b2t(*LINE)[0] == 0
    assert not {'SaveKernel', 'CreateDataset', 'upload', 'file', 'CreateSubmission'} & set(kaggle.names()[n:])
    status, output = b2t('status')
    assert status == 0 and 'public score 0.0612' in output and '30.0 hours of GPU are left' in output
    assert output.count('done  ') == 13 and 'next' not in output


def write_ngram(name, folder, progress):
    for end in ('.arpa.gz', '.arpa.gz.licence.json'): write_whole(folder/f'{name}{end}', name)


def submission_of(*sentences):
    "An output with these sentences, also in its n-best lists."
    csv = 'id,text\n' + ''.join(f'{i},{text}\n' for i, text in enumerate(sentences))
    entries = (dict(trial=str(i), session='t15.2023.08.13', block=1, text=text, system='run', rank=0)
               for i, text in enumerate(sentences))
    return SUBMISSION | {'submission.csv': csv, 'run/submission.csv': csv,
                         'run/config.yaml': 'data:\n  dataset_dir: /kaggle/input\n',
                         'run/hypotheses/decode_test.jsonl': ''.join(json.dumps(e) + '\n' for e in entries)}


def given_lines(text):
    "Commands in a text, with continuation lines joined."
    return [shlex.split(line) for line in text.replace('\\\n', ' ').splitlines() if re.match(' *(b2t|kaggle) ', line)]


def test_the_commands_of_a_week(kaggle, b2t, tmp_path, monkeypatch):
    "Each command of the guide, one after another; the other guides' commands are among them."
    from kaggle.cli import main as client
    monkeypatch.setattr(cycle, 'get_model', write_ngram)
    def commands(guide):
        cells = json.loads((NBS/'guides'/guide).read_text())['cells']
        blocks = re.findall('```sh\n(.*?)```', ''.join(''.join(c['source']) + '\n' for c in cells), re.DOTALL)
        return given_lines('\n'.join(blocks).replace('OWNER', 'ada'))

    kaggle.steps_of_a_part = BATCHES
    kaggle.models.add('qwen-lm/qwen-3')
    (tmp_path/'theirs.csv').write_text('id,text\n0,Hello there\n1,Where are you\n')
    for seed in range(1, 11): # Their vote is "how are you"
        middle = '' if seed == 1 else f'-{seed}'
        for name in ('transformer', 'best-t4'):
            files = submission_of('hello there', 'how are you' if seed % 2 else f'number {"x"*seed}')
            kaggle.files |= {f'ada/b2t-{name}-t4-x2{middle}-submit{end}': files for end in ('', '-llm')}
    kaggle.files['ada/b2t-best-tpu-tpu-v5e-8-submit'] = submission_of('hello there', 'how are you')
    week = commands('a_week_on_kaggle.ipynb')
    for command, verb, *rest in week:
        rest = [str(p) for word in rest for p in (sorted(Path().glob(word)) if '*' in word else [word])]
        if command == 'kaggle':
            monkeypatch.setattr(sys, 'argv', [command, verb, *rest])
            client()
        elif verb == 'kaggle':
            status, output = b2t(*rest)
            assert status == 0, (rest, output)
        else:
            result = CliRunner().invoke(main, [verb, *rest])
            assert result.exit_code == 0, (rest, result.output)
    assert {tuple(words) for words in commands('kaggle_gpu.ipynb') if words[2] == 'go'} <= set(map(tuple, week))
    assert kaggle.kernels['ada/b2t-best-tpu-tpu-v5e-8-train-1'][0]['body']['machineShape'] == 'TpuV5E8'
    page = (NBS/'guides'/'a_week_on_kaggle.ipynb').read_text()
    assert all(x in page for text in cycle.RECIPES.values() for x in re.findall(r'[\d.]+ %|[\d.]+ to [\d.]+', text))
    lms = [name for name in kaggle.datasets if 'wheels' not in name]
    assert lms == ['ada/b2t-imagineville-small']
    assert all(lms[0] in v[0]['body']['datasetDataSources'] for name, v in kaggle.kernels.items() if '-submit' in name)
    assert all(len(versions) == 1 for versions in kaggle.kernels.values())
    assert kaggle.submissions[-1]['content'].endswith('1,how are you\n')
    body = kaggle.kernels['ada/b2t-best-t4-t4-x2-4-train-1'][0]['body']
    assert '"train.seed": 13' in body['text'].replace('\\', '')


def ranked(**stamp): return SUBMISSION | {'run/stages/rescore.json': json.dumps(dict(key='k') | stamp)}


def test_the_sentences_of_the_n_gram_are_sent_if_the_llm_fails(kaggle, b2t):
    kaggle.models.add('qwen-lm/qwen-3')
    kaggle.files[f'{NAME}-submit-llm'] = ranked(metrics=dict(failed='no memory'), finished=False)
    status, output = b2t(*LINE, '--llm', LLM)
    assert status == 0 and 'The LLM failed (no memory): the sentences of the n-gram are sent' in output, output
    assert len(kaggle.submissions) == 1 and f'{NAME}-submit-llm-2' not in kaggle.kernels
    assert kaggle.submissions[0]['description'].endswith(', without the LLM, which failed')
    kaggle.files[f'{NAME}-submit-llm'] = SUBMISSION
    smaller = LLM.replace('0.6b', '0.1b')
    for _ in range(2): assert b2t(*LINE, '--llm', smaller, '--retry')[0] == 0
    bodies = [version['body'] for version in kaggle.kernels[f'{NAME}-submit-llm']]
    assert [body['modelDataSources'] for body in bodies] == [[LLM], [smaller]] and len(kaggle.kernels[PARTS[0]]) == 1
    assert not kaggle.submissions[1]['description'].endswith('which failed') and len(kaggle.submissions) == 2


def test_an_llm_that_needs_several_runtimes(kaggle, b2t):
    "Parts follow until all sentences are ranked; a part without progress is an error."
    kaggle.models.add('qwen-lm/qwen-3')
    first, second = f'{NAME}-submit-llm', f'{NAME}-submit-llm-2'
    kaggle.files[first] = kaggle.files[second] = ranked(metrics=dict(not_rescored=900), finished=False)
    line = (*LINE, '--llm', LLM)
    status, output = b2t(*line)
    assert status == 1 and 'got no further than the previous part' in output and not kaggle.submissions, output
    kaggle.files[second] = ranked(metrics={}, finished=True)
    assert b2t(*line, '--retry')[0] == 0
    assert kaggle.kernels[second][-1]['body']['kernelDataSources'] == [PARTS[1], first]
    assert len(kaggle.submissions) == len(kaggle.kernels[first]) == 1


def test_an_image_with_another_python(kaggle, b2t):
    "The log names its version, so wheels are made for it, and the notebook is pushed again with them."
    kaggle.fate[PARTS[0]] = ['RUNNING', 'ERROR']
    kaggle.log = '- rapidfuzz: not installed. Attach a dataset with wheels for Python 3.13 (`b2t kaggle wheels …`)\n'
    def mend(name, n):
        if name == 'SaveKernel' and n == 2: kaggle.fate.clear()
    kaggle.fault = mend
    status, output = b2t(*LINE)
    assert status == 0 and 'The image has Python 3.13: making wheels for it' in output, output
    old, new = kaggle.datasets
    bodies = [version['body'] for name in PARTS for version in kaggle.kernels[name]]
    assert [body['datasetDataSources'] for body in bodies] == [[old], [new], [new], [new]]


@pytest.mark.parametrize('fault', [DROP, LATE, HALF, (503, b'<html>'), (500, 'Internal error'), (429, 'Too many')])
def test_a_temporary_fault_makes_no_difference(fault, kaggle, b2t):
    "Each kind of request fails once."
    kaggle.fault = lambda name, n: fault if n == 1 else None
    status, output = b2t(*LINE)
    assert status == 0, output
    assert_complete(kaggle)


def test_a_page_in_place_of_an_answer(kaggle, b2t):
    "A proxy's or maintenance page with status 200; the same request is tried again."
    is_file = ('file', 'log', 'upload').__contains__
    kaggle.fault = lambda name, n: (200, b'<html>') if n == 1 and not is_file(name) else None
    status, output = b2t(*LINE)
    assert status == 0 and 'Kaggle does not answer (Expecting value' in output, output
    assert_complete(kaggle)


TOKEN = 'make a new one at https://www.kaggle.com/settings'
QUOTA = {'error': 'Maximum weekly GPU quota of 30.00 hours reached.'}


@pytest.mark.parametrize('request_, fault, message', [
    ('GetCompetition', (401, 'Unauthenticated'), TOKEN),
    ('GetKernelSessionStatus', (401, 'Unauthenticated'), TOKEN),   # The client blames the slug
    ('ListSubmissions', (401, 'Unauthenticated'), TOKEN),
    ('CreateDataset', (403, 'The user is blocked'), 'The user is blocked'),
    ('SaveKernel', QUOTA, 'The hours of a week are used up'),
    ('SaveKernel', (429, 'You are over your quota'), 'The hours of a week are used up'),
    ('SaveKernel', (400, 'Phone verification is needed'), 'Phone verification is needed'),
    ('GetKernelSessionStatus', (503, b'<html>'), 'Run the same command again later'),
    ('file', (403, b'<Error>expired</Error>'), 'Run the same command again later'),
    ('file', HALF, 'Run the same command again later'),
    ('StartSubmissionUpload', (403, 'Accept the rules'), 'Accept the rules'),
])
def test_a_permanent_fault_is_reported_and_the_same_command_continues(request_, fault, message, kaggle, b2t):
    kaggle.fault = lambda name, n: fault if name == request_ else None
    status, output = b2t(*LINE)
    assert status == 1 and message in output, output
    kaggle.fault = lambda name, n: None
    assert b2t(*LINE)[0] == 0
    assert_complete(kaggle)


def test_the_quota(kaggle, b2t):
    "Too few hours count as none; otherwise the remaining hours are used."
    kaggle.hours_used['gpu'] = 29.5
    status, output = b2t(*LINE)
    assert status == 1 and '0.5 hours of GPU are left this week; the quota is renewed 28 November' in output
    assert not kaggle.kernels
    kaggle.hours_used['gpu'] = 25
    assert b2t(*LINE)[0] == 0
    assert '"hours = 4.83' in json.dumps(kaggle.kernels[PARTS[0]][0]['body']['text']).replace('\\n', '"')


def test_other_notebooks_run(kaggle, b2t):
    "The command waits for them."
    busy = {'error': 'Maximum batch GPU session count of 2 reached.'}
    kaggle.fault = lambda name, n: busy if name == 'SaveKernel' and n < 4 else None
    status, output = b2t(*LINE)
    assert status == 0 and output.count('Other notebooks of yours are running; trying again') == 3
    assert_complete(kaggle)


@pytest.mark.parametrize('end, word', [('ERROR', 'failed'), ('CANCEL_ACKNOWLEDGED', 'cancelled')])
def test_a_notebook_that_does_not_end_well(end, word, kaggle, b2t):
    "The command shows the end of its log, and with --retry pushes it again."
    name = PARTS[1]
    kaggle.fate[name] = ['QUEUED', 'RUNNING', 'RUNNING', end]
    for _ in range(2):
        status, output = b2t(*LINE)
        assert status == 1 and f'{name}: {word}. The end of its log' in output and '    train: 100%' in output, output
        assert '--retry pushes it again' in output and len(kaggle.kernels[name]) == 1
    told = b2t('status')[1]
    assert f'next  run {name}' in told
    assert '\n            train: 100%\n' in told and 'The same command with --retry' in told, told
    del kaggle.fate[name]
    assert b2t(*LINE, '--retry')[0] == 0
    assert len(kaggle.kernels[name]) == 2 and len(kaggle.kernels[PARTS[0]]) == 1
    assert len(kaggle.submissions) == 1


def test_a_notebook_that_was_stopped_before_it_began(kaggle, b2t):
    "The missing log does not hide the error."
    kaggle.fate[PARTS[0]] = ['QUEUED', 'CANCEL_ACKNOWLEDGED']
    kaggle.fault = lambda name, n: (404, 'Not Found') if name == 'log' else None
    status, output = b2t(*LINE)
    assert status == 1 and f'{PARTS[0]}: cancelled. The end of its log:' in output and '(it has no log)' in output


BROKEN = SUBMISSION | {'submission.csv': CSV[:-4]}
SHORT = SUBMISSION | dict.fromkeys(['submission.csv', 'run/submission.csv'], CSV[:CSV.rfind('1,')])


@pytest.mark.parametrize('name, files, message', [
    (PARTS[0], {}, 'has no config.yaml'),
    (PARTS[0], {'run/config.yaml': 'data:'}, 'train.json is missing or incomplete'),
    (PARTS[0], {**output_of(1), 'run/stages/train.json': '{"key": "k", "met'}, 'train.json is missing or incomplete'),
    (PARTS[0], {k: v for k, v in output_of(1).items() if 'best' not in k}, 'has no model'),
    (PARTS[0], output_of(1) | {'run/config.yaml': 'data:\n  dataset_dir: null\n'}, 'was trained on a simulation'),
    (PARTS[1], output_of(60_000), 'has 60,000 batches, no more than the previous part'),
    (PARTS[2], {k: v for k, v in SUBMISSION.items() if 'json' not in k}, 'submit.json is missing'),
    (PARTS[2], BROKEN, "differs from the run's"),
    (PARTS[2], SHORT, 'found 1 rows, expected 2'),
    (PARTS[2], {k: v for k, v in SUBMISSION.items() if k != 'run/submission.csv'}, "differs from the run's"),
])
def test_an_incomplete_output(name, files, message, kaggle, b2t):
    "An incomplete output is not used, and the notebook has to run again."
    kaggle.files[name] = files or {'__notebook__.ipynb': '{}'}
    status, output = b2t(*LINE)
    assert status == 1 and message in output and '--retry to run' in output, output
    assert name == PARTS[2] or PARTS[2] not in kaggle.kernels
    assert not kaggle.submissions
    assert b2t(*LINE)[0] == 1 and len(kaggle.kernels[name]) == 1
    del kaggle.files[name]
    assert b2t(*LINE, '--retry')[0] == 0
    assert len(kaggle.kernels[name]) == 2 and [s['content'] for s in kaggle.submissions] == [CSV]


def test_hours_end_the_training(kaggle, b2t):
    "The model is submitted only with --unfinished, and the submission's description says so."
    kaggle.steps_of_a_part = 1000
    for _ in range(2):
        status, output = b2t(*LINE, '--hours', 12)
        assert status == 1 and 'the training is unfinished after 2,000 batches' in output, output
        assert '--hours 27 (all parts together) adds a part; --unfinished' in output
        assert list(kaggle.kernels) == PARTS[:2]
    assert 'next  finish the training' in b2t('status')[1]
    assert b2t(*LINE, '--hours', 12, '--unfinished')[0] == 0
    assert list(kaggle.kernels) == PARTS
    sent, = kaggle.submissions
    assert sent['description'].endswith(', unfinished training (2,000 batches)')
    assert kaggle.kernels[PARTS[2]][0]['body']['kernelDataSources'] == [PARTS[1]]


def test_an_upload_that_failed(kaggle, b2t):
    "The client makes a dataset without the files, so a new version is pushed."
    kaggle.fault = lambda name, n: (403, 'no') if name == 'upload' and n <= 3 else None
    assert b2t(*LINE)[0] == 0
    (_, versions), = kaggle.datasets.items()
    assert [len(files) for files in versions] == [0, 3]


def test_a_dataset_that_cannot_be_processed(kaggle, b2t):
    "The error says so, and the same command pushes it again."
    kaggle.dataset_status = 'FAILED'
    status, output = b2t(*LINE)
    assert status == 1 and 'Kaggle could not process its files' in output and not kaggle.kernels, output
    kaggle.dataset_status = 'READY'
    assert b2t(*LINE)[0] == 0
    assert_complete(kaggle)


def test_a_state_that_the_client_does_not_know(kaggle, b2t):
    "The command shows it and waits."
    kaggle.fate[PARTS[0]] = ['QUEUED', 'PAUSED', 'PAUSED', 'RUNNING', 'COMPLETE']
    status, output = b2t(*LINE)
    assert status == 0 and output.count('in the state PAUSED, which this client does not know') == 1, output
    assert_complete(kaggle)


def test_a_state_of_a_dataset_that_the_client_does_not_know(kaggle, b2t):
    def ready(name, n):
        if name == 'SaveKernel': kaggle.dataset_status = 'READY'
        if name == 'GetDatasetStatus' and n == 3: kaggle.dataset_status = 'READY'
    kaggle.fault = ready
    kaggle.dataset_status = 'SCANNING'
    status, output = b2t(*LINE)
    assert status == 0, output
    assert_complete(kaggle)


def test_a_notebook_that_is_run_again_while_its_output_is_fetched(kaggle, b2t, tmp_path):
    "Files of the two versions are not mixed."
    name, files = PARTS[0], output_of(60_000)
    def run_again(request, n):
        if request == 'file' and n == 2:
            version = kaggle.kernels[name][-1]
            kaggle.kernels[name].append(version | dict(files=files | {'run/train/best.pt': 'again '*1000, 'new': 'x'},
                                                       states=iter(['QUEUED', 'RUNNING', 'COMPLETE'])))
    kaggle.fault = run_again
    status, output = b2t(*LINE)
    assert status == 0 and 'the notebook was run again meanwhile; trying again' in output, output
    fetched = tmp_path/FOLDER/'output'/name.partition('/')[2]
    assert (fetched/'new').exists() and (fetched/'run'/'train'/'best.pt').read_text().startswith('again')
    assert not list(fetched.parent.glob('*.part'))


def test_an_unanswered_request_does_not_discard_an_output(kaggle, b2t):
    kaggle.fault = lambda name, n: (503, 'busy') if name == 'GetKernel' and n == 2 else None
    status, output = b2t(*LINE)
    assert status == 0 and 'run again' not in output, output
    n_files = sum(len(version['files']) for versions in kaggle.kernels.values() for version in versions)
    assert kaggle.names().count('file') == n_files


def test_a_csv_that_kaggle_refuses_after_the_upload(kaggle, b2t):
    "The error has Kaggle's reason. A corrected CSV is always sent, the same one only with --retry."
    kaggle.refusal = 'Expected 1450 rows\x1b[2J'
    for _ in range(2):
        status, output = b2t(*LINE)
        assert status == 1 and 'Kaggle refuses it (error: Expected 1450 rows; public score none' in output, output
        assert len(kaggle.submissions) == 1
    assert 'error: Expected 1450 rows' in b2t('status')[1]
    kaggle.refusal = ''
    assert b2t(*LINE, '--retry')[0] == 0
    assert [s['status'] for s in kaggle.submissions] == ['ERROR', 'COMPLETE']


def test_text_of_kaggle_cannot_control_the_terminal(kaggle, b2t):
    "Logs, comments and errors have no control characters."
    name, steer = PARTS[0], '\x1b]0;title\x07\x9b2J\x08\x1bc'
    kaggle.fate[name] = ['QUEUED', 'RUNNING', 'ERROR']
    kaggle.comment, kaggle.log = f'stopped{steer}', f'one{steer}\n'
    status, output = b2t(*LINE)
    assert status == 1 and '    one\n' in output and f'{name}: failed (stopped)' in output, output
    kaggle.fault = lambda name, n: (400, f'refused{steer}') if name == 'GetKernelSessionStatus' else None
    output += b2t(*LINE)[1]
    assert 'refused' in output and not [c for c in output if not (c.isprintable() or c in '\r\n')], output


def test_a_missing_dataset(kaggle, b2t):
    "Kaggle would decode without it, and the CSV would be valid."
    line = (*LINE, '--lm', 'ada/my-lm', '--llm', LLM)
    for _ in range(2):
        status, output = b2t(*line)
        assert status == 1 and 'dataset ada/my-lm: Not Found. The submission needs it' in output and not kaggle.kernels
    kaggle.datasets['ada/my-lm'] = [{'lm.arpa'}]
    status, output = b2t(*line)
    assert status == 1 and f'model {LLM}: Not Found. The submission needs it' in output and not kaggle.kernels, output
    status, output = b2t(*LINE, '--lm', 'ada/another', '--llm', LLM) # Until something is pushed, it may be another one
    assert status == 1 and 'dataset ada/another: Not Found' in output, output
    kaggle.models.add('qwen-lm/qwen-3')
    assert b2t(*line)[0] == 0
    body = kaggle.kernels[f'{NAME}-submit-llm'][0]['body']
    assert body['datasetDataSources'][1:] == ['ada/my-lm'] and body['modelDataSources'] == [LLM]


def test_other_values_in_a_cycle_that_has_begun(kaggle, b2t):
    """A cycle that began with other values, for example those of a trial run, is refused, and its notebooks are not
    pushed again."""
    assert b2t(*LINE, '--set', 'train.num_training_batches=2000')[0] == 0
    status, output = b2t(*LINE)
    assert status == 1 and "belongs to a cycle with overrides {'train.num_training_batches': '2000'}" in output, output
    assert 'use another --id' in output


def test_an_interrupted_command_says_that_the_notebook_continues(kaggle, b2t, monkeypatch):
    def interrupt(seconds):
        if PARTS[0] in kaggle.kernels: raise Ended(signal.SIGINT)
    monkeypatch.setattr('time.sleep', interrupt)
    status, output = b2t(*LINE)
    assert status == 130 and 'Pushed notebooks continue on Kaggle. Continue with:\n  ' in output, output


def test_users_without_permission(kaggle, b2t, monkeypatch):
    kaggle.has_joined = False
    status, output = b2t(*LINE)
    assert status == 1 and 'Accept the rules at https://www.kaggle.com/competitions/brain-to-text-25/rules' in output
    assert not kaggle.datasets and not kaggle.kernels
    monkeypatch.setenv('KAGGLE_API_TOKEN', 'expired')
    for name in ('KAGGLE_USERNAME', 'KAGGLE_KEY'): monkeypatch.delenv(name)
    kaggle.token_works = False
    status, output = b2t(*LINE)
    assert status == 1 and 'does not accept the token in KAGGLE_API_TOKEN, which may have expired' in output
    monkeypatch.delenv('KAGGLE_API_TOKEN')
    status, output = b2t(*LINE)
    assert status == 1 and 'Kaggle needs a token' in output
    for line in (LINE, ('status',)):
        monkeypatch.setitem(sys.modules, 'kaggle.api.kaggle_api_extended', None)
        status, output = b2t(*line)
        assert status == 1 and "pip install 'b2t_kaggle[kaggle]'" in output


DAMAGED = 'does not accept the token in {path}, which may have expired or be damaged: remove that'


@pytest.mark.parametrize('name, content, message', [
    ('access_token', b'KGAT_1\n2', 'does not accept the token in {path}, which may have expired'), # Two lines
    ('access_token', b'\xff', DAMAGED),
    ('kaggle.json', b'\xff', DAMAGED),
    ('kaggle.json', b'{"username": "ada", "ke', DAMAGED),
    ('kaggle.json', b'["ada"]', DAMAGED),
    ('kaggle.json', None, DAMAGED), # A folder
])
def test_a_damaged_token_is_named_and_not_shown(name, content, message, b2t, tmp_path, monkeypatch):
    monkeypatch.delenv('KAGGLE_KEY')
    path = tmp_path/'.kaggle'/name
    path.parent.mkdir()
    if content is None: path.mkdir()
    else: path.write_bytes(content)
    monkeypatch.setattr(api.KaggleApi, 'config', str(path.parent/'kaggle.json'))
    status, output = b2t(*LINE)
    assert status == 1 and message.format(path=path) in output and TOKEN in output and 'KGAT_1' not in output, output


def test_no_network_and_no_folder(b2t, tmp_path, monkeypatch):
    "Each error has a remedy."
    monkeypatch.setenv('http_proxy', 'http://127.0.0.1:9')
    monkeypatch.setenv('KAGGLE_API_TOKEN', 'token')
    status, output = b2t(*LINE)
    assert status == 1 and 'the owner of the token: Kaggle does not answer (' in output, output
    assert output.endswith('Run the same command again later\n'), output
    (tmp_path/'file').touch()
    done = subprocess.run([sys.executable, '-m', 'b2t_kaggle.cli', 'kaggle', *LINE], capture_output=True, text=True,
                          env=os.environ | {'HOME': str(tmp_path/'file'), 'PYTHONPATH': os.pathsep.join(sys.path)})
    assert done.returncode == 1 and 'set KAGGLE_CONFIG_DIR to another' in done.stderr, done.stderr


def test_another_cycle_does_not_replace_it(kaggle, b2t):
    assert b2t(*LINE)[0] == 0
    n = len(kaggle.asked)
    status, output = b2t(*LINE, '--preset', 'official', '--id', NAME)
    assert status == 1 and "belongs to a cycle with preset 'transformer', not 'official'" in output
    assert kaggle.names()[n:] == []


@pytest.mark.parametrize('n_parts', [1, 2])
def test_the_steps_by_hand_give_the_same_result(n_parts, kaggle, b2t, monkeypatch):
    "Each printed command is executed, with the client's commands by the client. Kaggle drops no input."
    from kaggle.cli import main as client
    kaggle.steps_of_a_part = BATCHES//n_parts
    status, output = b2t(*LINE, '--id', NAME, '--print', *(['--hours', 18] if n_parts == 2 else []))
    assert status == 0 and kaggle.asked == [], output
    monkeypatch.setattr('b2t_kaggle.cli.kaggle.build_wheels', lambda image, folder, *args: write_wheels(image, folder))
    monkeypatch.setenv('KAGGLE_API_ENVIRONMENT', 'LOCALHOST')
    given = given_lines(output)
    for command, verb, *rest in given:
        if command == 'b2t': assert b2t(*rest)[0] == 0
        else: monkeypatch.setattr(sys, 'argv', [command, verb, *rest])
        if command == 'kaggle': client()
        if rest[0] == 'status': kaggle.kernels[rest[1]][-1]['state'] = 'COMPLETE'
    parts = PARTS[:n_parts] + PARTS[-1:]
    assert_complete(kaggle, parts)
    assert f'models = [\\"{parts[-2]}\\"]' in kaggle.kernels[PARTS[-1]][0]['body']['text']


# A process that has imported everything. A fork of it executes each line of standard input, and is killed after
# the n-th answer from an address, or before its n-th write in the folder of the cycle
RUNNER = '''
import json, os, signal, sys
from pathlib import Path
import kaggle.cli, requests
from faults.stage_kills import _is_write
import b2t_kaggle.cli.kaggle
from test_kaggle_cycle import FOLDER, NAME, write_wheels
from b2t_kaggle.cli.command import main
from b2t_kaggle.config import preset
from b2t_kaggle.kaggle import cycle

b2t_kaggle.cli.kaggle.wheels_slug = lambda *args: 'b2t-wheels-gpu-1a2b3c4d'
cycle.build_wheels = write_wheels
cycle.POLL = 0.005
plan = cycle.Plan(NAME, 'T4 x2', 'transformer', 'ada/wheels') # What is compiled for it is there then
cycle.Cycle(plan, Path('warm'))._write_notebook(plan.training(1, 1))
preset('transformer')

def run(args, address, n):
    signal.alarm(120)
    send, count, writes = requests.Session.send, 0, 0
    def watch(event, args):
        nonlocal writes
        if not any(_is_write(event, args, folder) for folder in (FOLDER, os.path.abspath(FOLDER))): return
        writes += 1
        if address == '/write' and writes == n: os.kill(os.getpid(), 9)
        os.pwrite(note, str(writes).encode(), 0)
    def counted(self, request, **options):
        nonlocal count
        answer = send(self, request, **options)
        count += address in request.url
        if address in request.url and count == n: os.kill(os.getpid(), 9)
        return answer
    requests.Session.send = counted
    note = os.open('writes', os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    sys.addaudithook(watch)
    for i in (1, 2): os.dup2(os.open('output', os.O_WRONLY | os.O_CREAT | os.O_TRUNC), i)
    main(args)

for line in sys.stdin:
    pid = os.fork()
    if not pid: run(*json.loads(line))
    print('status', os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
'''


@pytest.fixture
def end(b2t):
    "Run the line in a separate process, which is killed at an event; returns its exit status."
    variables = os.environ | {'KAGGLE_API_ENVIRONMENT': 'LOCALHOST',
                              'PYTHONPATH': os.pathsep.join(filter(None, sys.path))}
    addresses = dict(log='/stream/', file='/files/', upload='/upload/')
    with subprocess.Popen([sys.executable, '-c', RUNNER], stdin=-1, stdout=-1, text=True, env=variables) as runner:
        def run(name='', n=0):
            runner.stdin.write(json.dumps([['kaggle', *LINE], addresses.get(name, f'/{name}'), n]) + '\n')
            runner.stdin.flush()
            while (words := runner.stdout.readline().split())[0] != 'status': pass # The client also prints
            return int(words[1])
        yield run
        runner.stdin.close()


def test_killed_after_an_answer_the_same_command_continues(kaggle, end, tmp_path):
    "After an answer of each kind, and after each push, the process is killed at once; the next one repeats no action."
    assert end() == 0
    counts = dict.fromkeys(kaggle.counts, 1) | {'SaveKernel': 3, 'upload': 3}
    assert len(counts) == 16
    for name, n in [(name, n) for name, most in counts.items() for n in range(1, most + 1)]:
        kaggle.forget()
        shutil.rmtree(tmp_path/FOLDER)
        assert end(name, n) == -9, (name, n)
        assert end() == 0, (name, n, (tmp_path/'output').read_text())
        assert_complete(kaggle)


def test_killed_before_a_write_the_same_command_leaves_the_same_bytes(kaggle, end, tmp_path, request):
    "Six writes in the folder of the cycle, or half of `--faults`."
    def content(): # papermill gives the parameters' cell a random id
        return {str(p.relative_to(tmp_path)): re.sub(rb'"id": "\w+"', b'', p.read_bytes())
                for p in (tmp_path/FOLDER).rglob('*') if p.is_file()}
    assert end() == 0
    expected, n_writes = content(), int((tmp_path/'writes').read_text())
    assert n_writes > 40
    n_tried = min(n_writes, request.config.getoption('--faults')//2)
    for n in sorted({1 + k*(n_writes - 1)//(n_tried - 1) for k in range(n_tried)}):
        kaggle.forget()
        shutil.rmtree(tmp_path/FOLDER)
        assert end('write', n) == -9, n
        assert end() == 0, (n, (tmp_path/'output').read_text())
        assert_complete(kaggle)
        assert content() == expected, n
