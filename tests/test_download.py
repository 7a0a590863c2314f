"""`b2t data get` and `b2t lm get` with broken connections, killed processes, full disks, damaged files and wrong
passwords. The server is on loopback and records its requests."""
import gzip
import io
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from urllib.parse import quote

import pytest
from click.testing import CliRunner
from fake_files import serve_files
from hypothesis import given, settings
from hypothesis import strategies as st

from b2t_kaggle.cli.command import main
from b2t_kaggle.data.download import DOI, DownloadError, RemoteFile, download, unpack_zip
from b2t_kaggle.lm.public_models import MODELS

CONTENT = bytes(range(251))*40  # 10,040 bytes, in which no two parts of the same length are equal
NAMES = {
    't15_copyTask_neuralData': 'hdf5_data_final/t15.2023.08.11/data_train.hdf5',
    't15_pretrained_rnn_baseline': 't15_pretrained_rnn_baseline/checkpoint/args.yaml',
}


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr('time.sleep', lambda seconds: None)
    with serve_files() as server: yield server


def b2t(*args) -> tuple[int, str]:
    "Exit code, and last line of the output or the error."
    r = CliRunner(catch_exceptions=False).invoke(main, list(map(str, args)), prog_name='b2t')
    return r.exit_code, (r.stderr if r.exit_code else r.stdout).splitlines()[-1]


def ranges(server) -> list[str | None]: return [headers.get('Range') for _, headers, _ in server.requests]


# Broken connections

@settings(max_examples=15)
@given(st.lists(st.integers(1, 4_000), max_size=4))
def test_nothing_is_fetched_twice(lengths):
    with tempfile.TemporaryDirectory() as d, serve_files() as server, pytest.MonkeyPatch.context() as m:
        m.setattr('time.sleep', lambda seconds: None)
        server.files['/a'] = CONTENT
        server.cuts = list(lengths)
        assert download(RemoteFile(f'{server.url}/a', 'a'), d).read_bytes() == CONTENT
        starts = [sum(lengths[:i]) for i in range(len(server.requests))]
        assert ranges(server) == [None, *(f'bytes={start}-' for start in starts[1:])]
        assert os.listdir(d) == ['a']


@pytest.mark.parametrize('checksum, asked', [(None, None), (f'sha256:{sha256(CONTENT).hexdigest()}', 'bytes=4000-')])
def test_without_a_tag_a_checksum_decides_whether_to_continue(checksum, asked, server, tmp_path):
    server.has_tags = False
    server.files['/a'] = CONTENT
    server.cuts = [4000]
    assert download(RemoteFile(f'{server.url}/a', 'a', checksum=checksum), tmp_path).read_bytes() == CONTENT
    assert ranges(server) == [None, asked]


def test_a_server_without_ranges(server, tmp_path):
    server.has_ranges = False
    server.files['/a'] = CONTENT
    server.cuts = [4000, 5000]
    assert download(RemoteFile(f'{server.url}/a', 'a'), tmp_path).read_bytes() == CONTENT
    assert len(server.requests) == 3


def test_parts_of_another_file_are_discarded(server, tmp_path):
    server.files['/a'] = CONTENT
    (tmp_path/'a.part').write_bytes(bytes(20_000))
    (tmp_path/'a.part.mark').write_text('"of another"')
    assert download(RemoteFile(f'{server.url}/a', 'a'), tmp_path).read_bytes() == CONTENT


DOWNLOAD = '''
import os, resource, signal, sys, time
sys.dont_write_bytecode = True # Compiled modules would be cut, too
from b2t_kaggle.data.download import RemoteFile, download
if sys.argv[3] == 'killed': time.sleep = lambda seconds: os.kill(os.getpid(), signal.SIGKILL)
else: resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))
download(RemoteFile(sys.argv[1], 'a'), sys.argv[2])
'''


def run_download(*args):
    command = [sys.executable, '-c', DOWNLOAD, *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=180)


def test_a_killed_process(server, tmp_path):
    server.files['/a'] = CONTENT
    server.cuts = [4000]
    assert run_download(f'{server.url}/a', tmp_path, 'killed').returncode == -signal.SIGKILL
    assert not (tmp_path/'a').exists() and (tmp_path/'a.part').read_bytes() == CONTENT[:4000]
    assert download(RemoteFile(f'{server.url}/a', 'a'), tmp_path).read_bytes() == CONTENT
    assert ranges(server) == [None, 'bytes=4000-']


def test_a_full_disk(server, tmp_path):
    "The kernel refuses files of more than 6,000 bytes."
    server.files['/a'] = CONTENT
    r = run_download(f'{server.url}/a', tmp_path, 'full')
    message = r.stderr.splitlines()[-1]
    assert 'DownloadError' in message and 'file too large after 6.0 kB; make room and run this again' in message
    assert (tmp_path/'a.part').read_bytes() == CONTENT[:6000]
    assert download(RemoteFile(f'{server.url}/a', 'a'), tmp_path).read_bytes() == CONTENT
    assert ranges(server) == [None, 'bytes=6000-']


