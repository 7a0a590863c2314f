"""Kaggle's own client pushes our files to a local server. The client connects to the address in `http_proxy` if it is
configured for a local Kaggle."""
import json
import re
import shlex
import subprocess
import sys
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from threading import Thread
from unittest.mock import patch

import pytest
from click.testing import CliRunner

from b2t_kaggle.cli.command import main

NBS = Path(__file__).parents[1]/'nbs'
api = pytest.importorskip('kaggle.api.kaggle_api_extended',
                          reason="needs Kaggle's client: pip install b2t_kaggle[kaggle]")


class Kaggle(BaseHTTPRequestHandler):
    "The requests that a push needs; they are recorded in `server.asked`."
    def answer(self):
        body = self.rfile.read(int(self.headers.get('Content-Length') or 0))
        name = self.path.rpartition('/')[2]
        self.server.asked.append((name, body if self.command == 'PUT' else json.loads(body or '{}')))
        status, answer = self.server.answers.get(name, (200, {}))
        text = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header('Content-Type', 'application/json')
        self.send_header('Content-Length', str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_POST = do_PUT = answer

    def do_GET(self):
        body = self.server.files[self.path.rpartition('/')[2]]
        self.send_response(200)
        self.send_header('Content-Length', str(len(body)))
        self.send_header('Last-Modified', 'Thu, 26 Nov 2026 12:00:00 GMT')
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args): pass


@pytest.fixture
def kaggle():
    server = ThreadingHTTPServer(('127.0.0.1', 0), Kaggle)
    server.asked = []
    server.answers = {
        'SaveKernel': (200, {'url': 'http://localhost/code/ada/b2t-train', 'versionNumber': 1}),
        'GetDatasetStatus': (404, {'code': 404, 'message': 'there is none'}),
        'StartBlobUpload': (200, {'token': 'the-token', 'createUrl': 'http://localhost/upload'}),
        'CreateDataset': (200, {'status': 'ok', 'url': 'http://localhost/datasets/ada/b2t-wheels'}),
        'CreateDatasetVersion': (200, {'status': 'ok', 'url': 'http://localhost/datasets/ada/b2t-wheels'}),
    }
    Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def b2t(kaggle, tmp_path, monkeypatch):
    "Run `b2t kaggle …` as a user whose client is configured for this server; returns its exit status and output."
    variables = {'KAGGLE_API_ENVIRONMENT': 'LOCALHOST', 'http_proxy': f'http://127.0.0.1:{kaggle.server_port}',
                 'no_proxy': '', 'NO_PROXY': '', 'KAGGLE_USERNAME': 'ada', 'KAGGLE_KEY': 'key', 'HOME': str(tmp_path)}
    for name, value in variables.items(): monkeypatch.setenv(name, value)
    monkeypatch.delenv('KAGGLE_API_TOKEN', raising=False)
    monkeypatch.setattr(api.KaggleApi, 'args', ['--local'])
    def run(*args):
        result = CliRunner().invoke(main, ['kaggle', *map(str, args)])
        return result.exit_code, result.output
    return run


@pytest.fixture
def notebook(tmp_path):
    path = tmp_path/'b2t_train.ipynb'
    cells = [{'cell_type': 'code', 'source': ['import b2t_kaggle'], 'outputs': [], 'metadata': {}}]
    metadata = {'kaggle': {'dockerImageVersionId': 31041, 'accelerator': 'none'}}
    path.write_text(json.dumps({'cells': cells, 'metadata': metadata, 'nbformat': 4, 'nbformat_minor': 5}))
    return path


def test_a_notebook_for_the_tpu(kaggle, b2t, notebook, tmp_path):
    "The notebook's owner is the client's user, and its slug is made from its name."
    status, output = b2t('kernel', notebook, '--accelerator', 'TPU v5e-8', '--competition', 'brain-to-text-25',
                         '--dataset', 'ada/b2t-wheels', '--kernel', 'ada/b2t-train', '-o', tmp_path/'push')
    assert status == 0, output
    (name, request), = kaggle.asked
    assert name == 'SaveKernel' and 'title does not resolve' not in output
    assert request['slug'] == 'ada/b2t-train' and request['newTitle'] == 'b2t train'
    assert (request['machineShape'], request['enableTpu'], request['enableGpu']) == ('TpuV5E8', True, False)
    assert (request['enableInternet'], request['isPrivate']) == (False, True)
    assert request['competitionDataSources'] == ['brain-to-text-25']
    assert request['datasetDataSources'] == ['ada/b2t-wheels']
    assert request['kernelDataSources'] == ['ada/b2t-train']
    assert not [key for key in request if 'docker' in key.lower()] and 'dockerImage' not in request['text']
    assert json.loads(request['text'])['cells'][0]['source'] == 'import b2t_kaggle'
    assert 'http://localhost/code/ada/b2t-train' in output


def test_a_refusal_is_an_error(kaggle, b2t, notebook, tmp_path):
    "The client exits with status 0 even if Kaggle refuses the request."
    kaggle.answers['SaveKernel'] = (200, {'error': 'Maximum weekly GPU quota of 30.00 hours reached.'})
    status, output = b2t('kernel', notebook, '--id', 'ada/other', '--accelerator', 'T4 x2', '--internet', '-o',
                         tmp_path/'push')
    assert status == 1 and 'Error: push of push' in output and 'Maximum weekly GPU quota' in output
    request = kaggle.asked[-1][1]
    assert (request['machineShape'], request['enableInternet']) == ('NvidiaTeslaT4', True)


