"Damaged, incomplete or malicious models and adapters raise one-line errors, also in the early check."
import json
import shutil
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import tiny_audio_llm, tiny_gguf, tiny_lm, tiny_tts

from b2t_kaggle.lm.causal import LanguageModelError, load_lm
from b2t_kaggle.lm.finetune import finetune
from b2t_kaggle.pytorch.audio.llm.loading import load_audio_llm
from b2t_kaggle.pytorch.audio.tower import AudioTower
from b2t_kaggle.pytorch.audio.voice import AudioError, TransformersVoice

TEXT = ['how are you', 'is she old', 'i am fine thank you']*3


@pytest.fixture(scope='module')
def places(tmp_path_factory):
    "A model, an adapter for it, and a model in a GGUF file."
    folder = tmp_path_factory.mktemp('models')
    tiny_lm(folder/'model', 'llama', TEXT)
    finetune(*load_lm(folder/'model', device='cpu'), TEXT, folder/'adapter', epochs=1, progress=False)
    tiny_gguf(folder/'tiny.gguf', TEXT, folder/'saved')
    return folder


def refusal(path):
    "The error message, which must be the same if only names and shapes are read."
    messages = []
    for weights in (True, False):
        with pytest.raises(LanguageModelError) as caught:
            load_lm(path, device='cpu', local_files_only=True, weights=weights)
        messages.append(str(caught.value))
    assert messages[0] == messages[1] and '\n' not in messages[0] and str(path) in messages[0]
    return messages[0]


def with_json(name, **values):
    def change(folder): (folder/name).write_text(json.dumps(json.loads((folder/name).read_text()) | values))
    return change


def with_tensors(name, f):
    def change(folder): save_file(f(load_file(folder/name)), folder/name, dict(format='pt'))
    return change


def with_bytes(name, f):
    def change(folder): (folder/name).write_bytes(f((folder/name).read_bytes()) if callable(f) else f)
    return change


def pickled(name, old):
    def change(folder):
        torch.save(load_file(folder/old), folder/name)
        (folder/old).unlink()
    return change


def without_layer(tensors): return {k: v for k, v in tensors.items() if 'layers.1.' not in k}


LFS = b'version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12345\n'
MODELS = {
    'layers': (with_json('config.json', num_hidden_layers=10**9), 'num_hidden_layers is 1000000000, expected 1 to'),
    'no layers': (with_json('config.json', num_hidden_layers=0), 'num_hidden_layers is 0'),
    'labels': (with_json('config.json', num_labels=10**9), 'num_labels is 1000000000'),
    'vocabulary': (with_json('config.json', vocab_size=10**12), 'vocab_size is 1000000000000'),
    'memory': (with_json('config.json', hidden_size=10**6, vocab_size=10**7), 'its weights need about'),
    'text': (with_json('config.json', hidden_size='16'), "hidden_size': TypeError"),
    'fewer layers': (with_json('config.json', num_hidden_layers=1), 'config.json has no layer for'),
    'code': (with_json('config.json', model_type='x', auto_map={'AutoConfig': 'x.C'}), 'its own Python code'),
    'tokens': (with_json('tokenizer.json', model=dict(type='Later')), 'not loaded'),
    'other tokens': (with_json('tokenizer.json', decoder=None, added_tokens=[]), "reads 'how are you' back as"),
    'shapes': (with_tensors('model.safetensors', lambda w: w | {'lm_head.weight': torch.zeros(3, 32)}),
               'the shapes of its weights'),
    'gap': (with_tensors('model.safetensors', without_layer), 'the weights lack model.layers.1.'),
    'cut': (with_bytes('model.safetensors', lambda b: b[:-1]), 'not loaded'),
    'header': (with_bytes('model.safetensors', lambda b: struct.pack('<Q', 1 << 62) + b[8:]), 'not loaded'),
    'pointer': (with_bytes('model.safetensors', LFS), 'not loaded'),
    'pickle': (pickled('pytorch_model.bin', 'model.safetensors'), 'pytorch_model.bin is a pickle'),
}
ADAPTERS = {
    **{kind: (with_json('adapter_config.json', peft_type=kind), f"peft_type is '{kind}', expected LORA")
       for kind in ('PROMPT_TUNING', 'IA3', 'OF_A_LATER_YEAR')},
    'rank': (with_json('adapter_config.json', r='16'), "r is '16'"),
    'ranks': (with_json('adapter_config.json', rank_pattern=[1]), r'r is [1]'),
    'large rank': (with_json('adapter_config.json', r=4096), 'r=4096, the tensors of the adapter have 16'),
    'scale': (with_json('adapter_config.json', lora_alpha=0), 'lora_alpha is 0'),
    'layers': (with_json('adapter_config.json', layer_replication=[[0, 10**9]]), 'layer_replication is not supported'),
    'a list': (with_bytes('adapter_config.json', b'[]'), 'found list, expected a mapping'),
    'empty': (with_tensors('adapter_model.safetensors', lambda w: {}), 'the tensors of the adapter have 0'),
    'half': (with_tensors('adapter_model.safetensors', without_layer), 'lacks base_model.model.model.layers.1.'),
    'more': (with_tensors('adapter_model.safetensors', lambda w: w | {'x.lora_A.weight': torch.zeros(16, 4)}),
             'x.lora_A.weight of the adapter fits no layer'),
    'no effect': (with_tensors('adapter_model.safetensors', lambda w: {k: v*('lora_A' in k) for k, v in w.items()}),
                  'the adapter changes nothing'),
    'nan': (with_tensors('adapter_model.safetensors', lambda w: {k: v*torch.nan for k, v in w.items()}), 'NaN'),
    'pickle': (pickled('adapter_model.bin', 'adapter_model.safetensors'), 'has no adapter_model.safetensors'),
}