# Archives

def zip_of(files: dict[str, bytes]) -> bytes:
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, 'w', zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items(): archive.writestr(name, content)
    return memory.getvalue()


@settings(max_examples=40)
@given(st.lists(st.sampled_from(['..', '.', '', 'a', 'b', 'C:', '\\', '..\\..', '/']), min_size=1, max_size=5))
def test_nothing_is_unpacked_elsewhere(parts):
    with tempfile.TemporaryDirectory() as d:
        inner = Path(d)/'x'/'y'
        inner.mkdir(parents=True)
        (inner/'a.zip').write_bytes(zip_of({'good': b'', '/'.join([*parts, 'evil']): b''}))
        try: unpack_zip(inner/'a.zip', inner/'out')
        except DownloadError: assert not (inner/'out').exists()
        outside = {p for p in Path(d).rglob('*') if not p.is_relative_to(inner/'out')}
        assert outside == {inner.parent, inner, inner/'a.zip'}


@pytest.mark.parametrize('method', [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_damaged_archive_of_any_compression(method, tmp_path):
    with zipfile.ZipFile(tmp_path/'a.zip', 'w', method) as archive: archive.writestr('a', CONTENT)
    good = (tmp_path/'a.zip').read_bytes()
    for at in range(0, len(good), len(good)//40):
        (tmp_path/'a.zip').write_bytes(good[:at] + bytes([good[at] ^ 255]) + good[at + 1:])
        try: unpack_zip(tmp_path/'a.zip', tmp_path/'a')
        except DownloadError as e: assert str(e).startswith(f'{tmp_path}/a.zip: was not unpacked (')
        else: shutil.rmtree(tmp_path/'a')
    assert os.listdir(tmp_path) == ['a.zip']


def test_a_disk_that_gets_full_while_unpacking(tmp_path):
    (tmp_path/'a.zip').write_bytes(zip_of({'small': b'1', 'large': CONTENT}))
    code = '''
import resource, sys
sys.dont_write_bytecode = True # Compiled modules would be cut, too
from b2t_kaggle.data.download import unpack_zip
resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))
unpack_zip(sys.argv[1], sys.argv[2])
'''
    args = [sys.executable, '-c', code, str(tmp_path/'a.zip'), str(tmp_path/'a')]
    r = subprocess.run(args, capture_output=True, text=True, timeout=180)
    assert f'{tmp_path}/a: not written, because files of this process may not grow' in r.stderr.splitlines()[-1]
    assert os.listdir(tmp_path) == ['a.zip']
    assert (unpack_zip(tmp_path/'a.zip', tmp_path/'a')/'large').read_bytes() == CONTENT


# The verbs

@pytest.fixture
def dryad(server, monkeypatch):
    "A server with the two archives, whose files require a token."
    monkeypatch.setattr('b2t_kaggle.data.download.DRYAD', server.url)
    for name in ('TOKEN', 'CLIENT_ID', 'CLIENT_SECRET'): monkeypatch.delenv(f'DRYAD_{name}', raising=False)
    entries = []
    for i, (name, inside) in enumerate(NAMES.items()):
        content = zip_of({inside: CONTENT})
        address = f'/api/v2/files/{i}/download'
        server.redirects[address] = f'/storage/{name}.zip'
        server.tokens[address] = 'good'
        server.files[f'/storage/{name}.zip'] = content
        entries.append(dict(path=f'{name}.zip', size=len(content), digestType='sha-256',
                            digest=sha256(content).hexdigest(), _links={'stash:download': {'href': address}}))
    server.files[f'/api/v2/datasets/{quote(DOI, safe="")}'] = {
        '_links': {'stash:version': {'href': '/api/v2/versions/1'}}}
    server.files['/api/v2/versions/1/files?per_page=100'] = {'_embedded': {'stash:files': entries}}
    server.files['/oauth/token'] = lambda form: {'access_token': 'good'} if 'client_secret=right&' in form else None
    return server


def get(folder) -> tuple[int, str]: return b2t('data', 'get', '--source', 'dryad', '-o', folder)


def test_errors_about_wrong_passwords_are_one_line(dryad, monkeypatch, tmp_path):
    code, message = get(tmp_path)
    assert code == 1 and 'set DRYAD_CLIENT_ID and DRYAD_CLIENT_SECRET' in message
    monkeypatch.setenv('DRYAD_CLIENT_ID', 'me')
    monkeypatch.setenv('DRYAD_CLIENT_SECRET', 'wrong')
    code, message = get(tmp_path)
    assert code == 1 and message.startswith(f'Error: {dryad.url}: refuses') and 'wrong' not in message
    monkeypatch.setenv('DRYAD_CLIENT_SECRET', 'right')
    code, message = get(tmp_path)
    sessions = tmp_path/'t15_copyTask_neuralData'/'hdf5_data_final'
    assert (code, message) == (0, f'Next: b2t run --data {sessions}')
    assert (sessions/'t15.2023.08.11'/'data_train.hdf5').read_bytes() == CONTENT


def test_a_damaged_archive_is_discarded(dryad, monkeypatch, tmp_path):
    monkeypatch.setenv('DRYAD_TOKEN', 'good')
    path = '/storage/t15_pretrained_rnn_baseline.zip'
    whole = dryad.files[path]
    dryad.files[path] = whole[:40] + bytes([whole[40] ^ 1]) + whole[41:]
    code, message = get(tmp_path)
    digests = [sha256(content).hexdigest() for content in (dryad.files[path], whole)]
    assert code == 1 and f'found sha256 {digests[0]}, expected {digests[1]}' in message
    assert 't15_pretrained_rnn_baseline.zip' in message and 'was removed: run this again' in message
    assert os.listdir(tmp_path) == ['t15_copyTask_neuralData']
    dryad.files[path] = whole
    dryad.requests.clear()
    assert get(tmp_path)[0] == 0
    assert not any('neuralData' in address for address, *_ in dryad.requests)  # it exists already


def test_free_space_is_checked_before_the_download(dryad, monkeypatch, tmp_path):
    "Space is needed for the archives and for their contents, which are about a third larger."
    monkeypatch.setenv('DRYAD_TOKEN', 'good')
    archives = sum(len(content) for address, content in dryad.files.items() if address.startswith('/storage'))
    needed = int(2.3*archives)
    monkeypatch.setattr('shutil.disk_usage', lambda _: _Usage(needed - 1))
    code, message = get(tmp_path)
    assert code == 1 and 'choose a folder on another disk' in message
    assert not any(address.startswith('/storage') for address, *_ in dryad.requests)
    monkeypatch.setattr('shutil.disk_usage', lambda _: _Usage(max(needed, 2*len(CONTENT))))
    assert get(tmp_path)[0] == 0


@pytest.mark.parametrize('program, message, left', [
    (None, 'set KAGGLE_API_TOKEN to a token from https://www.kaggle.com/settings', []), # Kaggle's message
    ('#!/bin/sh\necho half > "$6/brain-to-text-25.zip"\nexit 1\n', 'failed with exit code', ['brain-to-text-25.zip'])],
    ids=['without a token', 'half of it'])
def test_files_received_before_an_error_of_kaggle_are_kept(program, message, left, monkeypatch, tmp_path):
    monkeypatch.setattr('shutil.disk_usage', lambda _: _Usage(10**11))
    for name in [n for n in os.environ if n.startswith('KAGGLE')]: monkeypatch.delenv(name)
    monkeypatch.setenv('HOME', str(tmp_path))
    monkeypatch.setenv('PATH', f'{tmp_path}:{Path(sys.executable).parent}:{os.environ["PATH"]}')
    if program:
        (tmp_path/'kaggle').write_text(program)
        (tmp_path/'kaggle').chmod(0o755)
    code, said = b2t('data', 'get', '-o', tmp_path/'data'/'new')
    assert code == 1 and message in said
    assert [p.name for p in (tmp_path/'data').rglob('*.*')] == left


class _Usage:
    def __init__(self, free): self.free = free


def test_public_models(server, monkeypatch, tmp_path):
    assert '1.3 GB' in b2t('lm', 'get')[1]
    content = gzip.compress(b'\\data\\\n')
    model = replace(MODELS['librispeech-4gram'], link=f'{server.url}/a', checksum=f'md5:{"0"*32}')
    monkeypatch.setitem(MODELS, model.name, model)
    server.files['/a'] = content
    code, message = b2t('lm', 'get', model.name, '-o', tmp_path)
    assert code == 1 and f'expected {"0"*32}' in message and not (tmp_path/'librispeech-4gram.arpa.gz').exists()
    monkeypatch.setitem(MODELS, model.name, replace(model, checksum=f'sha256:{sha256(content).hexdigest()}'))
    code, message = b2t('lm', 'get', model.name, '-o', tmp_path)
    assert (code, message) == (0, f'Next: b2t run --set lm.path={tmp_path}/librispeech-4gram.arpa.gz')
    assert '"licence": "public domain' in (tmp_path/'librispeech-4gram.arpa.gz.licence.json').read_text()
    assert b2t('lm', 'get', 'nothing')[1].endswith('`b2t lm get` lists them')