def test_a_dataset_with_a_subfolder_and_a_new_version_of_it(kaggle, b2t, tmp_path):
    folder = tmp_path/'wheels'
    (folder/'models').mkdir(parents=True)
    (folder/'models'/'lm.arpa').write_text('ngram 1=2')
    (folder/'kit.whl').write_bytes(b'wheel')
    status, output = b2t('dataset', folder, '--id', 'ada/b2t-wheels')
    assert status == 0 and 'Pushed: http://localhost/datasets/ada/b2t-wheels' in output, output
    uploads = [body for name, body in kaggle.asked if name == 'upload']
    archive, = [zipfile.ZipFile(BytesIO(body)) for body in uploads if body != b'wheel']
    assert archive.read('lm.arpa') == b'ngram 1=2' and b'wheel' in uploads
    assert sorted(body['name'] for name, body in kaggle.asked if name == 'StartBlobUpload') == ['kit.whl', 'models.zip']
    request = dict(kaggle.asked)['CreateDataset']
    assert (request['ownerSlug'], request['slug'], request['title']) == ('ada', 'b2t-wheels', 'b2t wheels')
    assert request['licenseName'] == 'other' and request['isPrivate'] is True and len(request['files']) == 2
    status, output = b2t('dataset', folder, '--id', 'ada/b2t-wheels', '-m', 'with the newest kit')
    assert status == 0 and 'Pushed: ' in output, output
    request = dict(kaggle.asked)['CreateDatasetVersion']
    assert request['datasetSlug'] == 'b2t-wheels' and request['body']['versionNotes'] == 'with the newest kit'


def test_an_existing_dataset(kaggle, b2t, tmp_path):
    (tmp_path/'wheels').mkdir()
    (tmp_path/'wheels'/'kit.whl').touch()
    kaggle.answers['GetDatasetStatus'] = (200, {'status': 'READY'})
    status, output = b2t('dataset', tmp_path/'wheels', '--id', 'ada/b2t-wheels')
    assert status == 1 and 'is already in use by a dataset' in output


def lines_of(guide):
    "The commands of a guide by step, as lists of words; OWNER is ada."
    cells = json.loads((NBS/'guides'/guide).read_text())['cells']
    text = ''.join(''.join(cell['source']) for cell in cells)
    block = re.search('```sh\n(b2t kaggle wheels.*?)```', text, re.DOTALL)[1]
    block = block.replace('\\\n', ' ').replace('OWNER', 'ada')
    return [shlex.split(command) for line in block.splitlines() for command in line.split('&&')]


@pytest.mark.parametrize('guide, name, shape', [('kaggle_gpu.ipynb', 'gpu', 'NvidiaTeslaT4'),
                                                ('kaggle_tpu.ipynb', 'tpu', 'TpuV5E8')])
def test_the_commands_of_a_guide_are_accepted(guide, name, shape, kaggle, b2t, tmp_path, monkeypatch):
    "The server accepts wheels, dataset, training, its continuation and submission, one after another."
    def write_wheels(image, folder, *args):
        folder.mkdir()
        (folder/'manifest.json').write_text('{}')
        return dict(wheels=[], install='pip install')
    monkeypatch.chdir(tmp_path)
    (tmp_path/'nbs').symlink_to(NBS)
    lines = [words[2:] for words in lines_of(guide) if words[0] == 'b2t']
    with patch('b2t_kaggle.cli.kaggle.build_wheels', write_wheels):
        for words in lines:
            status, output = b2t(*words)
            assert status == 0, output
    assert (tmp_path/f'b2t-wheels-{name}').exists()
    assert dict(kaggle.asked)['CreateDataset']['slug'] == f'b2t-wheels-{name}'
    kernels = [request for called, request in kaggle.asked if called == 'SaveKernel']
    assert {request['machineShape'] for request in kernels} == {shape}
    assert {tuple(request['datasetDataSources']) for request in kernels} == {(f'ada/b2t-wheels-{name}',)}
    if name == 'gpu':
        assert [(request['slug'], request.get('kernelDataSources', [])) for request in kernels] == [
            ('ada/b2t-train', []), ('ada/b2t-train', ['ada/b2t-train']), ('ada/b2t-submit', ['ada/b2t-train'])]


def test_the_last_command_of_the_guide_submits_the_csv(kaggle, b2t, tmp_path, monkeypatch):
    "Kaggle's client fetches the notebook's output, and sends the CSV to the competition."
    monkeypatch.chdir(tmp_path)
    csv = b'id,text\n0,hello\n'
    kaggle.files = {'submission.csv': csv}
    url = f'http://127.0.0.1:{kaggle.server_port}/submission.csv'
    kaggle.answers |= {
        'ListKernelSessionOutput': (200, {'files': [{'url': url, 'fileName': 'submission.csv'}], 'log': ''}),
        'StartSubmissionUpload': (200, {'token': 'the-token', 'createUrl': 'http://localhost/upload'}),
        'CreateSubmission': (200, {'message': 'Successfully submitted to Brain-to-Text', 'ref': 1}),
    }
    for words in [words for words in lines_of('kaggle_gpu.ipynb') if words[0] == 'kaggle']:
        done = subprocess.run([sys.executable, '-m', 'kaggle.cli', *words[1:]], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path/'out'/'submission.csv').read_bytes() == csv
    assert csv in [body for name, body in kaggle.asked if name == 'upload']
    request = dict(kaggle.asked)['CreateSubmission']
    assert (request['competitionName'], request['submissionDescription']) == ('brain-to-text-25', 'GRU')
