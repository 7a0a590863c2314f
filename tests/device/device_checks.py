"""Checks of a device that take minutes. Each yields findings, and a finding that did not pass is a fault. The checks of
the smoke test, `b2t devices --test`, are in `b2t_kaggle.pytorch.selftest`."""
import json
import math
import os
import signal
import subprocess
import sys
import time
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from b2t_kaggle.config import PRESETS, Config, preset, with_overrides
from b2t_kaggle.config.encoders.encoder import encoders_in
from b2t_kaggle.config.encoders.mamba import MambaConfig
from b2t_kaggle.config.groups import AugmentConfig
from b2t_kaggle.core.files import write_whole
from b2t_kaggle.data.sentences import Writer
from b2t_kaggle.data.store import TrialStore
from b2t_kaggle.decoding.decoder import LexiconBeamDecoder
from b2t_kaggle.devices.processes import own_python
from b2t_kaggle.devices.torch import pick_torch
from b2t_kaggle.lm.automaton import load_ngram
from b2t_kaggle.lm.ngram import build_ngram
from b2t_kaggle.phonemes import build_lexicon, normalize_sentence, sentence_to_phonemes, to_class_ids
from b2t_kaggle.pytorch import selftest
from b2t_kaggle.pytorch.augment import add_noise, time_mask
from b2t_kaggle.pytorch.parallel import DDP, start
from b2t_kaggle.pytorch.selftest import Finding, finish, relative, seconds_a_step, take, weights, within
from b2t_kaggle.pytorch.trainer import Trainer
from b2t_kaggle.training.loop import is_oom

PRESET_NAMES = ['official', 'triple_gru', 'transformer', 'transformer-causal', 'zipformer-small', 'zipformer-streaming',
                'mamba']
PRESET_NAMES += [n for n in encoders_in('pytorch') if n not in {preset(p).model.name for p in PRESET_NAMES}]

SMALL = dict(n_units=32, n_layers=1, noise_units=8, n_heads=2, head_dim=16, projection_units=32, state_size=8,
             chunk_size=8, downsampling_factor=[2], num_encoder_layers=[1], encoder_dim=[24],
             encoder_unmasked_dim=[24], feedforward_dim=[48], num_heads=[2], cnn_module_kernel=[7],
             left_context_frames=8)

# Switches off everything random or that depends on the whole batch, so that the parts of a batch add up to the batch
STILL = dict(rnn_dropout=0, input_dropout=0, dropout=0, balancer=False, whiten=False, skips=False)


def sized(name, small, still=False):
    "A preset, or the default configuration of an encoder, in the size for this check; `still` removes randomness."
    cfg = preset(name) if name in PRESETS else with_overrides(preset('official'), {'model.name': name})
    fields = type(cfg.model).model_fields
    changes = (SMALL if small else {}) | (STILL if still else {})
    if still and 'left_context_min' in fields: changes |= dict(left_context_min=cfg.model.model_dump()['left_context'])
    values = {f'model.{k}': v for k, v in changes.items() if k in fields}
    if still: values |= {k: v for k, v in selftest.STILL if k.startswith('augment.')}
    if still: MambaConfig.projection_dropout = MambaConfig.output_dropout = MambaConfig.stochastic_depth = 0
    return with_overrides(cfg, values)


def config(bench, name, still=False, **overrides):
    "A preset in the size for this device, with small batches."
    values = {'data.batch_size': bench.rows, 'data.days_per_batch': 2} | ({'data.n_buckets': 1} if bench.is_xla else {})
    return with_overrides(sized(name, bench.small, still), values | overrides)


def encoder(name, bench): yield from selftest.encoder(bench, config(bench, name, still=True))


def _noises():
    "Augmentations: name, fields, and by formula the mean square of the output for zeros."
    yield 'white noise', dict(white_noise_std=.8), .8**2
    yield 'constant offset', dict(constant_offset_std=.2), .2**2
    yield 'random walk', dict(random_walk_std=.1, random_walk_axis=1), .1**2 * (200 + 1)/2


