"Tiny language models with random weights and their tokenizers, for tests and for examples in notebooks."
from collections.abc import Sequence
from pathlib import Path

import torch

# Model kind -> (token before each text, token at the end of a document), as in the real tokenizers
SPECIAL_TOKENS = dict(opt=('</s>', '</s>'), llama=('<s>', '</s>'), gpt2=('<|endoftext|>', '<|endoftext|>'))
PUTS_START_FIRST = 'opt', 'llama'


def train_tokenizer(kind: str, sentences: Sequence[str], vocab_size: int):
    "Train a byte-level BPE tokenizer with `tokenizers`; also returns its start and end tokens."
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    start, end = SPECIAL_TOKENS.get(kind, (None, '<|endoftext|>'))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=[s for s in dict.fromkeys((start, end)) if s],
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator(sentences, trainer)
    if kind in PUTS_START_FIRST:
        special_tokens = [(start, tokenizer.token_to_id(start))]
        template = processors.TemplateProcessing(single=f'{start} $A', special_tokens=special_tokens)
        tokenizer.post_processor = template
    return tokenizer, start, end


def tiny_config(kind: str) -> dict:
    "Configuration of a model of this kind with 2 layers of 32 units."
    sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=64,
                 initializer_range=0.3)
    if kind == 'opt': return sizes | dict(ffn_dim=64, word_embed_proj_dim=32)
    if kind == 'gpt2': return sizes
    return sizes | dict(intermediate_size=64, num_key_value_heads=2)


