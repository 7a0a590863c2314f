"""Steps that change sentences are kept only if they help on val, and their figures are the same everywhere. The LLMs
are random ones, which hurt, and oracles, which help."""
import csv
import shutil
from dataclasses import replace

import jiwer
import numpy as np
import pytest
from rapidfuzz.distance import Levenshtein
from test_pipeline import SMALL, command, shares, spelled_in_noise, stages_here, wer_of_lists

from b2t_kaggle.data.store import TrialStore
from b2t_kaggle.metrics.bootstrap import bootstrap_difference
from b2t_kaggle.metrics.comparison import read_results
from b2t_kaggle.phonemes import normalize_sentence
from b2t_kaggle.pipeline import decoder as decoders
from b2t_kaggle.pipeline.decoder import open_decoder
from b2t_kaggle.pipeline.execute import run_stages
from b2t_kaggle.pipeline.results import RESULTS
from b2t_kaggle.pipeline.run import Run
from b2t_kaggle.pipeline.stamps import StageRun
from b2t_kaggle.rescoring.hypotheses import Entry, Hypotheses, read_hypotheses, write_hypotheses

pytest.importorskip('transformers', reason='needs transformers: pip install b2t_kaggle[llm]')
from tiny_models import tiny_lm  # noqa: E402

VALUES = SMALL | {'simulate.val': 20, 'simulate.lm_sentences': 3000, 'decode.tune': False, 'decode.nbest': 20}
# A mixture with only the LLM; the other weights are 0
LLM_ALONE = {'rescore.tune': False, 'rescore.alpha': 1, 'rescore.acoustic_scale': 0, 'rescore.swaps': 0}


@pytest.fixture(scope='module')
def noisy_run(tmp_path_factory):
    "A run with noisy log-probabilities of the spoken sentences, and a random language model."
    tmp = tmp_path_factory.mktemp('gain')
    with stages_here():
        run = Run(tmp/'runs'/'plain', tmp/'data', VALUES)
        run_stages(run, 'pack')
        stores = spelled_in_noise(run, tmp)[:2]
        run = Run(run.dir, run.work, {'infer.logits': stores})
        run_stages(run)
    tiny_lm(tmp/'lm', 'opt', ['a few words'], max_position_embeddings=512)
    return run, tmp/'lm'


@pytest.fixture
def variant(noisy_run, tmp_path):
    "A function that copies the run, changes values, and executes it."
    def made(folder, values):
        shutil.copytree(noisy_run[0].dir, tmp_path/folder/'plain')
        run = Run(tmp_path/folder/'plain', noisy_run[0].work, values)
        with stages_here(): run_stages(run)
        return run
    return made


def spoken(run): return [normalize_sentence(s) for s in TrialStore.open(run.packed_dir/'val.arrow').index.sentence]


def best(run, stage=None): return [hyps[0].text for hyps in run.nbest('val', stage)]


def lists(run, stage): return [run.nbest_path(split, stage).read_bytes() for split in ('val', 'test')]


class Oracle:
    "Scores of sentences, or of words in the search, by a model that knows the reference."
    weight = 1.
    every = 1

    def __init__(self, run): self.known = [s.split() for s in spoken(run)]

    def score(self, model, tokenizer, texts, **options):
        return np.array([-9.*min(Levenshtein.distance(t.split(), known) for known in self.known) for t in texts])

    def begin(self, words): return OracleOfTrial(words, list(map(tuple, self.known)))


class OracleOfTrial:
    "Scores of word histories in a trial: leaving the reference costs nine nats once, and so does ending too early."
    def __init__(self, words, known):
        self.words = words
        self.known = set(known)
        self.beginnings = {k[:n] for k in known for n in range(len(k) + 1)}
        self.texts = {0: ()}

    def score(self, histories, parents, words):
        for h, parent, w in zip(histories, parents, words): self.texts[h] = (*self.texts[parent], self.words[w])
        leaves = [self.texts[p] in self.beginnings and self.texts[h] not in self.beginnings
                  for h, p in zip(histories, parents)]
        return -9.*np.array(leaves)

    def end(self, histories):
        return -9.*np.array([self.texts[h] in self.beginnings - self.known for h in histories])

    def keep(self, histories): pass


