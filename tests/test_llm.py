"""LLM scores agree with the plain computation, for several model classes, precisions, contexts and unusual tokenizers;
memory."""
import itertools
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import tiny_lm

from b2t_kaggle.lm import causal as llm
from b2t_kaggle.lm.causal import (
    LanguageModelError,
    capabilities,
    load_lm,
    prefix_tree,
    score_sentences,
    start_tokens,
    token_sequences,
)

TREES = ('opt', 'llama', 'qwen2', 'gpt2', 'mistral', 'gpt_neox')
BENT = 'gemma2' # It transforms its logits after the head
NO_TREES = ('bloom', 'mamba') # No position ids; recurrent
TEXT = ['how does it keep the cost down', 'how does it keep the cast down', 'how does it', 'how',
        'you can see the code at this point', "we don't", 'how does it keep the cost down', 'a']
words = st.lists(st.sampled_from('how does it keep the cost cast down a'.split()), min_size=1, max_size=7).map(' '.join)


def load(folder, **kw): return load_lm(folder, device='cpu', local_files_only=True, **kw)


@pytest.fixture(scope='module')
def lms(tmp_path_factory):
    "Models and tokenizers by kind, loaded with `load_lm`."
    folder = tmp_path_factory.mktemp('lms')
    return {kind: load(tiny_lm(folder/kind, kind, TEXT)) for kind in (*TREES, BENT, *NO_TREES)}


def reference_score(model, tokenizer, text, context=''):
    "Score one sentence as one row, with a full log-softmax."
    start = start_tokens(tokenizer)
    ids = start + tokenizer(f'{context} {text}' if context else text, add_special_tokens=False).input_ids
    given = max(1, len(start))
    with torch.no_grad(): log_probs = model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
    total = sum(log_probs[i - 1, ids[i]].item() for i in range(given, len(ids)))
    return total - (reference_score(model, tokenizer, context) if context else 0)


@pytest.mark.parametrize('kind', [*TREES, BENT, *NO_TREES])
def test_every_class_agrees_with_the_plain_computation(lms, kind):
    model, tokenizer = lms[kind]
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        assert capabilities(model) == (kind != BENT, kind not in NO_TREES)
        for context in ('', 'you can'):
            expected = [reference_score(model, tokenizer, t, context) for t in TEXT]
            for n_nodes in (512, 5):
                scores = score_sentences(model, tokenizer, TEXT, context, n_nodes=n_nodes)
                np.testing.assert_allclose(scores, expected, atol=1e-4)
            one_by_one = [score_sentences(model, tokenizer, [t], context)[0] for t in TEXT]
            np.testing.assert_allclose(one_by_one, expected, atol=1e-4)


@pytest.mark.parametrize('kind', NO_TREES)
def test_a_model_without_trees_says_so(lms, kind):
    llm._CAPABILITIES.pop(lms[kind][0], None)
    with pytest.warns(UserWarning, match='cannot score a prefix tree'): capabilities(lms[kind][0])


@settings(max_examples=25)
@given(st.lists(words, max_size=8), st.integers(1, 40))
def test_any_sentences_in_trees_of_any_size(lms, texts, n_nodes):
    for kind in ('opt', 'llama'):
        expected = [reference_score(*lms[kind], t) for t in texts]
        np.testing.assert_allclose(score_sentences(*lms[kind], texts, n_nodes=n_nodes), expected, atol=1e-4)


@pytest.mark.parametrize('attention', ['eager', 'sdpa'])
@pytest.mark.parametrize('dtype, tolerance', [(torch.float32, 1e-4), (torch.bfloat16, 1.)])
def test_attention_and_precision(lms, attention, dtype, tolerance, tmp_path):
    folder = tiny_lm(tmp_path, 'llama', TEXT)
    model, tokenizer = load(folder, dtype=str(dtype).removeprefix('torch.'))
    model.set_attn_implementation(attention)
    assert model.dtype == dtype and capabilities(model) == (True, True)
    expected = [reference_score(*lms['llama'], t) for t in TEXT]
    np.testing.assert_allclose(score_sentences(model, tokenizer, TEXT), expected, atol=tolerance)


def test_the_tokenizers_padding_does_not_matter(lms):
    model, tokenizer = lms['gpt2']
    expected = score_sentences(model, tokenizer, TEXT)
    for side in ('left', 'right'):
        for pad in (None, tokenizer.eos_token):
            tokenizer.padding_side = side
            tokenizer.pad_token = pad
            np.testing.assert_array_equal(score_sentences(model, tokenizer, TEXT), expected)