def tiny_lm(
    folder: str | Path,        # Folder for model and tokenizer, in the format of `transformers`
    kind: str,                 # `opt`, `llama`, `qwen2`, `gpt2`, or another name of a causal model in transformers
    sentences: Sequence[str],  # Sentences to train the tokenizer on
    vocab_size: int = 300,     # Maximum number of tokens; byte-level BPE needs 256
    **config,                  # Further values of the model's configuration
) -> Path:
    """A tiny causal language model with random weights (the same at each call) and its tokenizer.

    Like the real tokenizers, only those for opt (`</s>`) and llama (`<s>`) put a token before each text.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
    tokenizer, start, end = train_tokenizer(kind, sentences, vocab_size)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=start, eos_token=end).save_pretrained(folder)
    tokens = dict(vocab_size=tokenizer.get_vocab_size(), bos_token_id=None, eos_token_id=tokenizer.token_to_id(end),
                  pad_token_id=None)
    model_config = AutoConfig.for_model(kind, **tokens | tiny_config(kind) | config)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(model_config).save_pretrained(folder)
    return Path(folder)


def tiny_tts(
    folder: str | Path, # Folder for model and tokenizer
) -> Path:
    "A tiny text-to-speech model, VITS as in facebook/mms-tts-eng, with random weights and a tokenizer of letters."
    import json

    from transformers import VitsConfig, VitsModel, VitsTokenizer
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    letters = folder/'letters.json'
    letters.write_text(json.dumps({c: i for i, c in enumerate("_abcdefghijklmnopqrstuvwxyz' ")}))
    tokenizer = VitsTokenizer(str(letters), pad_token='_', unk_token='_', phonemize=False)
    tokenizer.save_pretrained(folder)
    small = dict(hidden_size=16, num_hidden_layers=1, ffn_dim=16, flow_size=16, spectrogram_bins=9)
    decoder = dict(upsample_initial_channel=16, upsample_rates=(16, 16), upsample_kernel_sizes=(32, 32),
                   resblock_kernel_sizes=(3,), resblock_dilation_sizes=((1,),), sampling_rate=16000)
    predictor = dict(use_stochastic_duration_prediction=False, duration_predictor_filter_channels=8,
                     prior_encoder_num_flows=2, prior_encoder_num_wavenet_layers=1,
                     posterior_encoder_num_wavenet_layers=1)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        VitsModel(VitsConfig(vocab_size=29, **small, **decoder, **predictor)).save_pretrained(folder)
    return folder


def tiny_audio_model(
    folder: str | Path, # Folder for model and feature extractor
    kind: str,          # `whisper` or `qwen2_audio`
    seconds: int = 2,   # Seconds of audio that the tower takes
) -> Path:
    "A tiny model with an audio tower and random weights, saved as a whole like the real ones."
    from transformers import AutoConfig, WhisperFeatureExtractor
    from transformers import Qwen2AudioForConditionalGeneration as Qwen2Audio
    from transformers import WhisperForConditionalGeneration as Whisper
    tower = dict(d_model=16, encoder_layers=1, encoder_attention_heads=2, encoder_ffn_dim=16, num_mel_bins=8,
                 max_source_positions=50*seconds)
    text = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
                vocab_size=32, pad_token_id=None, bos_token_id=None, eos_token_id=None)
    if kind == 'whisper':
        decoder = dict(decoder_layers=1, decoder_attention_heads=2, decoder_ffn_dim=16, vocab_size=32, pad_token_id=0,
                       bos_token_id=1, eos_token_id=2, decoder_start_token_id=1)
        config = AutoConfig.for_model(kind, **tower, **decoder)
    else: config = AutoConfig.for_model(kind, audio_config=tower, text_config=text)
    model = dict(whisper=Whisper, qwen2_audio=Qwen2Audio)[kind]
    WhisperFeatureExtractor(feature_size=8, chunk_length=seconds).save_pretrained(folder)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model(config).save_pretrained(folder)
    return Path(folder)


def tiny_audio_llm(
    folder: str | Path,        # Folder for model and processor
    sentences: Sequence[str],  # Sentences to train the tokenizer on
    vocab_size: int = 300,     # Maximum number of tokens; byte-level BPE needs 256
    seconds: int = 2,          # Seconds of audio that the tower takes
    tower: dict | None = None, # Other sizes of the tower
    text: dict | None = None,  # Other sizes of the text model
) -> Path:
    "A tiny Qwen2-Audio with text output, random weights, and a processor with a chat template like the real one."
    from transformers import PreTrainedTokenizerFast, Qwen2AudioConfig, Qwen2AudioProcessor, WhisperFeatureExtractor
    from transformers import Qwen2AudioForConditionalGeneration as Qwen2Audio
    trained, _, end = train_tokenizer('qwen2', sentences, vocab_size)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=trained, eos_token='<|im_end|>', pad_token=end)
    special = ['<|im_start|>', '<|im_end|>', '<|AUDIO|>', '<|audio_bos|>', '<|audio_eos|>']
    tokenizer.add_special_tokens(dict(additional_special_tokens=special))
    tower = dict(d_model=16, encoder_layers=1, encoder_attention_heads=2, encoder_ffn_dim=16, num_mel_bins=8,
                 max_source_positions=50*seconds) | (tower or {})
    extractor = WhisperFeatureExtractor(feature_size=tower['num_mel_bins'], chunk_length=seconds)
    Qwen2AudioProcessor(extractor, tokenizer).save_pretrained(folder)
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.3, tie_word_embeddings=False)
    sizes |= text or {}
    sizes |= dict(vocab_size=len(tokenizer), bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
                  pad_token_id=tokenizer.pad_token_id)
    config = Qwen2AudioConfig(audio_config=tower, text_config=sizes,
                              audio_token_index=tokenizer.convert_tokens_to_ids('<|AUDIO|>'))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        Qwen2Audio(config).save_pretrained(folder)
    return Path(folder)


def tiny_whisper(
    folder: str | Path,       # Folder for model, tokenizer and feature extractor
    sentences: Sequence[str], # Sentences to train the tokenizer on
    vocab_size: int = 300,    # Maximum number of tokens; byte-level BPE needs 256
    **config,                 # Further values of the model's configuration
) -> Path:
    "A tiny Whisper for 2 s of audio, with random weights and a tokenizer of its class."
    import json

    from transformers import WhisperConfig, WhisperFeatureExtractor, WhisperTokenizer
    from transformers import WhisperForConditionalGeneration as Whisper
    trained = json.loads(train_tokenizer('whisper', sentences, vocab_size)[0].to_str())['model']
    tokenizer = WhisperTokenizer(vocab=trained['vocab'], merges=[tuple(pair) for pair in trained['merges']])
    special = ['<|startoftranscript|>', '<|en|>', '<|transcribe|>', '<|notimestamps|>']
    tokenizer.add_special_tokens(dict(additional_special_tokens=special))
    tokenizer.save_pretrained(folder)
    sizes = dict(d_model=16, encoder_layers=1, encoder_attention_heads=2, encoder_ffn_dim=16, decoder_layers=1,
                 decoder_attention_heads=2, decoder_ffn_dim=16, num_mel_bins=8, max_source_positions=100,
                 max_target_positions=64, init_std=0.3)
    end = tokenizer.eos_token_id
    tokens = dict(vocab_size=len(tokenizer), pad_token_id=end, bos_token_id=end, eos_token_id=end,
                  decoder_start_token_id=tokenizer.convert_tokens_to_ids(special[0]), suppress_tokens=None,
                  begin_suppress_tokens=None)
    WhisperFeatureExtractor(feature_size=8, chunk_length=2).save_pretrained(folder)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        Whisper(WhisperConfig(**sizes | tokens | config)).save_pretrained(folder)
    return Path(folder)


def tiny_gguf(
    path: str | Path,         # File to write
    sentences: Sequence[str], # Sentences to train the tokenizer on
    folder: str | Path,       # Folder for the same model in the format of `transformers`
    architecture: str = 'llama', # Model architecture named in the file
) -> Path:
    """A tiny Llama with random weights and its tokenizer in llama.cpp's format, written with the package gguf.

    bfloat16 can represent the weights. llama.cpp orders the rows of two matrices differently: the two rows of a
    rotary pair are adjacent."""
    import json

    import gguf
    from safetensors.torch import load_file, save_file
    tiny_lm(folder, 'llama', sentences)
    weights = {name: w.bfloat16().float() for name, w in load_file(Path(folder)/'model.safetensors').items()}
    save_file(weights, Path(folder)/'model.safetensors', dict(format='pt'))
    config = json.loads((Path(folder)/'config.json').read_text())
    tokenizer = json.loads((Path(folder)/'tokenizer.json').read_text())
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name('tiny')
    writer.add_context_length(config['max_position_embeddings'])
    writer.add_embedding_length(config['hidden_size'])
    writer.add_block_count(config['num_hidden_layers'])
    writer.add_feed_forward_length(config['intermediate_size'])
    writer.add_head_count(config['num_attention_heads'])
    writer.add_head_count_kv(config['num_key_value_heads'])
    writer.add_layer_norm_rms_eps(config['rms_norm_eps'])
    writer.add_vocab_size(config['vocab_size'])
    vocabulary = sorted(tokenizer['model']['vocab'], key=tokenizer['model']['vocab'].get)
    special = {token['content'] for token in tokenizer['added_tokens']}
    writer.add_tokenizer_model('gpt2')
    writer.add_token_list(vocabulary)
    writer.add_token_types([gguf.TokenType.CONTROL if t in special else gguf.TokenType.NORMAL for t in vocabulary])
    writer.add_token_merges([' '.join(pair) for pair in tokenizer['model']['merges']])
    writer.add_bos_token_id(vocabulary.index('<s>'))
    writer.add_eos_token_id(vocabulary.index('</s>'))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config['num_hidden_layers'])
    heads = dict(q_proj=config['num_attention_heads'], k_proj=config['num_key_value_heads'])
    for name, weight in weights.items():
        rows = weight.numpy()
        if n := heads.get(name.split('.')[-2]): rows = rows.reshape(n, 2, -1, rows.shape[1]).swapaxes(1, 2)
        rows = rows.reshape(weight.shape)
        writer.add_tensor(names.get_name(name, try_suffixes=('.weight',)), rows)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Path(path)