def check_figures(run, stage, kept):
    "Check that stamp, lists, CSV, results, page and commands agree with jiwer and the bootstrap."
    figures = StageRun(run, stage).stamp['metrics']
    wer = wer_of_lists(run, stage)
    assert figures['kept'] == kept and figures['WER'] == pytest.approx(wer)
    assert figures['WER'] == figures['after' if kept else 'before'] and figures['trials'] == len(spoken(run))
    assert figures['difference'][0] == pytest.approx(figures['after'] - figures['before'])
    results = read_results(run.dir/RESULTS)
    assert results.text.to_list() == best(run) and jiwer.wer(spoken(run), best(run)) == pytest.approx(wer)
    assert StageRun(run, 'report').stamp['metrics']['WER'] == pytest.approx(wer)
    assert [row['text'] for row in csv.DictReader((run.dir/'submission.csv').open())] == \
           [hyps[0].text for hyps in run.nbest('test')]
    page = (run.dir/'report.html').read_text()
    row = page[page.index('<h2>Gains</h2>'):]
    row = row[:row.index('</table>')]
    assert f'<td>{stage}</td>' in row and ('>yes<' in row) == kept
    for rate in (figures['before'], figures['after']): assert any(abs(s - rate) < 6e-4 for s in shares(row)), row
    for output in (command('runs', '--out', run.dir.parent), command('compare', run.dir, run.dir)):
        assert output.exit_code == 0 and any(abs(s - wer) < 6e-4 for s in shares(output.output)), output.output
    closing = command(stage, '--out', run.dir.parent, '--work', run.work, '--name', run.dir.name)
    line = next(li for li in closing.output.splitlines() if li.startswith(f'{stage}: word error rate on val'))
    assert line.endswith(': kept.') if figures['difference'][0] < 0 else 'no gain' in line
    return figures


def test_rescoring_is_kept_if_it_helps(noisy_run, variant, monkeypatch):
    "A random LLM alone makes sentences worse, so all lists are unchanged. An oracle's lists are those of `always`."
    run, lm = noisy_run
    hurt = variant('hurt', LLM_ALONE | {'rescore.llm': str(lm)})
    figures = check_figures(hurt, 'rescore', kept=False)
    assert figures['after'] > figures['before'] == pytest.approx(wer_of_lists(run, 'decode'))
    assert lists(hurt, 'rescore') == lists(run, 'decode')
    forced = variant('forced', LLM_ALONE | {'rescore.llm': str(lm), 'rescore.keep': 'always'})
    again = check_figures(forced, 'rescore', kept=True)
    assert all(again[k] == figures[k] for k in ('before', 'after', 'difference'))
    assert figures['difference'] == list(bootstrap_difference(spoken(run), best(run), best(forced)))
    assert [h.llm for hyps in forced.nbest('test') for h in hyps if h.text][0] < 0

    monkeypatch.setattr('b2t_kaggle.lm.causal.score_sentences', Oracle(run).score)
    helped, always = (variant(keep, LLM_ALONE | {'rescore.llm': str(lm), 'rescore.keep': keep, 'rescore.tune': True})
                      for keep in ('gain', 'always'))
    figures = check_figures(helped, 'rescore', kept=True)
    assert figures['after'] < figures['before'] and lists(helped, 'rescore') == lists(always, 'rescore')
    assert '; cross-validated</span>' in (helped.dir/'report.html').read_text()


def test_an_llm_that_fails_late_leaves_the_sentences_of_the_search(noisy_run, variant, monkeypatch, capsys):
    "The sentences of the search are submitted, the failure is reported, and the next run tries again."
    run, lm = noisy_run
    def fails(*args, **options): raise RuntimeError('CUDA out of memory')
    with monkeypatch.context() as m:
        m.setattr('b2t_kaggle.lm.causal.score_sentences', fails)
        broken = variant('broken', LLM_ALONE | {'rescore.llm': str(lm)})
    stamp = StageRun(broken, 'rescore').stamp
    assert not stamp['finished'] and stamp['metrics']['failed'] == 'RuntimeError: CUDA out of memory'
    assert 'The LLM failed (RuntimeError: CUDA out of memory)' in capsys.readouterr().err
    assert lists(broken, 'rescore') == lists(run, 'decode')
    assert [row['text'] for row in csv.DictReader((broken.dir/'submission.csv').open())] == \
           [hyps[0].text for hyps in run.nbest('test')]
    again = Run(broken.dir, broken.work)
    with stages_here(): run_stages(again)
    assert StageRun(again, 'rescore').stamp['finished']