def augmentation(bench):
    "Compare statistics of noise and masks on the device with formulas."
    backend = bench.backend('float32')
    zeros = backend.put(np.zeros((bench.rows, 200, 512), np.float32))
    def noise(seed, **fields):
        still = dict(white_noise_std=0, constant_offset_std=0, random_walk_std=0, static_gain_std=0)
        made = backend.result(add_noise(zeros, AugmentConfig(**still | fields), backend.generator(seed)))
        backend.end_step()
        return made.cpu().numpy().astype(np.float64)

    for name, fields, square in _noises():
        x = noise(1, **fields)
        limit = .1 if name != 'white noise' else .01
        yield within(f'{name}: mean square', abs((x**2).mean()/square - 1), limit)
        yield within(f'{name}: mean', abs(x.mean())/square**.5, limit)
    again = [noise(seed, white_noise_std=1.) for seed in (1, 1, 2)]
    yield within('white noise: the same of the same seed', relative(again[0], again[1]), 0)
    yield within('white noise: correlation of two seeds', abs((again[0]*again[2]).mean()), .01)
    bins = np.full(bench.rows, 200)
    masked = time_mask(zeros + 1, backend.lengths(bins), 20, .05, backend.generator(3))
    backend.end_step()
    yield within('time masks: part that is left', abs(float(masked.cpu().mean()) - _left(200, 20, .05)), .1)


def _left(T, n_masks, max_part):
    "Expected share of T bins outside masks of uniform length and position, by enumeration."
    lengths = np.arange(int(T*max_part) + 1)
    t = np.arange(T)
    hit = [(np.minimum(t, T - n) - np.maximum(t - n + 1, 0) + 1).clip(0)/(T - n + 1) if n else 0*t for n in lengths]
    return float(((1 - np.mean(hit, 0))**n_masks).mean())


def weights_after(trainer, n):
    take(trainer, n)
    return weights(trainer)


def _start(function, job, **environ):
    "Start a function of this module in a separate process with a job file; its output goes next to that file."
    code = f'sys.path.insert(0, {str(Path(__file__).parent)!r}); import device_checks as c; c.{function}(sys.argv[1])'
    with job.with_name(f'{function} {environ.get("RANK", "")}.log').open('wb') as log:
        return subprocess.Popen([*own_python(code), str(job)], stdout=log, stderr=log,
                                env=os.environ | {k: str(v) for k, v in environ.items()})


def _output(job): return ' '.join(log.read_text(errors='replace')[-300:] for log in sorted(job.parent.glob('*.log')))


def _write_job(bench, folder, cfg, **more):
    folder.mkdir()
    job = dict(config=cfg.dump(), store=str(bench.store.path), accelerator=bench.accelerator, **more)
    write_whole(folder/'job.json', json.dumps(job))
    return folder/'job.json'


def _read_job(job):
    options = json.loads(Path(job).read_text())
    return options, TrialStore.open(options['store']), Config.model_validate(options['config'])


def take_as_rank(job):
    "Take three steps as one process of a group; the first process writes the weights."
    options, store, cfg = _read_job(job)
    folder = Path(job).parent
    torch.distributed.init_process_group(options['backend'], init_method=f'file://{folder}/group',
                                         rank=int(os.environ['RANK']), world_size=int(os.environ['WORLD_SIZE']))
    backend = DDP(pick_torch(options['accelerator'], 'float32'))
    found = weights_after(Trainer(store, None, cfg, backend), 3)
    if backend.is_main_process: np.save(folder/'weights.npy', found)
    backend.gather(0)
    backend.close()
    torch.distributed.destroy_process_group()


def processes(bench):
    "Compare two processes, or all cores of a TPU, with one process."
    cfg = config(bench, 'official', still=True)
    if bench.is_xla:
        if bench.device.n_devices < 2: pytest.skip('there is one XLA device')
        found, one = (weights_after(t, 3) for t in (bench.trainer(cfg, 'float32'), bench.on_processor(cfg)))
        yield within(f'SPMD over {bench.device.n_devices} devices: weights', relative(found, one), 1e-3)
        return
    one = weights_after(bench.trainer(cfg, 'float32'), 3)
    n_gpus = torch.cuda.device_count() if bench.device.kind == 'cuda' else 1
    group = 'nccl' if bench.device.kind == 'cuda' and n_gpus > 1 else 'gloo'
    job = _write_job(bench, bench.folder/'ranks', cfg, backend=group)
    ranks = [_start('take_as_rank', job, RANK=r, LOCAL_RANK=r % n_gpus, WORLD_SIZE=2) for r in range(2)]
    try: status = [p.wait(400) for p in ranks]
    finally:
        for p in ranks: p.kill()
    if any(status): raise RuntimeError(f'exit status {status}: {_output(job)}')
    yield within(f'{group}: weights after 3 steps', relative(np.load(job.with_name('weights.npy')), one), 1e-4)


