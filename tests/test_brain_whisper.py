"""Whisper on neural features, with a tiny random model of the real class: training with the kit's trainer, exact
resumption, beam search, and refused configurations."""
import pytest
import torch

pytest.importorskip('transformers', reason='needs transformers: pip install b2t_kaggle[llm]')
pytest.importorskip('peft', reason='needs peft: pip install b2t_kaggle[llm]')

from encoders import config, open_toy, write_toy
from tiny_models import tiny_whisper

from b2t_kaggle.config import load_config, with_overrides
from b2t_kaggle.metrics import word_error_rate
from b2t_kaggle.pytorch.audio.llm.inference import infer_sentences, load_audio_model
from b2t_kaggle.pytorch.audio.llm.model import BrainWhisper
from b2t_kaggle.pytorch.audio.llm.trainer import train
from b2t_kaggle.pytorch.audio.voice import AudioError
from b2t_kaggle.pytorch.checkpoint import load_file
from b2t_kaggle.pytorch.inference import infer
from b2t_kaggle.training.history import read_history
from b2t_kaggle.training.recipe import TrainingError


@pytest.fixture(scope='module')
def toy(tmp_path_factory):
    "Eight trials with one word each, and a configuration that trains Whisper on them in a few steps."
    data = tmp_path_factory.mktemp('whisper')
    write_toy(data)
    folder = tiny_whisper(data/'model', ['hello'])
    few = {'num_training_batches': 16, 'batches_per_val_step': 8, 'batches_per_save': 8, 'lr_warmup_steps': 2}
    audio = {'audio.llm': str(folder), 'audio.lora_rank': 8, 'audio.stack': 1, 'generate.max_tokens': 4,
             'train.ctc_reduction': 'label'}
    return data, config('gru', **few, **audio)


@pytest.fixture(scope='module')
def trained(toy):
    data, cfg = toy
    return train(*open_toy(data), cfg, data/'whole', progress=False)


def test_it_learns(toy, trained):
    data, cfg = toy
    history = read_history(data/'whole'/'history.csv')
    assert {'answer', 'ctc', 'ctc_front', 'ctc_behind'} <= set(history)
    assert {'grad_encoder', 'grad_projector', 'grad_lora', 'grad_states_out'} <= set(history)
    assert history.answer.iloc[-1] < 0.85*history.answer.iloc[0]
    assert history.ctc_behind.iloc[-1] < history.ctc_behind.iloc[0]


def test_its_error_rate_is_computed_on_whole_sentences(toy, trained):
    data, cfg = toy
    store, _ = open_toy(data)
    greedy = cfg.model_copy(update=dict(generate=cfg.generate.model_copy(update=dict(beams=1))))
    found = {i: w for _, some in infer_sentences(data/'whole'/'best.pt', dict(train=store), greedy, progress=False)
             for i, w in some.items()}
    texts = [found[i].hypotheses[0].text for i in range(len(store))]
    assert trained['val_wer'] == word_error_rate(store.index.sentence, texts)
    wide = {i: w for _, some in infer_sentences(data/'whole'/'best.pt', dict(train=store), cfg, progress=False)
            for i, w in some.items()}
    for i, written in wide.items():
        totals = [h.total for h in written.hypotheses]
        assert totals == sorted(totals, reverse=True)
        assert 1 <= len({h.text for h in written.hypotheses}) == len(totals) <= 4


def test_a_resumed_run_ends_with_the_same_weights(toy, trained):
    "The CTC pass draws new gaps in each step, and a resumed run draws the same ones."
    data, cfg = toy
    short = with_overrides(cfg, {'time_budget': 1e-9})
    assert [train(*open_toy(data), short, data/'parts', progress=False)['step'] for _ in range(2)] == [1, 2]
    train(*open_toy(data), cfg, data/'parts', progress=False)
    never, again = (load_file(data/name/'last.pt') for name in ('whole', 'parts'))
    for group in ('model_state_dict', 'audio_state_dict'):
        for k, v in never[group].items(): assert torch.equal(v, again[group][k]), k


def test_the_front_encoder_is_an_ordinary_model(toy, trained, tmp_path):
    data, cfg = toy
    store, _ = open_toy(data)
    assert len(infer(data/'whole'/'best.pt', store, tmp_path/'logits.arrow', 'cpu', progress=False)) == len(store)
    assert isinstance(load_audio_model(data/'whole'/'best.pt')[0], BrainWhisper)


def test_refused_configurations(toy):
    data, cfg = toy
    def attempt(error, message, **changes):
        with pytest.raises(error, match=message):
            train(*open_toy(data), with_overrides(cfg, changes), data/'refused', progress=False)
    attempt(TrainingError, r'audio.stack = 2: CTC reads the states of .* set audio.stack=1', **{'audio.stack': 2})
    short = tiny_whisper(data/'short', ['hello'], max_source_positions=3)
    attempt(AudioError, r'a trial has \d+ vectors; raise model.patch_stride, .* at most 3',
            **{'audio.llm': str(short)})


def test_the_preset_fits_whisper():
    cfg = load_config(base='brain-whisper')
    assert (cfg.audio.stack, cfg.audio.llm) == (1, 'openai/whisper-small')