def test_an_llm_in_the_search_is_kept_if_it_helps(noisy_run, variant, monkeypatch):
    """If the LLM does not help, lists are those of a run without it, and opened decoders have no LLM. With weight 0
    there is no LLM, and nothing to compare."""
    run, lm = noisy_run
    hurt = variant('hurt', {'decode.llm': str(lm), 'decode.llm_weight': 9})
    figures = check_figures(hurt, 'decode', kept=False)
    assert figures['after'] > figures['before'] == pytest.approx(wer_of_lists(run, 'decode'))
    assert lists(hurt, 'decode') == lists(run, 'decode') and open_decoder(hurt).options.fusion is None
    forced = variant('forced', {'decode.llm': str(lm), 'decode.llm_weight': 9, 'rescore.keep': 'always'})
    check_figures(forced, 'decode', kept=True)
    assert open_decoder(forced).options.fusion.weight == 9
    without = variant('without', {'decode.llm': str(lm), 'decode.llm_weight': 0})
    assert lists(without, 'decode') == lists(run, 'decode')
    assert StageRun(without, 'decode').stamp['metrics'].keys() == {'WER'}

    monkeypatch.setattr(decoders, '_fusion', lambda run: Oracle(run))
    wide = {'decode.llm': str(lm), 'decode.lm_weight': 0, 'decode.beam': 300, 'decode.threshold': 60}
    helped, always = (variant(keep, wide | {'rescore.keep': keep}) for keep in ('gain', 'always'))
    figures = check_figures(helped, 'decode', kept=True)
    assert figures['after'] < figures['before'] and lists(helped, 'decode') == lists(always, 'decode')


def test_a_combination_is_kept_if_it_helps(noisy_run, variant, tmp_path):
    "Five voters that are always wrong outvote the run; a voter that knows val does not."
    run, _ = noisy_run
    def write(name, split, sentence):
        "Write hypotheses of a system that always gives the same sentence, or on val the reference."
        trials = read_hypotheses(run.hypotheses(split)).trials
        entries = {t: [Entry(t, sentence or trial.reference or 'what is it', name)] for t, trial in trials.items()}
        write_hypotheses(tmp_path/f'{name}_{split}.jsonl', Hypotheses(trials, entries))
        return str(tmp_path/f'{name}_{split}.jsonl')

    bad = [write(f'bad{k}', split, f'no {"word "*k}') for k in range(5) for split in ('val', 'test')]
    hurt = variant('hurt', {'combine.sources': bad})
    figures = check_figures(hurt, 'combine', kept=False)
    assert figures['after'] >= figures['before']
    assert best(hurt) == best(run) and [h[0].text for h in hurt.nbest('test')] == [h[0].text for h in run.nbest('test')]
    assert lists(hurt, 'combine') == lists(run, 'decode')
    good = variant('good', {'combine.sources': [write('good', split, '') for split in ('val', 'test')]})
    figures = check_figures(good, 'combine', kept=True)


def test_a_run_of_the_same_name_is_a_separate_system(noisy_run, variant, tmp_path):
    "Every run computed on Kaggle is called run."
    run, _ = noisy_run
    other = Run(tmp_path/'input'/'plain', run.work, {'infer.logits': run.cfg.infer.logits})
    for split in ('val', 'test'):
        own = read_hypotheses(run.hypotheses(split))
        truth = {t: [replace(entries[0], text=own.trials[t].reference or 'what is it')]
                 for t, entries in own.entries.items()}
        write_hypotheses(other.hypotheses(split), Hypotheses(own.trials, truth))
    together = variant('together', {'combine.sources': str(other.dir)})
    assert check_figures(together, 'combine', kept=True)['systems'] == 2
    assert {h[0].text for h in together.nbest('test')} == {'what is it'}