def test_a_context_for_each_sentence_and_the_end(lms):
    model, tokenizer = lms['qwen2']
    contexts = ['you can', '', 'how does it', 'you  can ', '', 'a', '', '']
    def expected(*args): return reference_score(model, tokenizer, *args)
    with_context = [expected(t, ' '.join(c.split())) for t, c in zip(TEXT, contexts)]
    np.testing.assert_allclose(score_sentences(model, tokenizer, TEXT, contexts), with_context, atol=1e-4)
    eos = tokenizer.eos_token
    ended = score_sentences(model, tokenizer, TEXT, end=True)
    np.testing.assert_allclose(ended, [expected(t + eos) for t in TEXT], atol=1e-4)
    assert score_sentences(model, tokenizer, [''], end=True)[0] < 0 == score_sentences(model, tokenizer, [''])[0]
    nothing = expected(f'how does it{eos}') - expected('how does it')
    np.testing.assert_allclose(score_sentences(model, tokenizer, [''], 'how does it', end=True), nothing, atol=1e-4)
    with pytest.raises(ValueError, match='found 1 texts, expected one, or one for each of the 2 sentences'):
        score_sentences(model, tokenizer, ['a', 'b'], ['c'])


def test_a_tokenizer_without_special_tokens_leaves_the_first_token_out(lms, tmp_path):
    from transformers import PreTrainedTokenizerFast
    model, tokenizer = lms['gpt2']
    bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    assert start_tokens(bare) == []
    with torch.no_grad(): log_probs = model(torch.tensor([bare(TEXT[0]).input_ids])).logits[0].log_softmax(-1)
    ids = bare(TEXT[0]).input_ids
    expected = sum(log_probs[i - 1, ids[i]].item() for i in range(1, len(ids)))
    np.testing.assert_allclose(score_sentences(model, bare, TEXT[:1]), expected, atol=1e-4)
    with pytest.raises(LanguageModelError, match='no eos_token'): score_sentences(model, bare, TEXT, end=True)


def test_prefixes_are_computed_once_and_few_states_in_the_last_layer(lms):
    model, tokenizer = lms['opt']
    choices = ('how', 'we', 'you', 'a'), ('does', 'see', 'keep', 'can'), 'a the this at it cost'.split()
    texts = [' '.join(w) for w in itertools.product(*choices, ('cost', 'cast', 'code'))]
    sequences, given = token_sequences(tokenizer, texts)
    beginnings = {s[:i] for s in sequences for i in range(1, len(s))}
    capabilities(model) # Tests the model before calls are counted
    body = []
    head = []
    def count_states(m, args, kw, out): body.append(out.last_hidden_state.shape[:2].numel())
    def count_logits(m, args, out): head.append(out.shape[:-1].numel())
    hooks = [model.base_model.register_forward_hook(count_states, with_kwargs=True),
             model.get_output_embeddings().register_forward_hook(count_logits)]
    score_sentences(model, tokenizer, texts)
    for h in hooks: h.remove()
    assert sum(body) == sum(head) == len(beginnings) == len(prefix_tree(sequences, given).tokens)
    assert max(head) <= llm.HEAD_BATCH < sum(head)


def test_beyond_a_sliding_window_rows_are_computed(tmp_path):
    model, tokenizer = load(tiny_lm(tmp_path, 'mistral', TEXT, sliding_window=4))
    model.set_attn_implementation('eager')
    assert max(map(len, token_sequences(tokenizer, TEXT)[0])) > 4
    expected = [reference_score(model, tokenizer, t) for t in TEXT]
    np.testing.assert_allclose(score_sentences(model, tokenizer, TEXT), expected, atol=1e-4)
    model.config.sliding_window = None # Without it, trees are used, whose mask has no window, so the scores are wrong
    assert np.abs(score_sentences(model, tokenizer, TEXT) - expected).max() > 0.1


def test_training_mode_is_preserved(lms):
    model, tokenizer = lms['opt']
    expected = score_sentences(model, tokenizer, TEXT)
    model.train()
    try:
        np.testing.assert_array_equal(score_sentences(model, tokenizer, TEXT), expected) # Without dropout
        assert model.training
        with pytest.raises(LanguageModelError): score_sentences(model, tokenizer, ['how '*200])
        assert model.training
    finally: model.eval()


def test_a_tokenizer_of_another_model_is_detected(lms, tmp_path):
    other = 'a thousand other words besides those'
    _, many = load(tiny_lm(tmp_path, 'opt', [*TEXT, other], vocab_size=400))
    with pytest.raises(LanguageModelError, match='belongs to another model'):
        score_sentences(lms['opt'][0], many, [other])


def test_damaged_weights_are_named(tmp_path):
    from safetensors.torch import load_file, save_file
    file = tiny_lm(tmp_path/'lm', 'opt', TEXT)/'model.safetensors'
    weights = load_file(file)
    gone = next(k for k in weights if 'fc1.weight' in k)
    save_file({k: v for k, v in weights.items() if k != gone}, file, metadata={'format': 'pt'})
    with pytest.raises(LanguageModelError, match=f'lack {gone}'): load(tmp_path/'lm')
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(LanguageModelError, match='lm: not loaded'): load(tmp_path/'lm')
    with pytest.raises(LanguageModelError, match='some/model: not loaded'): load('some/model')


