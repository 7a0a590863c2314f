"A language model in a GGUF file, a wheel or behind an adapter: its scores, its cache, and what is damaged or missing."
import os
import shutil
import time
import zipfile
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