@pytest.mark.parametrize('folder, case', [*(('model', case) for case in MODELS),
                                          *(('adapter', case) for case in ADAPTERS)])
def test_a_folder_that_is_refused(places, tmp_path, folder, case):
    shutil.copytree(places/folder, tmp_path/'it')
    change, reason = dict(model=MODELS, adapter=ADAPTERS)[folder][case]
    change(tmp_path/'it')
    assert reason in refusal(tmp_path/'it')


def test_a_gguf_file_that_is_refused(places, tmp_path):
    content = (places/'tiny.gguf').read_bytes()
    at = content.index(b'llama.block_count') + len('llama.block_count') + 4
    for layers, reason in ((10**6, 'num_hidden_layers is 1000000'), (0, 'num_hidden_layers is 0')):
        (tmp_path/'it.gguf').write_bytes(content[:at] + struct.pack('<I', layers) + content[at + 4:])
        assert reason in refusal(tmp_path/'it.gguf')
    for end in (20, 1_000, len(content) - 1):
        (tmp_path/'it.gguf').write_bytes(content[:end])
        assert 'not loaded' in refusal(tmp_path/'it.gguf')
    (tmp_path/'it.gguf').write_bytes(content[:8] + bytes(8) + content[16:]) # No tensors
    with pytest.raises(LanguageModelError, match='it has 0 weights, its configuration needs'):
        load_lm(tmp_path/'it.gguf', device='cpu', weights=False)


def test_code_of_a_tokenizer_and_of_speech_models_is_not_run(tmp_path):
    (tmp_path/'code.py').write_text(f'open({str(tmp_path/"was run")!r}, "w")\n')
    names = ('AutoConfig', 'AutoTokenizer', 'AutoFeatureExtractor', 'AutoModelForTextToWaveform')
    facts = dict(model_type='x', auto_map={name: 'code.C' for name in names})
    for name in ('config', 'tokenizer_config', 'preprocessor_config'):
        (tmp_path/f'{name}.json').write_text(json.dumps(facts))
    for load in (AudioTower, TransformersVoice):
        with pytest.raises(AudioError, match='it needs its own Python code, which is not run'): load(tmp_path)
    facts['model_type'] = 'llama'
    tiny_lm(tmp_path, 'llama', TEXT)
    with_json('tokenizer_config.json', tokenizer_class='C', auto_map={'AutoTokenizer': ['code.C', None]})(tmp_path)
    try: load_lm(tmp_path, device='cpu')
    except LanguageModelError as e: assert 'its own Python code' in str(e)
    assert not (tmp_path/'was run').exists()


def test_damaged_speech_models_are_refused_in_one_line(tmp_path):
    tiny_audio_llm(tmp_path/'llm', TEXT)
    tiny_tts(tmp_path/'voice')
    changes = {
        'its tokenizer reads "how are you" back as': (with_json('tokenizer.json', decoder=None), ['llm']),
        'is a pickle, which could run code|no file named model.safetensors':
            (pickled('pytorch_model.bin', 'model.safetensors'), ['llm', 'tower', 'voice']),
        'num_hidden_layers is 1000000000':
            (with_json('config.json', num_hidden_layers=10**9), ['llm', 'tower', 'voice']),
        'not loaded': (with_bytes('model.safetensors', lambda b: b[:-1]), ['llm', 'tower', 'voice']),
    }
    loaders = dict(llm=load_audio_llm, tower=AudioTower, voice=TransformersVoice)
    for i, (message, (change, kinds)) in enumerate(changes.items()):
        for kind in kinds:
            folder = tmp_path/f'{kind}{i}'
            shutil.copytree(tmp_path/('voice' if kind == 'voice' else 'llm'), folder)
            change(folder)
            with pytest.raises(AudioError, match=message) as caught: loaders[kind](folder)
            assert '\n' not in str(caught.value) and str(folder) in str(caught.value)