def test_a_score_that_is_not_a_number_is_an_error(tmp_path):
    model, tokenizer = load(tiny_lm(tmp_path, 'llama', TEXT))
    model.get_input_embeddings().weight.data[token_sequences(tokenizer, ['you'])[0][0][-1]] = torch.nan
    message = "'you can see the code at this point' has the log-probability nan for LlamaForCausalLM in torch.float32"
    with pytest.raises(LanguageModelError, match=message): score_sentences(model, tokenizer, TEXT)
    assert np.isfinite(score_sentences(model, tokenizer, TEXT[:4])).all()


@pytest.mark.filterwarnings('ignore:.*cannot score a prefix tree') # Rows cannot be scored either
def test_float16_that_overflows_is_named(tmp_path):
    tiny_lm(tmp_path, 'llama', TEXT)
    for dtype in ('float32', 'float16'):
        model, tokenizer = load(tmp_path, dtype=dtype)
        model.get_output_embeddings().weight.data *= 5e4
        if dtype == 'float32': assert np.isfinite(score_sentences(model, tokenizer, TEXT)).all()
    message = r'in torch.float16; some models overflow in float16: then use bfloat16 or float32'
    with pytest.raises(LanguageModelError, match=message): score_sentences(model, tokenizer, TEXT)


def test_the_arguments_of_8_and_4_bits(monkeypatch, tmp_path):
    "Arguments passed to transformers if bitsandbytes is installed."
    from transformers import AutoModelForCausalLM
    folder = tiny_lm(tmp_path, 'opt', TEXT)
    model, _ = load(folder)
    asked = {}
    def from_pretrained(name, **kw):
        asked.update(kw)
        return model, dict(missing_keys=[])
    monkeypatch.setattr(llm, 'find_spec', lambda package: True)
    monkeypatch.setattr(AutoModelForCausalLM, 'from_pretrained', from_pretrained)
    for dtype, expected in (('auto', torch.float32), ('bfloat16', torch.bfloat16)):
        assert load_lm(folder, dtype=dtype, quantization='eight_bit', device='cpu')[0] is model
        assert asked['quantization_config'].load_in_8bit and asked['device_map'] == {'': 'cpu'}
        assert asked['dtype'] == expected
    load_lm(folder, dtype='float16', quantization='four_bit', device='cpu')
    config = asked['quantization_config']
    assert config.load_in_4bit and not config.load_in_8bit and config.bnb_4bit_compute_dtype == torch.float16
    assert config.bnb_4bit_quant_type == 'nf4' and asked['device_map'] == {'': 'cpu'}
    with pytest.raises(LanguageModelError, match='expected auto, float32'):
        load_lm(folder, dtype='int8', quantization='eight_bit', device='cpu')


@pytest.mark.parametrize('option', ['eight_bit', 'four_bit'])
@pytest.mark.parametrize('missing', ['bitsandbytes', 'accelerate'])
def test_a_package_that_fewer_bits_need_is_named(monkeypatch, tmp_path, missing, option):
    monkeypatch.setattr(llm, 'find_spec', lambda package: None if package == missing else package)
    message = f'{option} needs the package {missing}, which is not installed; pip install {missing}'
    with pytest.raises(LanguageModelError, match=message): load_lm(tmp_path, quantization=option)


@pytest.mark.parametrize('error, message', [
    (ImportError('\nneeds bitsandbytes>=9: pip install it\nand more'),
     r'not loaded \(needs bitsandbytes>=9: pip install it\); install that package'),
    (ValueError(''), r"not loaded \(ValueError\(''\)\); give a folder")])
def test_errors_of_transformers_are_one_sentence(monkeypatch, tmp_path, error, message):
    from transformers import AutoModelForCausalLM
    def fails(name, **kw): raise error
    monkeypatch.setattr(AutoModelForCausalLM, 'from_pretrained', fails)
    with pytest.raises(LanguageModelError, match=message): load_lm(tiny_lm(tmp_path, 'opt', TEXT), device='cpu')


def test_imported_and_used_without_transformers():
    "The module itself needs only torch; an error names the missing package."
    code = '''import sys
sys.modules["transformers"] = None
import importlib.util as u
find = u.find_spec
u.find_spec = lambda name, *a: None if name == "transformers" else find(name, *a)
from b2t_kaggle.lm.causal import load_lm
try: load_lm("none")
except RuntimeError as e: print(e)'''
    out = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, timeout=400)
    assert 'pip install transformers' in out.stdout, out.stderr