def train_until_killed(job):
    "Take three steps, save, and continue."
    options, store, cfg = _read_job(job)
    t = Trainer(store, None, cfg, start(pick_torch(options['accelerator']), together=False))
    take(t, 3)
    t.save_last(Path(job).with_name('last.pt'))
    while True: take(t, 1)


def killed(bench):
    "Compare a run that is killed and continued with two uninterrupted runs."
    if bench.is_xla or sys.platform == 'win32': pytest.skip('the device is held by this process')
    cfg = config(bench, 'official')
    first, second = (weights_after(bench.trainer(cfg), 6) for _ in range(2))
    job = _write_job(bench, bench.folder/'killed', cfg)
    last = job.with_name('last.pt')
    p = _start('train_until_killed', job)
    try:
        end = time.monotonic() + 400
        while not last.exists():
            if p.poll() is not None or time.monotonic() > end: raise RuntimeError(f'no checkpoint: {_output(job)}')
            time.sleep(.05)
        time.sleep(.2)
    finally:
        p.kill()
        p.wait()
    assert p.returncode == -signal.SIGKILL, f'it ended by itself: {_output(job)}'
    again = bench.trainer(cfg, checkpoint=last)
    again.step = torch.load(last, weights_only=True, map_location='cpu')['step']
    between = relative(first, second)
    yield within('two runs without an interruption: weights', between, 1e-4)
    yield within('killed and continued: weights', relative(weights_after(again, 6 - again.step), first), 4*between)


def _step_config(bench, name):
    "A preset with the batches of a run, or with small ones on a CPU."
    return config(bench, name) if bench.small else with_overrides(sized(name, False), {'data.batch_size': 64})


def measured(what, figure, unit): return Finding(what, figure, unit, math.isfinite(figure) and figure > 0)


def steps(bench):
    "Training steps of all presets, without those that do not fit into memory."
    for name in PRESET_NAMES:
        try: seconds = seconds_a_step(bench.trainer(_step_config(bench, name)), 2 if bench.small else 5)
        except (RuntimeError, MemoryError) as e:
            if not is_oom(e): raise
            print(f'{name}, 64 trials: does not fit')
        else: yield measured(name, 1e3*seconds, 'ms a step')
        if bench.device.kind == 'cuda': torch.cuda.empty_cache()


def memory(bench):
    "Compare the peak memory of a training step with its estimate."
    if bench.device.kind != 'cuda': pytest.skip('the peak of memory is known on CUDA alone')
    cfg = with_overrides(_step_config(bench, 'official'), {'data.on_device': False})
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    t = bench.trainer(cfg)
    longest = 0
    for i in range(3):
        micro_batches, days = t.loader(i)
        longest = max(longest, micro_batches[0].x.shape[1])
        t.train_step(micro_batches, days)
    finish(t)
    peak = torch.cuda.max_memory_allocated() - before
    m, frames = cfg.model, cfg.data.batch_size*cfg.model.n_frames(longest)
    features = cfg.data.batch_size*longest*m.neural_dim
    per_frame = 2*m.neural_dim*m.patch_size + 6*m.n_layers*m.n_units + 3*m.n_classes # Patches, gates, logits
    estimate = 4*(4*t.n_parameters() + 5*features + frames*per_frame) # Weights, gradients, two moments
    yield Finding('official, 64 trials', peak/2**30, 'GiB', peak <= 1.25*estimate, f'1.25 of {estimate/2**30:.2f} GiB')


def loading(bench):
    "Trials loaded per second."
    for place, on_device in (('the host', False), ('the device', True)):
        t = bench.trainer(with_overrides(_step_config(bench, 'official'), {'data.on_device': on_device}))
        n, i, begin = 0, 0, math.inf
        while time.perf_counter() - begin < (.3 if bench.small else 3) or not i:
            micro_batches, _ = t.loader(i)
            finish(t)
            if not i: begin = time.perf_counter() # The first batch is not counted
            n, i = n + len(micro_batches[0].batch.trials)*(i > 0), i + 1
        yield measured(f'trials in the memory of {place}', n/(time.perf_counter() - begin), 'a second')


