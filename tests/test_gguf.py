"Language models in GGUF files and with adapters: scores, and errors for damaged or missing files."
import shutil

import pytest
from click.testing import CliRunner
from tiny_models import tiny_gguf, tiny_lm

from b2t_kaggle.cli.lm import lm as lm_verb
from b2t_kaggle.config import Config, with_overrides
from b2t_kaggle.lm.causal import LanguageModelError, load_lm, score_sentences
from b2t_kaggle.pipeline.run import Run
from b2t_kaggle.pipeline.stages import PipelineError
from b2t_kaggle.pipeline.stages.inputs import check_llm

pytest.importorskip('gguf', reason='needs gguf: pip install b2t_kaggle[llm]')
TEXT = ['how does it keep the cost down', 'how does it keep the cast down', "we don't", 'a']


@pytest.fixture
def model(tmp_path): return tiny_gguf(tmp_path/'tiny.gguf', TEXT, tmp_path/'saved')


def scores(*args, **kw): return score_sentences(*load_lm(*args, device='cpu', **kw), TEXT).tolist()


def test_every_form_has_the_scores_of_its_model(tmp_path, model):
    expected = scores(tmp_path/'saved')
    (tmp_path/'folder').mkdir()
    shutil.copy(model, tmp_path/'folder')
    shutil.copytree(tmp_path/'folder', tmp_path/'unpacked'/'model')
    for form in (model, tmp_path/'folder', tmp_path/'unpacked'): assert scores(form) == expected, form


def test_a_file_that_ends_early_is_an_error(tmp_path, model):
    content = model.read_bytes()
    for n in (4, 20, 1_000, 10_000, len(content) - 100):
        (tmp_path/'cut.gguf').write_bytes(content[:n])
        with pytest.raises(LanguageModelError, match=r'cut.gguf: not loaded \(.*; give a folder'):
            load_lm(tmp_path/'cut.gguf', device='cpu')


def test_a_folder_holds_one_model(tmp_path, model):
    other = shutil.copy(model, tmp_path/'other.gguf')
    with pytest.raises(LanguageModelError, match=r'found 2 GGUF files \(.*other.gguf, .*tiny.gguf\)'):
        load_lm(tmp_path, device='cpu')
    (tmp_path/'other.gguf').write_bytes(b'\x80\x04pickle') # Pickles are never loaded
    with pytest.raises(LanguageModelError, match='other.gguf: expected GGUF'): load_lm(other, device='cpu')


def test_an_adapter_loads_the_model_that_it_was_trained_for(tmp_path, model):
    "Train two adapters in sequence with the command; each adapter is loaded by its folder alone."
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


def test_the_content_of_a_file_counts_and_not_its_path(tmp_path, model):
    def key(path):
        cfg = with_overrides(Config(), {'rescore.llm': path})
        return Run(tmp_path/'run', cfg=cfg, save=False).key('rescore')
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
    monkeypatch.setattr('b2t_kaggle.lm.llm.free_memory', lambda device: 100_000)
    for dtype, device in (('auto', 'cpu'), ('float32', 'cuda:0')):
        message = f'in float32; {device} has 100 kB free, which is too little; use a smaller model, dtype bfloat16'
        with pytest.raises(LanguageModelError, match=message): load_lm(tmp_path/'lm', dtype=dtype, device=device)
