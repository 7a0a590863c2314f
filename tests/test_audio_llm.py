"A run in which an audio LLM writes the sentences, from sessions to a submission, with a tiny model of the real class."
import csv
import gc
import shutil
from dataclasses import replace

import pytest

pytest.importorskip('transformers', reason='needs transformers: pip install b2t_kaggle[llm]')
pytest.importorskip('peft', reason='needs peft: pip install b2t_kaggle[llm]')

from test_pipeline import SMALL, stages_here
from tiny_models import tiny_audio_llm

from b2t_kaggle.config import ConfigError, load_config
from b2t_kaggle.data.store import TrialStore
from b2t_kaggle.lm.automaton import load_ngram
from b2t_kaggle.metrics import word_error_rate
from b2t_kaggle.pipeline.execute import run_stages
from b2t_kaggle.pipeline.run import Run
from b2t_kaggle.pipeline.stages import plan
from b2t_kaggle.pipeline.stamps import StageRun
from b2t_kaggle.pipeline.submission import validate_submission
from b2t_kaggle.rescoring.hypotheses import Hypotheses, read_hypotheses, write_hypotheses
from b2t_kaggle.training.history import read_history


@pytest.fixture(scope='module')
def here():
    "Execute stages in this process; returns the names of the executed stages."
    with stages_here() as names: yield names


@pytest.fixture(scope='module')
def finished(tmp_path_factory, here):
    "The finished run of `b2t run --preset audio-llm`."
    tmp = tmp_path_factory.mktemp('audio_llm')
    small = {k: v for k, v in SMALL.items() if not k.startswith('decode.')}
    llm = tiny_audio_llm(tmp/'llm', ['how are you', 'i am fine'])
    small |= {'simulate.train': 12, 'simulate.val': 2, 'simulate.test': 2, 'audio.llm': str(llm),
              'audio.lora_rank': 2, 'generate.max_tokens': 6, 'train.num_training_batches': 3,
              'train.accelerator': 'cpu', 'data.eval_batch_size': 1}
    run = Run(tmp/'runs'/'hears', tmp/'work', cfg=load_config(base='audio-llm', overrides=small))
    run_stages(run)
    assert here == [s for s in plan(run.cfg)] and 'generate' in here and 'decode' not in here
    here.clear()
    return run


def submitted(run): return [row['text'] for row in csv.DictReader((run.dir/'submission.csv').open())]


def test_a_run_ends_in_a_valid_submission(finished):
    test = TrialStore.open(finished.packed_dir/'test.arrow').index
    validate_submission(finished.dir/'submission.csv', test)
    lists = finished.nbest('test')
    assert submitted(finished) == [hyps[0].text for hyps in lists]
    ngram = load_ngram(finished.lm_path)
    for hyps in lists:
        assert all(h.acoustic < 0 and h.total == h.acoustic for h in hyps)
        assert [h.ngram for h in hyps] == [pytest.approx(ngram.score(h.text), abs=1e-6) for h in hyps]


def test_its_error_rate_is_computed_on_whole_sentences(finished):
    val = TrialStore.open(finished.packed_dir/'val.arrow').index
    texts = [hyps[0].text for hyps in finished.nbest('val')]
    metrics = StageRun(finished, 'generate').stamp['metrics']
    assert metrics['WER'] == word_error_rate(val.sentence, texts)
    assert metrics['WER'] == StageRun(finished, 'report').stamp['metrics']['WER']
    assert metrics['empty_val'] == texts.count('')
    history = read_history(finished.dir/'train'/'history.csv')
    assert {'answer', 'ctc', 'grad_encoder', 'grad_projector', 'grad_lora', 'val_wer'} <= set(history)


def test_a_session_without_time_leaves_a_submission(finished, here, tmp_path, monkeypatch):
    """If time runs out, all trials have the sentences of the search. Later sessions add the missing ones, one batch or
    all of them, and give the result of an uninterrupted run. After a kill within a batch, earlier batches are not
    repeated."""
    from b2t_kaggle.pytorch.audio.llm.language_model import AudioLanguageModel
    whole = {split: finished.nbest(split) for split in ('val', 'test')}
    shutil.copytree(finished.dir, tmp_path/'run')
    run = Run(tmp_path/'run', finished.work)
    StageRun(run, 'generate').discard()
    batches = []
    search = AudioLanguageModel.search

    def count_batches(*args):
        if len(batches) == 2: raise MemoryError('killed')
        batches.append(1)
        return search(*args)

    monkeypatch.setattr(AudioLanguageModel, 'search', count_batches)

    def with_time(left):
        monkeypatch.setattr(StageRun, 'time_left', lambda stage: left())
        rows = run_stages(run, 'submit')
        validate_submission(run.dir/'submission.csv', TrialStore.open(run.packed_dir/'test.arrow').index)
        return [row['stage'] for row in rows if row['state'] == 'stopped early']

    assert with_time(lambda: 0) == ['generate'] and not batches
    assert StageRun(run, 'generate').stamp['metrics']['not_written'] == 4
    assert with_time(lambda: 0 if batches else 1e9) == ['generate'] and len(batches) == 1
    assert StageRun(run, 'generate').stamp['metrics']['not_written'] == 3
    with pytest.raises(MemoryError, match='killed'): with_time(lambda: 1e9)
    assert StageRun(run, 'generate').status() == 'stopped early'
    batches[:] = [1]*3 # Two more come
    gc.collect() # Frees the failed stage, which releases its lock
    assert with_time(lambda: 1e9) == [] and len(batches) == 5
    for split, lists in whole.items():
        again = run.nbest(split)
        assert [[h.text for h in hyps] for hyps in again] == [[h.text for h in hyps] for hyps in lists]
        assert [hyps[0].total for hyps in again] == [pytest.approx(hyps[0].total) for hyps in lists]
    assert StageRun(run, 'generate').stamp['metrics'] == StageRun(finished, 'generate').stamp['metrics']
    here.clear()


def test_finished_stages_are_not_repeated(finished, here):
    run_stages(finished)
    assert here == []
    run_stages(Run(finished.dir, finished.work, {'generate.max_tokens': 7}), 'submit')
    assert here == ['generate', 'submit']
    here.clear()


def test_its_lists_are_combined_with_other_systems(finished, here, tmp_path):
    for split in ('val', 'test'):
        own = read_hypotheses(finished.hypotheses(split))
        entries = {t: [replace(e, system='theirs') for e in some] for t, some in own.entries.items()}
        write_hypotheses(tmp_path/f'theirs_{split}.jsonl', Hypotheses(own.trials, entries))
    sources = [str(tmp_path/f'theirs_{split}.jsonl') for split in ('val', 'test')]
    combined = Run(finished.dir, finished.work, {'combine.sources': sources})
    before = submitted(finished)
    run_stages(combined, 'submit')
    assert here[-2:] == ['combine', 'submit'] and submitted(combined) == before


REFUSED = [('train.framework', 'tensorflow'), ('train.cr_ctc', .2),
           ('train.weight_average', 'ema'), ('infer.logits', ['val.arrow']), ('infer.adapt', 'dietcorp')]


@pytest.mark.parametrize('key, value', REFUSED)
def test_settings_that_an_audio_llm_does_not_support(key, value):
    with pytest.raises(ConfigError, match=rf'audio\.llm .*{key}|{key} .*audio\.llm'):
        load_config(base='audio-llm', overrides={key: value})
