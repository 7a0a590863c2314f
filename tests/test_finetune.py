"""LoRA on model classes with different layers: training is deterministic, keeps the model's weights, and saves
atomically."""
import os
import signal

import numpy as np
import pytest
import torch
from tiny_models import tiny_lm

from b2t_kaggle.core.files import WriteError
from b2t_kaggle.lm import finetune as module
from b2t_kaggle.lm.causal import LanguageModelError, load_lm, score_sentences, token_sequences
from b2t_kaggle.lm.finetune import _add_lora, _batch_loss, _tree_loss, finetune, save_adapter

TEXT = [f'{a} {b} {c}' for a in ('we', 'you', 'they') for b in ('see', 'keep', 'like')
        for c in ('it', 'the code', 'the cost')]


@pytest.fixture(scope='module')
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp('lms')
    return {kind: tiny_lm(folder/kind, kind, TEXT) for kind in ('opt', 'llama', 'gpt2')}


def load(folder, **kw): return load_lm(folder, device='cpu', local_files_only=True, **kw)


def test_the_loss_equals_that_of_scoring(folders):
    for kind in ('opt', 'gpt2'):
        model, tokenizer = load(folders[kind])
        sequences, given = token_sequences(tokenizer, TEXT, end=True)
        with torch.no_grad(): loss = _batch_loss(model, sequences, given).item()
        n_tokens = sum(len(s) - given for s in sequences)
        assert loss == pytest.approx(-score_sentences(model, tokenizer, TEXT, end=True).sum()/n_tokens, rel=1e-5)


@pytest.mark.filterwarnings('ignore:fan_in_fan_out')
@pytest.mark.parametrize('kind', ['opt', 'llama', 'gpt2'])
def test_a_tree_has_the_loss_and_the_gradient_of_rows(folders, kind):
    "One sentence occurs twice, and one is a prefix of another."
    model, tokenizer = load(folders[kind])
    sequences, _ = token_sequences(tokenizer, ['we see', 'we see it', 'they like the code', 'we see it'], end=True)
    model = _add_lora(model, rank=4).eval()
    trained = [p for p in model.parameters() if p.requires_grad]
    torch.manual_seed(0)
    for p in trained: p.data = torch.randn_like(p)/4 # LoRA initialises one of the two thin matrices with zeros
    found = []
    for loss_of in (_batch_loss, _tree_loss):
        loss = loss_of(model, sequences, 2, True)
        found.append((loss.item(), *torch.autograd.grad(loss, trained)))
    rows, tree = found
    assert tree[0] == pytest.approx(rows[0], rel=1e-5)
    for a, b in zip(rows[1:], tree[1:]): torch.testing.assert_close(b, a, rtol=1e-3, atol=1e-5*a.abs().max().item())


@pytest.mark.filterwarnings('ignore:fan_in_fan_out')
@pytest.mark.parametrize('kind', ['opt', 'llama', 'gpt2'])
def test_it_learns_and_loads_without_changing_the_weights(folders, kind, tmp_path):
    model, tokenizer = load(folders[kind])
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    def perplexity(model):
        n_words = sum(len(s.split()) + 1 for s in TEXT)
        return np.exp(-score_sentences(model, tokenizer, TEXT, end=True).sum()/n_words)
    before = perplexity(model)
    tuned = finetune(model, tokenizer, TEXT, tmp_path/'deep'/'adapter', epochs=8, batch_size=9, lr=0.02, rank=4,
                     progress=False)
    assert perplexity(tuned) < before/4 and not tuned.training
    for k, v in tuned.get_base_model().state_dict().items():
        if 'lora' not in k: assert torch.equal(v, weights[k.replace('.base_layer', '')])
    again, _ = load(folders[kind], adapter=tmp_path/'deep'/'adapter')
    expected = score_sentences(tuned, tokenizer, TEXT)
    np.testing.assert_allclose(score_sentences(again, tokenizer, TEXT), expected, atol=1e-3)


def test_the_same_seed_gives_the_same_adapter(folders, tmp_path):
    scores = []
    for seed in (0, 0, 1):
        torch.rand(seed + 3) # Earlier draws make no difference
        model, tokenizer = load(folders['opt'])
        tuned = finetune(model, tokenizer, TEXT, tmp_path/'adapter', epochs=1, lr=0.01, seed=seed, progress=False)
        scores.append(score_sentences(tuned, tokenizer, TEXT))
    np.testing.assert_array_equal(scores[0], scores[1])
    assert np.abs(scores[0] - scores[2]).max() > 1e-3


