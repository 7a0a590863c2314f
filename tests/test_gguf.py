"A language model in a GGUF file, a wheel or behind an adapter: its scores, its cache, and what is damaged or missing."
import json
import os
import shutil
import threading
import time
import zipfile
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import copies
import pytest
import torch
from click.testing import CliRunner
from tiny_models import tiny_gguf, tiny_lm

from b2t_kaggle.cli.lm import lm as lm_verb
from b2t_kaggle.config import Config, with_overrides
from b2t_kaggle.core.files import user_cache
from b2t_kaggle.core.locks import Lock
from b2t_kaggle.lm.causal import LanguageModelError, load_lm, score_sentences
from b2t_kaggle.lm.llm import gguf
from b2t_kaggle.lm.llm.gguf import convert_gguf
from b2t_kaggle.lm.llm.sources import hub_gguf
from b2t_kaggle.pipeline.fingerprints import Keyed
from b2t_kaggle.pipeline.stages import PipelineError
from b2t_kaggle.pipeline.stages.inputs import check_llm

pytest.importorskip('gguf', reason='needs gguf: pip install b2t_kaggle[llm]')
TEXT = ['how does it keep the cost down', 'how does it keep the cast down', "we don't", 'a']


@pytest.fixture
def cache(tmp_path, monkeypatch):
    "A cache of the user's own, which a test may look into."
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path/'cache'))
    return user_cache('llm')


@pytest.fixture
def model(tmp_path): return tiny_gguf(tmp_path/'tiny.gguf', TEXT, tmp_path/'saved')


def scores(*args, **kw): return score_sentences(*load_lm(*args, device='cpu', **kw), TEXT).tolist()


def wheel_of(path, *files):
    "A wheel that holds these files, each under its own name."
    with zipfile.ZipFile(path, 'w', zipfile.ZIP_DEFLATED) as archive:
        for f in files: archive.write(f, f'model/{f.name}')
    return path


def test_every_form_has_the_scores_of_the_model_that_it_was_made_of(tmp_path, cache, model):
    expected = scores(tmp_path/'saved')
    (tmp_path/'folder').mkdir()
    shutil.copy(model, tmp_path/'folder')
    wheel = wheel_of(tmp_path/'tiny-1-py3-none-any.whl', model)
    with zipfile.ZipFile(wheel) as archive: archive.extractall(tmp_path/'unpacked')
    for form in (model, tmp_path/'folder', wheel, tmp_path/'unpacked'): assert scores(form) == expected, form
    assert len(list(cache.iterdir())) == 2 # Of the file, wherever it lies, and of the wheel


def test_a_file_is_converted_once_and_a_changed_one_anew(tmp_path, cache, model, monkeypatch):
    conversions = []
    convert = gguf._convert
    monkeypatch.setattr(gguf, '_convert', lambda *args: conversions.append(args[0].name) or convert(*args))
    before = scores(model)
    assert scores(model) == before and conversions == ['tiny.gguf']
    with zipfile.ZipFile(tmp_path/'other.whl', 'w') as archive: archive.write(model, 'other.gguf')
    assert scores(tmp_path/'other.whl') == before and conversions == ['tiny.gguf', 'other.whl']
    tiny_gguf(model, [*TEXT, 'another vocabulary, and so another file'], tmp_path/'saved')
    assert scores(model) == scores(tmp_path/'saved') != before and conversions[2:] == ['tiny.gguf']


class Hub(BaseHTTPRequestHandler):
    "As much of the hub as its client asks for: files of a repository, their names, and the paths that were asked."
    files: dict[str, bytes]
    asked: list[str]

    def do_HEAD(self): self.do_GET()
    def log_message(self, *args): pass

    def do_GET(self):
        self.asked.append(f'{self.command} {self.path}')
        repository, _, name = self.path.partition('/resolve/main/')
        content = self.files.get(name)
        if self.path.startswith('/api/models/we/tiny/tree/main'):
            files = [dict(type='file', path=n, size=len(c), oid='0'*40) for n, c in self.files.items()]
            content = json.dumps(files).encode()
        elif repository != '/we/tiny': content = None
        self.send_response(404 if content is None else 200)
        if content is None: self.send_header('X-Error-Code', 'EntryNotFound')
        self.send_header('X-Repo-Commit', 'c'*40)
        self.send_header('ETag', f'"{sha256(content or b"").hexdigest()}"')
        self.send_header('Content-Length', str(len(content or b'')))
        self.end_headers()
        if self.command == 'GET': self.wfile.write(content or b'')