def _sentences(n):
    "Distinct sentences of the simulation."
    writer = Writer(0)
    return list(dict.fromkeys(normalize_sentence(writer.sentence('switchboard')) for _ in range(2*n)))[:n]


def _clear(sentence):
    "Log-probabilities `[T', K]` that clearly say a sentence: each phoneme for two frames, then a blank."
    ids = to_class_ids(sentence_to_phonemes(sentence))
    x = np.full((3*len(ids), 41), -8.)
    x[np.arange(len(x)), [c for i in ids for c in (i, i, 0)]] = 0
    return x - np.logaddexp.reduce(x, axis=1)[:, None]


def decoding(bench):
    "Trials decoded per second, and whether each result is correct."
    sentences = _sentences(60 if bench.small else 400)
    arpa = build_ngram(sentences, bench.folder/'lm.arpa', order=3)
    decoder = LexiconBeamDecoder(build_lexicon({w for s in sentences for w in s.split()}), load_ngram(arpa))
    trials = [_clear(s) for s in sentences]
    decoder.decode_all(trials[:4], progress=False)
    begin = time.perf_counter()
    found = decoder.decode_all(trials, progress=False)
    seconds = time.perf_counter() - begin
    wrong = sum(h[0].text != s for h, s in zip(found, sentences))
    yield within('sentences with an error, which sound alike', wrong, len(sentences)//50)
    yield measured('trials', len(trials)/seconds, 'a second')


def _write_tokenizer(folder, sentences):
    "Train a tokenizer on sentences, and write it in the format of transformers."
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(sentences, trainers.BpeTrainer(
        vocab_size=1000, special_tokens=['<s>', '</s>'], initial_alphabet=alphabet, show_progress=False))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token='<s>', eos_token='</s>').save_pretrained(folder)


def _random_llama(n_layers, small, device='cpu'):
    "A language model of transformers with random weights."
    from transformers import LlamaConfig, LlamaForCausalLM
    sizes = dict(hidden_size=576, intermediate_size=1536, num_attention_heads=9, num_key_value_heads=3,
                 vocab_size=49152)
    if small: sizes = dict(hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2,
                           vocab_size=1024)
    config = LlamaConfig(**sizes, num_hidden_layers=n_layers, tie_word_embeddings=True, bos_token_id=0, eos_token_id=1,
                         initializer_range=.05)
    torch.manual_seed(0)
    with torch.device(device): return LlamaForCausalLM(config).eval()


def language_model(bench):
    "Compare a language model's scores with those on the CPU, and measure sentences scored per second."
    from b2t_kaggle.lm.causal import load_lm, score_sentences
    if bench.is_xla: pytest.skip('language models are scored on a GPU or on the processor')
    for package in ('transformers', 'tokenizers'):
        if find_spec(package) is None: pytest.skip(f'needs {package}')
    sentences = _sentences(40)
    folder = bench.folder/'llama'
    _write_tokenizer(folder, sentences)
    _random_llama(2, bench.small).save_pretrained(folder)
    few = sentences[:5]
    expected = score_sentences(*load_lm(folder, 'float32', device='cpu', local_files_only=True), few)
    for dtype in ('float32', 'bfloat16' if bench.device.kind == 'cpu' else 'auto'):
        lm, tokenizer = load_lm(folder, dtype, device=bench.device.kind, local_files_only=True)
        limit = 1e-4 if dtype == 'float32' else 2e-2
        yield within(f'scores, {dtype}', relative(score_sentences(lm, tokenizer, few), expected), limit)
    if not bench.small: lm = _random_llama(30, False, bench.device.kind).to(lm.dtype)
    score_sentences(lm, tokenizer, few)
    begin = time.perf_counter()
    score_sentences(lm, tokenizer, sentences)
    yield measured('sentences', len(sentences)/(time.perf_counter() - begin), 'a second')


CHECKS = {f'encoder {name}': partial(encoder, name) for name in PRESET_NAMES}
CHECKS |= {f.__name__: f for f in (augmentation, processes, killed, steps, memory, loading, decoding,
                                   language_model)}