def test_an_adapter_is_whole_or_the_old_one(folders, tmp_path, monkeypatch):
    model, tokenizer = load(folders['opt'])
    tuned = finetune(model, tokenizer, TEXT, tmp_path/'adapter', epochs=1, progress=False)
    old = {p.name: p.read_bytes() for p in (tmp_path/'adapter').iterdir()}
    def dies(folder, **kw):
        folder.mkdir()
        (folder/'adapter_config.json').write_text('{"half')
        raise OSError('no space left')
    monkeypatch.setattr(tuned, 'save_pretrained', dies)
    with pytest.raises(OSError): save_adapter(tuned, tmp_path/'adapter')
    assert {p.name: p.read_bytes() for p in (tmp_path/'adapter').iterdir()} == old
    monkeypatch.undo()
    save_adapter(tuned, tmp_path/'adapter') # Replaces
    assert [p.name for p in tmp_path.iterdir()] == ['adapter']
    (tmp_path/'adapter'/'adapter_config.json').write_text('{"half')
    with pytest.raises(LanguageModelError, match='adapter'): load(folders['opt'], adapter=tmp_path/'adapter')


@pytest.mark.parametrize('error', [OSError('Stale file handle'), KeyboardInterrupt()])
def test_the_old_adapter_is_restored(folders, tmp_path, monkeypatch, error):
    "The second of the two renames fails or is interrupted."
    model, tokenizer = load(folders['opt'])
    tuned = finetune(model, tokenizer, TEXT, tmp_path/'adapter', epochs=1, progress=False)
    old = {p.name: p.read_bytes() for p in (tmp_path/'adapter').iterdir()}
    moved = []
    replace = os.replace
    def fails(a, b):
        moved.append(a)
        if len(moved) == 2: raise error
        replace(a, b)
    monkeypatch.setattr(os, 'replace', fails)
    with pytest.raises(type(error)): save_adapter(tuned, tmp_path/'adapter')
    assert moved[0] == tmp_path/'adapter' and moved[1].name == 'new'
    assert {p.name: p.read_bytes() for p in (tmp_path/'adapter').iterdir()} == old
    assert [p.name for p in tmp_path.iterdir()] == ['adapter']


def test_other_files_are_kept(folders, tmp_path):
    (tmp_path/'results').mkdir()
    (tmp_path/'results'/'kept.csv').write_text('mine')
    with pytest.raises(WriteError, match='results: has files, but no adapter_config.json'):
        finetune(*load(folders['gpt2']), TEXT, tmp_path/'results', epochs=1, progress=False)
    assert (tmp_path/'results'/'kept.csv').read_text() == 'mine'


def test_an_interrupted_run_loses_no_step(folders, tmp_path, monkeypatch):
    "It ends after the current step, which is saved, and continues to the same adapter."
    def tune(folder):
        model, tokenizer = load(folders['gpt2'])
        finetune(model, tokenizer, TEXT, folder, epochs=1, batch_size=3, progress=False)
        return {p.name: p.read_bytes() for p in folder.iterdir()}

    whole = tune(tmp_path/'whole')
    steps = []
    def step(*args):
        steps.append(args[-1])
        if len(steps) == 4: os.kill(os.getpid(), signal.SIGINT)
        return train_step(*args)

    train_step = module._train_step
    monkeypatch.setattr(module, '_train_step', step)
    with pytest.raises(KeyboardInterrupt, match='4 of 9 steps are saved'): tune(tmp_path/'new')
    assert not (tmp_path/'new').exists()
    assert tune(tmp_path/'new') == whole and len(steps) == 9


def test_the_log_has_few_lines(folders, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv('B2T_PIPED', '1')
    model, tokenizer = load(folders['gpt2'])
    finetune(model, tokenizer, TEXT, tmp_path/'adapter', epochs=2, batch_size=1)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith('LoRA')]
    assert len(lines) <= 10 and '54/54' in lines[-1] and 'loss=' in lines[-1], lines


@pytest.mark.parametrize('lr, damaged, step', [(1e-3, True, 1), (1e30, False, 2)])
def test_nothing_is_saved_if_the_loss_is_not_a_number(folders, tmp_path, lr, damaged, step):
    model, tokenizer = load(folders['opt'])
    if damaged: model.get_input_embeddings().weight.data[-1] = torch.nan
    message = f'the loss is .* in step {step} of 6; some models overflow in float16'
    with pytest.raises(LanguageModelError, match=message):
        finetune(model, tokenizer, TEXT, tmp_path/'adapter', epochs=3, lr=lr, progress=False)
    assert list(tmp_path.iterdir()) == []


def test_a_tokenizer_of_another_model_is_detected(folders, tmp_path):
    other = 'a thousand other words besides those'
    _, many = load(tiny_lm(tmp_path/'lm', 'opt', [*TEXT, other], vocab_size=400))
    with pytest.raises(LanguageModelError, match='belongs to another model'):
        finetune(load(folders['opt'])[0], many, ['we see it', other], tmp_path/'adapter')


def test_an_adapter_of_another_model_is_refused(folders, tmp_path):
    model, tokenizer = load(folders['opt'])
    finetune(model, tokenizer, TEXT, tmp_path/'adapter', epochs=1, progress=False)
    with pytest.raises(LanguageModelError, match='with the adapter'): load(folders['gpt2'], adapter=tmp_path/'adapter')
    wide = tiny_lm(tmp_path/'wide', 'opt', TEXT, hidden_size=64, word_embed_proj_dim=64)
    with pytest.raises(LanguageModelError, match='with the adapter'): load(wide, adapter=tmp_path/'adapter')