@pytest.fixture
def hub(tmp_path, monkeypatch):
    "A hub on loopback that the client asks, with an empty cache."
    class Own(Hub): files, asked = {}, []
    with ThreadingHTTPServer(('127.0.0.1', 0), Own) as server:
        place = f'http://127.0.0.1:{server.server_port}'
        monkeypatch.setattr('huggingface_hub.constants.ENDPOINT', place)
        monkeypatch.setattr('transformers.utils.hub._hf_api', None) # A client of another test's address
        monkeypatch.setattr('huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE',
                            f'{place}/{{repo_id}}/resolve/{{revision}}/{{filename}}')
        monkeypatch.setattr('huggingface_hub.constants.HF_HUB_CACHE', str(tmp_path/'hub'))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield Own
        server.shutdown()


def test_a_repository_on_the_hub_counts_as_a_folder_with_a_gguf_file(tmp_path, cache, model, hub):
    "It is fetched once; with several files, or other weights beside it, it is what a folder would be."
    cfg = with_overrides(Config(), {'rescore.llm': 'we/tiny'})
    hub.files = {'README.md': b'tiny', 'tiny.Q4.gguf': model.read_bytes(), 'other.gguf': b'GGUF'}
    names = r'we/tiny: found 2 \(other.gguf, tiny.Q4.gguf\) GGUF files in it, expected one'
    with pytest.raises(PipelineError, match=f'^rescore.llm: {names}'): check_llm(cfg, 'rescore')
    with pytest.raises(LanguageModelError, match=f'^{names}'): load_lm('we/tiny', device='cpu')
    del hub.files['other.gguf']
    check_llm(cfg, 'rescore')
    assert not any('gguf' in path for path in hub.asked)
    expected = scores(tmp_path/'saved')
    assert scores('we/tiny') == expected
    hub.asked.clear()
    assert scores('we/tiny', local_files_only=True) == expected and hub.asked == []
    shutil.rmtree(tmp_path/'hub')
    hub.files |= {f.name: f.read_bytes() for f in (tmp_path/'saved').iterdir()}
    assert hub_gguf('we/tiny') is None and scores('we/tiny') == expected
    assert not any('gguf' in path for path in hub.asked) and len(list(cache.iterdir())) == 1


def convert_in_a_copy(model, folder):
    "Convert; files in a folder say that this process waits, that it converts, and what it is given."
    take, convert = Lock._take, gguf._convert
    def note(what, text=''): (folder/f'{what}.{os.getpid()}').write_text(text)
    gguf._convert = lambda *args: (note('converts'), convert(*args))
    Lock._take = lambda self: take(self) or note('waits') or False
    note('given', str(convert_gguf(model)))


def test_of_two_processes_one_converts(tmp_path, cache, model):
    "Both begin while this process has the lock, so that each finds nothing converted."
    folder = convert_gguf(model)
    weights = (folder/'model.safetensors').read_bytes()
    shutil.rmtree(folder)
    with Lock(folder.with_suffix('.lock'), 'a test'):
        environment = {'XDG_CACHE_HOME': str(tmp_path/'cache')}
        processes = [copies.call_with(environment, convert_in_a_copy, model, tmp_path) for _ in range(2)]
        while len(list(tmp_path.glob('waits.*'))) < 2:
            assert all(p.exitcode is None for p in processes)
            time.sleep(.05)
    for p in processes: p.join(300)
    assert [p.exitcode for p in processes] == [0, 0] and len(list(tmp_path.glob('converts.*'))) == 1
    assert [Path(f.read_text()) for f in tmp_path.glob('given.*')] == [folder]*2
    assert (folder/'model.safetensors').read_bytes() == weights and list(cache.iterdir()) == [folder]


@pytest.mark.parametrize('name', ['model.safetensors', 'config.json', 'tokenizer.json', gguf._RECORD])
def test_a_damaged_cache_is_made_anew(tmp_path, cache, model, name, capsys):
    path = convert_gguf(model)/name
    whole = path.read_bytes()
    for damaged in (whole[:-3], whole[:50] + bytes([whole[50] ^ 1]) + whole[51:], None):
        path.unlink() if damaged is None else path.write_bytes(damaged)
        capsys.readouterr()
        convert_gguf(model)
        assert path.read_bytes() == whole and 'is not as it was written, and is made anew' in capsys.readouterr().err


def test_a_file_that_ends_early_is_an_error_and_leaves_nothing(tmp_path, cache, model):
    content = model.read_bytes()
    for n in (4, 20, 1_000, 10_000, len(content) - 100):
        (tmp_path/'cut.gguf').write_bytes(content[:n])
        with pytest.raises(LanguageModelError, match=r'cut.gguf: not read as GGUF by transformers \d.*copy the file'):
            convert_gguf(tmp_path/'cut.gguf')
    assert list(cache.iterdir()) == []


def test_a_damaged_wheel_is_an_error(tmp_path, cache, model):
    wheel = wheel_of(tmp_path/'tiny.whl', model)
    content = bytearray(wheel.read_bytes())
    content[len(content)//2] ^= 1
    wheel.write_bytes(content)
    with pytest.raises(LanguageModelError, match='tiny.whl: not read'): convert_gguf(wheel)
    wheel.write_bytes(content[:1000])
    with pytest.raises(LanguageModelError, match='tiny.whl: not readable as a wheel'): load_lm(wheel, device='cpu')


def test_wheels_and_folders_hold_one_model(tmp_path, model):
    other = shutil.copy(model, tmp_path/'other.gguf')
    for place in (wheel_of(tmp_path/'two.whl', model, tmp_path/'other.gguf'), tmp_path):
        with pytest.raises(LanguageModelError, match=r'found 2 \(.*other.gguf, .*tiny.gguf\) GGUF files'):
            load_lm(place, device='cpu')
    with pytest.raises(LanguageModelError, match='found none GGUF files in it, expected one'):
        load_lm(wheel_of(tmp_path/'none.whl', tmp_path/'saved'/'config.json'), device='cpu')
    (tmp_path/'other.gguf').write_bytes(b'\x80\x04pickle') # No such thing is ever loaded
    with pytest.raises(LanguageModelError, match='begins with .*, expected GGUF'): load_lm(other, device='cpu')


def test_an_adapter_stands_for_the_model_that_it_was_trained_for(tmp_path, cache, model):
    "Two trainings one after the other, by the command; each adapter is known by its folder alone."
    (tmp_path/'text').write_text('\n'.join(TEXT))
    def finetune(*args):
        args = ['finetune', *map(str, args), str(tmp_path/'text'), '--epochs', '2', '-o']
        r = CliRunner().invoke(lm_verb, [*args, str(tmp_path/f'adapter{len(trained)}')], catch_exceptions=False)
        assert r.exit_code == 0, r.output
        trained.append(tmp_path/f'adapter{len(trained)}')
    trained = []
    finetune(model)
    first = scores(model, adapter=trained[0])
    assert scores(trained[0]) == first != scores(model)
    finetune(trained[0])
    second = scores(trained[1])
    assert second not in (first, scores(model)) and scores(trained[0], adapter=trained[1]) == second
    model.unlink()
    with pytest.raises(LanguageModelError, match=r'adapter0: its model .*tiny.gguf is no longer there; give the model'):
        load_lm(trained[1], device='cpu')


def test_the_content_of_a_file_counts_and_not_where_it_lies(tmp_path, model):
    def key(path): return Keyed(with_overrides(Config(), {'rescore.llm': path}), tmp_path).key('rescore')
    moved = tmp_path/'elsewhere'/model.name
    moved.parent.mkdir()
    shutil.copy(model, moved)
    before = key(model)
    assert key(moved) == before
    moved.write_bytes(model.read_bytes()[:-1] + b'x')
    assert key(moved) != before
    lost = tmp_path/'lost.gguf'
    for path, message in ((lost, 'there is no such file'), (tmp_path/'saved'/'config.json', 'expected GGUF')):
        with pytest.raises(PipelineError, match=message):
            check_llm(with_overrides(Config(), {'rescore.llm': path}), 'rescore')
    check_llm(with_overrides(Config(), {'rescore.llm': model}), 'rescore')


def test_a_model_that_does_not_fit_is_refused_before_it_is_read(tmp_path, monkeypatch):
    from transformers import AutoModelForCausalLM
    tiny_lm(tmp_path/'lm', 'opt', TEXT)
    def never(*args, **kw): raise AssertionError('was read')
    monkeypatch.setattr(AutoModelForCausalLM, 'from_pretrained', never)
    monkeypatch.setattr('b2t_kaggle.lm.causal.free_memory', lambda device: 100_000)
    with pytest.raises(LanguageModelError, match=r'100 kB free, which is too little. dtype bfloat16 .* takes'):
        load_lm(tmp_path/'lm', device='cpu')
    monkeypatch.setattr(torch.cuda, 'get_device_name', lambda device: 'Tesla T4')
    with pytest.raises(LanguageModelError, match=r'in float32; the GPU \(Tesla T4\) has 100 kB free'):
        load_lm(tmp_path/'lm', dtype='float32', device='cuda:0')
