"""The whole pipeline through papermill and the command line: a run, its repetition, a kill, changed parameters, and
broken input."""

import csv
import json
import os
import re
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from unittest.mock import patch

import jiwer
import numpy as np
import psutil
import pytest
import yaml
from checkouts import ROOT, cells_of_page
from click.testing import CliRunner
from killed import LIMIT

from b2t_kaggle.cli import command as cli
from b2t_kaggle.config import preset
from b2t_kaggle.data.store import TrialStore
from b2t_kaggle.decoding.calibration import read_record
from b2t_kaggle.logits import LogitError, LogitStore
from b2t_kaggle.metrics.comparison import read_results
from b2t_kaggle.phonemes import normalize_sentence
from b2t_kaggle.pipeline import execute as pipeline
from b2t_kaggle.pipeline.decoder import open_decoder
from b2t_kaggle.pipeline.execute import run_stages
from b2t_kaggle.pipeline.results import RESULTS
from b2t_kaggle.pipeline.run import Run
from b2t_kaggle.pipeline.stages import STAGES, PipelineError, notebook_path, plan
from b2t_kaggle.pipeline.stamps import StageRun
from b2t_kaggle.rescoring.hypotheses import Entry, Hypotheses, read_hypotheses, write_hypotheses

# Small enough for seconds, large enough that every stage has work to do
SMALL = {
    'simulate.n_sessions': 2,
    'simulate.train': 24,
    'simulate.val': 4,
    'simulate.test': 4,
    'simulate.lm_sentences': 400,
    'model.n_units': 16,
    'model.n_layers': 1,
    'data.batch_size': 4,
    'data.days_per_batch': 2,
    'train.num_training_batches': 6,
    'train.processes': 1,
    'train.batches_per_val_step': 3,
    'train.batches_per_save': 2,
    'train.lr_warmup_steps': 2,
    'train.lr_warmup_steps_day': 2,
    'decode.beam': 20,
}

PLAN = plan(preset('demo'))


def b2t(*args, **kw):
    "Run the command in a separate process."
    return subprocess.run(
        [sys.executable, '-m', 'b2t_kaggle.cli', *map(str, args)], capture_output=True, text=True, timeout=600, **kw
    )


def command(*args):
    "Run the command in this process."
    return CliRunner().invoke(cli.main, list(map(str, args)))


def execute_here(run, name):
    "Execute the code of a stage's notebook in this process, which is seconds faster than a separate kernel."
    import matplotlib
    matplotlib.use('Agg')
    variables = dict(run_dir=str(run.dir), work_dir=str(run.work), overrides=run.unsaved())
    cells = json.loads(notebook_path(name).read_text())['cells']
    for code in (''.join(c['source']) for c in cells if c['cell_type'] == 'code'):
        if not code.startswith('run_dir ='): exec(code, variables)


@contextmanager
def stages_here():
    "Execute stages in this process; yields the names of the executed stages."
    names = []
    def execute(run, name):
        names.append(name)
        execute_here(run, name)
    with pytest.MonkeyPatch.context() as m:
        m.setattr(pipeline, 'execute', execute)
        yield names


@pytest.fixture
def here():
    with stages_here() as names: yield names


def sets(values): return [a for k, v in values.items() for a in ('--set', f'{k}={v}')]


def stamps(run_dir):
    "The time at which each stage last finished."
    return {p.stem: p.stat().st_mtime_ns for p in (run_dir/'stages').glob('*.json')}


@pytest.fixture(scope='module')
def finished(tmp_path_factory):
    "A complete small run: its folder, and the options that made it."
    tmp = tmp_path_factory.mktemp('runs')
    options = ['--out', tmp/'submissions', '--work', tmp/'data', '--name', 'small']
    r = b2t('run', *options, *sets(SMALL))
    assert r.returncode == 0, r.stderr[-3000:]
    return tmp/'submissions'/'small', options, r


def test_a_run_leaves_everything(finished):
    run, _, r = finished
    assert str(run/'submission.csv') in r.stdout
    what = 'Simulated participant, preset demo, 6 batches.' # The expected WER is only for the demo's values
    assert what in r.stderr and what in r.stdout and what in (run/'report.html').read_text()
    rows = list(csv.DictReader((run/'submission.csv').open()))
    assert [row['id'] for row in rows] == [str(i) for i in range(4)]   # the first session has no test trials
    assert (run/'report.html').stat().st_size > 10_000
    assert sorted(p.stem[3:] for p in (run/'notebooks').glob('*.ipynb')) == sorted(PLAN)
    assert yaml.safe_load((run/'config.yaml').read_text())['model']['n_units'] == 16
    metrics = {p.stem: json.loads(p.read_text())['metrics'] for p in (run/'stages').glob('*.json')}
    assert 0 < metrics['infer']['PER'] <= 2 and 0 <= metrics['decode']['WER'] <= 2


def test_a_plugin_trains_a_variant(finished, tmp_path, monkeypatch):
    "A loss, an augmentation and a stage from a file; without `--plugin` the run does not execute its code."
    base, options, _ = finished
    file, pages = tmp_path/'mine.py', dict(your_own_idea='plugin', adding_a_stage='stage')
    cells = [cell for page, tag in pages.items() for cell in cells_of_page(ROOT/f'nbs/guides/{page}.ipynb', tag)]
    file.write_text('\n'.join(cells))
    executed, by_papermill = [], pipeline.execute
    def execute(run, name):
        executed.append(name)
        (by_papermill if name == 'risk' else execute_here)(run, name)
    monkeypatch.setattr(pipeline, 'execute', execute)
    mine = [*options[:-1], 'mine']
    with patch.dict(os.environ), patch.dict(STAGES):
        r = command('run', *mine, '--from', 'small', '--plugin', file)
        assert r.exit_code == 0 and executed == 'train infer decode risk submit report'.split(), r.output
    columns = (base.parent/'mine'/'train'/'history.csv').read_text().splitlines()[0].split(',')
    assert {'change', 'val_change'} <= set(columns)
    r = command('run', *mine)
    assert r.exit_code == 1 and f'add --plugin {file}' in r.output, r.output
    file.write_text(file.read_text() + '\n# Another text\n')
    with patch.dict(os.environ), patch.dict(STAGES):
        r = command('train', *mine, '--plugin', file)
        assert executed[6:] == ['train'] and 'parameters changed: plugin/mine.py' in r.output, r.output


def test_a_plugin_with_only_a_stage_trains_nothing(finished, tmp_path, monkeypatch):
    "Neither when it is added to a run, nor when its file is edited."
    _, options, _ = finished
    for name in 'train', 'infer': monkeypatch.setattr(STAGES[name], 'uses_plugin', True) # It is restored
    file = tmp_path/'risk.py'
    file.write_text('\n'.join(cells_of_page(ROOT/'nbs/guides/adding_a_stage.ipynb', 'stage')))
    executed = []
    monkeypatch.setattr(pipeline, 'execute', lambda run, name: (executed.append(name), execute_here(run, name)))
    mine = [*options[:-1], 'risk', '--plugin', file]
    with patch.dict(os.environ), patch.dict(STAGES):
        r = command('train', *mine, '--from', 'small')
        assert r.exit_code == 0 and executed == [], r.output
        file.write_text(file.read_text() + '\n# Another text\n')
        r = command('train', *mine)
        assert r.exit_code == 0 and executed == [], r.output


def test_finished_stages_are_not_repeated(finished):
    run, options, _ = finished
    before = stamps(run)
    r = command('run', *options)
    assert r.exit_code == 0, r.output
    assert r.stdout.count('skipped, nothing changed') == len(PLAN)
    assert stamps(run) == before


def test_a_changed_value_redoes_what_depends_on_it(finished, here):
    run, options, _ = finished
    before = stamps(run)
    r = command('run', *options, '--set', 'decode.beam=5')
    assert r.exit_code == 0, r.output
    after = stamps(run)
    assert {n for n in after if after[n] != before[n]} == {'decode', 'submit', 'report'}


def test_same_seed_same_csv(finished, tmp_path, here):
    "Whether stages are executed in separate kernels or in this process."
    run, options, _ = finished
    folders = ['--out', tmp_path, '--work', tmp_path/'data', '--name', 'again']
    r = command('submit', *folders, *sets(SMALL | {'decode.beam': 5}))
    assert r.exit_code == 0 and here == [name for name in PLAN if name != 'report'], r.output[-3000:]
    command('run', *options, '--set', 'decode.beam=5')
    assert (tmp_path/'again'/'submission.csv').read_bytes() == (run/'submission.csv').read_bytes()


# Kernels execute it before their cells: training cannot save a second checkpoint
HOLDS = '''
import sys, time
checkpoints = []
def hold(event, args):
    if event != 'os.rename' or not str(args[1]).endswith('/train/last.pt'): return
    checkpoints.append(args[1])
    while len(checkpoints) == 2: time.sleep(1)
sys.addaudithook(hold)
'''


def test_a_killed_run_continues(finished, tmp_path, here):
    from b2t_kaggle.pytorch.checkpoint import load_file
    run, options, _ = finished
    startup = tmp_path/'ipython'/'profile_default'/'startup'
    startup.mkdir(parents=True)
    (startup/'hold.py').write_text(HOLDS)
    work = run.parent.parent/'data'
    longer = SMALL | {'train.num_training_batches': 60, 'train.batches_per_save': 1}
    args = ['infer', '--out', str(tmp_path), '--work', str(work), '--name', 'killed', *sets(longer)]
    p = subprocess.Popen(
        [sys.executable, '-m', 'b2t_kaggle.cli', *args], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        env=os.environ | {'IPYTHONDIR': str(tmp_path/'ipython')}
    )
    last = tmp_path/'killed'/'train'/'last.pt'
    end = time.monotonic() + LIMIT
    while not last.exists():
        assert p.poll() is None and time.monotonic() < end, 'it has not come to a checkpoint'
        time.sleep(.05)
    started = psutil.Process(p.pid).children(recursive=True)
    p.kill() # Kill the command first, or it would report the dead kernel
    p.wait()
    for q in started: # Also the kernel, which trains; they may have ended with the command
        with suppress(psutil.NoSuchProcess): q.kill()
    assert not psutil.wait_procs(started, timeout=LIMIT)[1]
    stage = StageRun(Run(tmp_path/'killed', work), 'train')
    assert stage.status() == 'was interrupted' and load_file(last)['step'] == 1
    r = command(*args)
    assert r.exit_code == 0 and here == ['train', 'infer'], r.output[-3000:]
    assert 'train: train the acoustic model (was interrupted)' in r.stderr
    assert json.loads(stage.stamp_path.read_text())['metrics']['steps'] == 60


def test_a_stage_by_plain_papermill(finished, tmp_path):
    run, _, _ = finished
    import papermill as pm

    pm.execute_notebook(
        notebook_path('check'),
        tmp_path / 'check.ipynb',
        dict(run_dir=str(run), work_dir=str(run.parent.parent / 'data')),
        kernel_name='python3',
        progress_bar=False,
    )
    assert StageRun(Run(run, run.parent.parent/'data'), 'check').status() == 'done'


def test_an_official_checkpoint_is_used_without_training(finished, tmp_path, here):
    """A folder of the official kit (args.yaml, best_checkpoint) gives the same log-probabilities as the checkpoint that
    it was made from."""
    from b2t_kaggle.pytorch.checkpoint import load_model, save_official
    run, _, _ = finished
    official = save_official(*load_model(run/'train'/'best.pt'), tmp_path/'t15_pretrained_rnn_baseline')
    r = command(
        'infer',
        '--out',
        tmp_path,
        '--work',
        run.parent.parent / 'data',
        '--name',
        'given',
        '--checkpoint',
        official,
        *sets(SMALL),
    )
    assert r.exit_code == 0 and here == ['infer'], r.output[-3000:]
    assert 'train' not in stamps(tmp_path/'given')
    ours, theirs = (LogitStore.open(d/'logits'/'val.arrow') for d in (run, tmp_path/'given'))
    for i in range(len(ours)): np.testing.assert_allclose(theirs[i], ours[i], atol=1e-5)


def test_a_failing_stage_says_why(finished, tmp_path):
    run, _, _ = finished
    broken = tmp_path/'broken'/'t15.2023.08.11'
    broken.mkdir(parents=True)
    (broken/'data_train.hdf5').write_bytes(b'not an HDF5 file')
    r = b2t(
        'run', '--data', broken.parent, '--out', tmp_path, '--work', tmp_path/'data', '--preset', 'demo',
        '--set', 'data.days_per_batch=1',
    )
    assert r.returncode == 1
    assert 'stage check failed' in r.stderr and 'data_train.hdf5' in r.stderr
    assert 'Traceback (most recent call last)' not in r.stderr
    r = b2t('data', 'check', broken.parent)
    assert r.returncode == 1 and 'data_train.hdf5' in r.stdout


def test_output_of_a_stages_processes_is_printed_once(tmp_path):
    "An example is the progress bar of a training in two processes."
    script = """
import nbformat
from pathlib import Path
from b2t_kaggle.pipeline import execute as pipeline
from b2t_kaggle.pipeline.run import Run

code = "import subprocess, sys; subprocess.run(['sh', '-c', 'echo a process >&2']); print('a cell', file=sys.stderr)"
notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
notebook.metadata.kernelspec = dict(name='python3', display_name='Python 3', language='python')
nbformat.write(notebook, '00_code.ipynb')
pipeline.notebook_path = lambda name: Path('00_code.ipynb')
pipeline.execute(Run('run', '.'), 'code')
"""
    r = subprocess.run([sys.executable, '-c', script], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert r.returncode == 0, r.stderr
    assert [line for line in r.stderr.splitlines() if line in ('a process', 'a cell')] == ['a process', 'a cell']


def test_the_official_configuration_runs_as_it_is(finished, tmp_path, here):
    """rnn_args.yaml with its own sessions and official sizes is accepted; only values that are too large for a small
    machine are overridden."""
    run, _, _ = finished
    official = dict(
        model=dict(
            n_input_features=512,
            n_units=768,
            rnn_dropout=0.4,
            rnn_trainable=True,
            n_layers=5,
            patch_size=14,
            patch_stride=4,
            input_network=dict(
                n_input_layers=1, input_layer_sizes=[512], input_trainable=True, input_layer_dropout=0.2
            ),
        ),
        gpu_number='1',
        mode='train',
        use_amp=True,
        output_dir='trained_models/baseline_rnn',
        num_training_batches=120000,
        lr_scheduler_type='cosine',
        lr_max=0.005,
        lr_min=0.0001,
        lr_decay_steps=120000,
        lr_warmup_steps=1000,
        epsilon=0.1,
        dataset=dict(
            data_transforms=dict(
                white_noise_std=1.0,
                constant_offset_std=0.2,
                random_cut=3,
                smooth_kernel_size=100,
                smooth_data=True,
                smooth_kernel_std=2,
            ),
            batch_size=64,
            days_per_batch=4,
            dataset_dir='../data/hdf5_data_final',
            bad_trials_dict=None,
            sessions=['t15.2023.08.11', 't15.2023.08.13'],
            dataset_probability_val=[0, 1],
        ),
    )
    (tmp_path/'rnn_args.yaml').write_text(yaml.safe_dump(official))
    small = Run(run, run.parent.parent/'data')
    r = command(
        'train',
        '--config',
        tmp_path / 'rnn_args.yaml',
        '--data',
        small.data_dir,
        '--out',
        tmp_path,
        '--work',
        tmp_path / 'data',
        *sets(dict(num_training_batches=2, batch_size=4, days_per_batch=2, n_units=32)),
    )
    assert r.exit_code == 0 and here == ['check', 'pack', 'train'], r.output[-3000:]
    assert yaml.safe_load((tmp_path/'rnn_args'/'config.yaml').read_text())['train']['lr_decay_steps'] == 120000


def test_plan_and_presets_agree():
    assert PLAN == [s for s in STAGES if s not in ('ensemble', 'generate', 'rescore', 'combine')]


def test_two_runs_share_large_files(tmp_path):
    """If two runs start at the same time on one work folder, one simulates and packs; the other waits and uses the
    result."""
    args = lambda name: [
        sys.executable,
        '-m',
        'b2t_kaggle.cli',
        'pack',
        '--out',
        str(tmp_path),
        '--work',
        str(tmp_path / 'data'),
        '--name',
        name,
        *sets(SMALL),
    ]
    both = [
        subprocess.Popen(args(n), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for n in ('one', 'two')
    ]
    outputs = [p.communicate(timeout=600) for p in both]
    assert [p.returncode for p in both] == [0, 0], outputs
    assert sum(err.count('── simulate') for _, err in outputs) == 1
    assert sum(err.count('── pack') for _, err in outputs) == 1


def test_an_llm_reranks_and_the_submission_follows(finished, tmp_path):
    "The language model is tiny; without an LLM in the configuration, the stage does not exist."
    pytest.importorskip('transformers', reason='needs transformers: pip install b2t_kaggle[llm]')
    from tiny_models import tiny_lm

    from b2t_kaggle.rescoring.mixture import read_weights
    run, options, _ = finished
    decoded = [h[0]['text'] for h in map(json.loads, (run/'nbest_val.jsonl').read_text().splitlines())]
    values = {'rescore.llm': tiny_lm(tmp_path/'lm', 'opt', decoded or ['a']),
              'rescore.keep': 'always'}
    with stages_here() as here:
        r = command('submit', *options, *sets(values))
        assert r.exit_code == 0 and here == ['rescore', 'submit'], r.output[-3000:]
    r = command('report', *options)
    assert r.exit_code == 0, r.output[-3000:]
    wers = [json.loads((run/'stages'/f'{name}.json').read_text())['metrics']['WER'] for name in ('rescore', 'report')]
    assert wers[0] == wers[1], 'the report does not have the cross-validated figure'
    assert '; cross-validated</span>' in (run/'report.html').read_text()
    lists, before = (
        [json.loads(line) for line in (run / f'{name}_test.jsonl').read_text().splitlines()]
        for name in ('rescored', 'nbest')
    )
    w = read_weights(run/'rescore_weights.json')
    for hyps, old in zip(lists, before, strict=True):
        best = next((h for h in old if h['text']), old[0]) # The LLM scores an empty sentence only if there is no other
        alpha = w.alpha if best['ngram']/max(1, best['n_words']) >= w.gate else 0
        assert {h['text'] for h in old} - {''} <= {h['text'] for h in hyps}
        for h in hyps:
            assert h['llm'] < 0 < len(h['text'].split()) < h['n_tokens'] if h['text'] else h['llm'] == 0
            assert h['total'] == pytest.approx(
                w.acoustic_scale * h['acoustic']
                + (1 - alpha) * h['ngram']
                + alpha * (h['llm'] - w.length_penalty * h['n_tokens'])
                + w.word_score * h['n_words']
            )
        assert hyps[0]['total'] == max(h['total'] for h in hyps)
    assert w.length_penalty == 0
    assert [row['text'] for row in csv.DictReader((run/'submission.csv').open())] == [hyps[0]['text'] for hyps in lists]
    without = sets({'rescore.llm': 'null', 'rescore.keep': 'gain'})
    r = command('rescore', *options, *without)
    assert r.exit_code == 1 and 'rescore.llm, the language model to ask, is not set' in r.stderr
    with stages_here() as here:
        r = command('report', *options, *without)
        assert r.exit_code == 0 and here == ['submit', 'report'], r.output


def test_serving_a_run(finished, tmp_path, capsys):
    """The official client gets, word by word, the results of the run's own decoder and LLM, with the weights that
    rescoring stored or, without these, the configured ones."""
    if not shutil.which('redis-server'): pytest.skip('redis-server is not installed')
    pytest.importorskip('redis', reason='needs redis-py: pip install b2t_kaggle[serve]')
    pytest.importorskip('transformers', reason='needs transformers: pip install b2t_kaggle[llm]')
    from test_server import OfficialClient, Redis, candidates, wait_for
    from tiny_models import tiny_lm

    from b2t_kaggle.cli.serve import _llm
    from b2t_kaggle.decoding.server import read_logits
    from b2t_kaggle.lm.causal import load_lm, score_sentences
    from b2t_kaggle.phonemes import build_lexicon, to_class_ids, to_lm_order
    from b2t_kaggle.rescoring.mixture import Weights, configured_weights, write_weights
    path, options, _ = finished
    lm = tiny_lm(tmp_path/'lm', 'opt', ['a few words'], max_position_embeddings=512)
    run = Run(path, path.parent.parent/'data', {'rescore.llm': str(lm), 'rescore.alpha': 0.4})
    decoder = open_decoder(run, nbest=100)
    assert _llm(run, decoder).weights == configured_weights(run.cfg.rescore)
    assert 'as configured (stage rescore: ' in capsys.readouterr().err
    stage = StageRun(run, 'rescore').begin()
    write_weights(path/'rescore_weights.json', Weights(acoustic_scale=0.4, alpha=0.3, word_score=0.2))
    stage.finish([path/'rescore_weights.json'])
    where = Redis(tmp_path)
    server = subprocess.Popen(
        [sys.executable, '-m', 'b2t_kaggle.cli', 'serve', *map(str, options), '--port', str(where.port)],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        word = max(decoder.words, key=len)
        ids = to_class_ids([p for k in (*build_lexicon([word])[word][0], 'SIL') for p in (k, 'BLANK')])
        trials = [*LogitStore.open(path/'logits'/'val.arrow'), np.log(np.where(np.eye(41)[ids], 0.9, 0.0025))]
        with where.client() as r:
            wait_for(lambda: r.exists('remote_lm_args') or server.poll() is not None, seconds=400)
            assert server.poll() is None, server.stderr.read()[-3000:]
            client = OfficialClient(r)
            answers = [client.trial(x)[0] for x in trials]
        model, tokenizer = load_lm(lm)
        for x, answer in zip(trials, answers):
            rows = candidates(answer)
            nbest = decoder.decode(read_logits(np.float32(to_lm_order(x)).tobytes()))
            assert answer[b'lm_response_final'].decode() == rows[0][0]
            assert {h.text for h in nbest if h.text} <= {row[0] for row in rows}
            np.testing.assert_allclose(
                [row[3] for row in rows], score_sentences(model, tokenizer, [row[0] for row in rows]), atol=1e-3
            )
            for text, acoustic, ngram, llm, total in rows:
                assert total == pytest.approx(0.4 * acoustic + 0.7 * ngram + 0.3 * llm + 0.2 * len(text.split()))
        assert rows[0][3] < 0 and word in [row[0] for row in rows]
        server.terminate()
        assert server.wait(120) == 0
        assert 'from the stage rescore: Weights(acoustic_scale=0.4, alpha=0.3' in server.stderr.read()
    finally:
        server.kill()
        where.stop()
        stage.discard()
        Run(path, run.work, {'rescore.llm': None, 'rescore.alpha': 0.55})


def files_of(folder): return {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in folder.rglob('*') if p.is_file()}


def test_an_ensemble_is_a_separate_run(finished, tmp_path, here):
    "The ensemble decodes the mean of its members' log-probabilities; its members are not changed."
    run, options, _ = finished
    first = {split: LogitStore.open(run/'logits'/f'{split}.arrow') for split in ('val', 'test')}
    rng = np.random.default_rng(0)
    def another(x):
        x = x + rng.normal(size=x.shape).astype(np.float32)
        return x - np.log(np.exp(x).sum(-1, keepdims=True))
    second = {s: [another(x) for x in store] for s, store in first.items()}
    for split, store in first.items():
        LogitStore.write(tmp_path/f'second-{split}.arrow', second[split], store.index, {})
    before = {p: mark for p, mark in files_of(run).items() if p.name != 'config.yaml'}
    # External files: only their names tell val from test
    stores = sorted(tmp_path.glob('second-*.arrow'))
    folders = [*map(str, options[:4]), '--name', 'two']
    done = CliRunner().invoke(cli.main, ['ensemble', 'small', *map(str, stores), *folders])
    assert done.exit_code == 0, done.output
    assert here == ['ensemble', 'lm', 'decode', 'submit', 'report']
    assert {p: mark for p, mark in files_of(run).items() if p in before} == before
    two = run.parent/'two'
    assert len(list(csv.DictReader((two/'submission.csv').open()))) == 4
    for i, x in enumerate(LogitStore.open(two/'ensemble'/'test.arrow')):
        mean = (first['test'][i] + second['test'][i])/2
        np.testing.assert_allclose(x, mean - np.log(np.exp(mean).sum(-1, keepdims=True)), atol=1e-5)
    metrics = json.loads((two/'stages'/'ensemble.json').read_text())['metrics']
    assert metrics['models'] == 2 and metrics['PER'] > 0
    done = CliRunner().invoke(cli.main, ['run', *folders])
    assert done.exit_code == 0 and len(here) == 5, done.output


def test_a_refit_and_an_average_with_weights(finished, tmp_path, here):
    "Val uses the model that has not seen it, and test the refitted one; an average with another run has weights."
    run, _, _ = finished
    work = run.parent.parent/'data'
    alone = {'data.eval_batch_size': 1} # As adaptation infers trials; in larger batches they are rounded differently
    refit = Run(tmp_path/'refit', work, SMALL | alone | {'train.refit': 0.5, 'train.weight_average': 'swa'})
    run_stages(refit, 'infer')
    models = {split: LogitStore.open(refit.logits(split)).provenance['checkpoint'] for split in ('val', 'test')}
    assert models == dict(val=str(refit.dir/'train'/'best.pt'), test=str(refit.dir/'train'/'refit.pt'))
    assert set(StageRun(refit, 'train').stamp['outputs']) == {'train/best.pt', 'train/refit.pt'}
    given = [str(r/'logits'/f'{split}.arrow') for r in (run, refit.dir) for split in ('val', 'test')]
    both = Run(tmp_path/'both', work, SMALL | {'infer.logits': given, 'infer.weights': [1, 3]})
    run_stages(both, 'ensemble')
    for split in ('val', 'test'): assert LogitStore.open(both.logits(split)).provenance['weights'] == [.25, .75]
    assert StageRun(both, 'ensemble').stamp['metrics']['PER'] > 0
    del here[:]
    plain = LogitStore.open(refit.logits('val'))[0]
    adapting = Run(refit.dir, work, {'infer.adapt': 'dietcorp', 'infer.adapt_copies': 2})
    run_stages(adapting, 'infer')
    assert here == ['lm', 'infer']
    found = LogitStore.open(adapting.logits('test')).provenance
    assert found['checkpoint'] == models['test'] and found['adapt'] == 'dietcorp'
    assert StageRun(adapting, 'infer').stamp['metrics']['learned_test'] == found['learned']
    # The first trial is inferred before the model has learned from any
    np.testing.assert_array_equal(LogitStore.open(adapting.logits('val'))[0], plain)


def test_other_systems_are_combined_with_a_run(finished, tmp_path, here):
    """A system that is right on val is trusted on test. Finished stages are kept, and changed inputs are combined
    again. Without val, all systems have one vote."""
    run, _, _ = finished
    work = run.parent.parent/'data'
    shutil.copytree(run, tmp_path/'two')
    def write(split, name='theirs', sentence='the sentence {}'):
        "Write hypotheses of a system that knows val, and names each trial of test."
        h = read_hypotheses(run/'hypotheses'/f'decode_{split}.jsonl')
        texts = {t: trial.reference or sentence.format('abcd'[int(t)]) for t, trial in h.trials.items()}
        entries = {t: [Entry(t, text, name)] for t, text in texts.items()}
        write_hypotheses(tmp_path/f'{name}_{split}.jsonl', Hypotheses(h.trials, entries))
        return str(tmp_path/f'{name}_{split}.jsonl')
    def submitted(): return [row['text'] for row in csv.DictReader((tmp_path/'two'/'submission.csv').open())]

    sources = [str(run), write('val'), write('test')]
    two = Run(tmp_path/'two', work, {'decode.beam': 6, 'combine.sources': sources})
    run_stages(two)
    assert here == ['decode', 'combine', 'submit', 'report']
    assert submitted() == [f'the sentence {name}' for name in 'abcd']
    metrics = StageRun(two, 'combine').stamp['metrics']
    assert metrics['systems'] == 3 and metrics['WER'] <= metrics['before']
    assert StageRun(two, 'report').stamp['metrics']['WER'] == metrics['WER']
    assert read_results(two.dir/RESULTS).text.to_list() == [hyps[0].text for hyps in two.nbest('val')]
    combined = read_hypotheses(two.hypotheses('test'))
    assert combined.voters == [('two', 'gru', 'combination')] and [*combined.trials] == ['0', '1', '2', '3']
    run_stages(two)
    write('test', sentence='another sentence {}')
    run_stages(Run(two.dir, work))
    assert here[4:] == ['combine', 'submit', 'report'] and submitted()[3] == 'another sentence d'

    foreign = tmp_path/'foreign_test.jsonl'
    foreign.write_text('{"trial": 99, "text": "yes"}')
    with pytest.raises(PipelineError, match="1 of their trials of test are not among the 4 of this run, such as '99'"):
        run_stages(Run(two.dir, work, {'combine.sources': [str(foreign)]}), 'combine')
    alone = {'infer.logits': str(run/'logits'/'test.arrow'), 'combine.sources': [write('test', n) for n in 'ab']}
    run_stages(Run(two.dir, work, alone))
    assert submitted() == [f'the sentence {name}' for name in 'abcd'] # Two votes against one
    for _ in range(2): # The given value, then the saved one
        with pytest.raises(PipelineError, match='a run cannot be a source of itself'):
            run_stages(Run(two.dir, work, {'combine.sources': ['two']}), 'combine')
    with pytest.raises(PipelineError, match='stage combine has nothing to do: combine.sources'):
        run_stages(Run(two.dir, work, {'combine.sources': []}), 'combine')


def test_log_probabilities_of_test_alone(finished, tmp_path, here):
    "A run on the log-probabilities of test, for example another team's, makes a submission without error rates."
    run, _, _ = finished
    shutil.copytree(run, tmp_path/'run')
    theirs = Run(tmp_path/'run', run.parent.parent/'data', {'infer.logits': str(run/'logits'/'test.arrow')})
    run_stages(theirs)
    assert here == ['ensemble', 'decode', 'submit', 'report']
    assert (theirs.logits('test').read_bytes(), theirs.splits) == ((run/'logits'/'test.arrow').read_bytes(), ['test'])
    assert StageRun(theirs, 'decode').stamp['metrics'] == StageRun(theirs, 'report').stamp['metrics'] == {}
    assert len(list(csv.DictReader((theirs.dir/'submission.csv').open()))) == 4


def test_log_probabilities_of_other_trials_are_refused(finished, tmp_path, here):
    run, _, _ = finished
    store = LogitStore.open(run/'logits'/'val.arrow')
    index = store.index.assign(sentence=['Not what was said.', *store.index.sentence[1:]])
    LogitStore.write(tmp_path/'foreign.arrow', list(store), index, store.provenance)
    theirs = Run(tmp_path/'run', run.parent.parent/'data', SMALL | {'infer.logits': f'{tmp_path}/foreign.arrow'})
    with pytest.raises(LogitError, match=r"foreign.arrow has other trials than .* has sentence 'Not what was said.'"):
        run_stages(theirs, 'decode')


def test_a_finished_run_that_was_moved(finished, tmp_path, here):
    "No stage is repeated, whether the large files are missing or in another place."
    run, _, _ = finished
    config = (run/'config.yaml').read_text()
    shutil.copytree(run, tmp_path/'run', copy_function=shutil.copyfile)
    rows = run_stages(Run(tmp_path/'run', tmp_path/'empty'))
    assert here == [] and {r['state'] for r in rows} == {'not needed', 'skipped, nothing changed'}
    assert (tmp_path/'run'/'config.yaml').read_text() == config
    run_stages(Run(tmp_path/'run', run.parent.parent/'data', {'beam': 6}))
    assert here == ['decode', 'submit', 'report']


def test_a_session_without_time_leaves_a_submission(finished, tmp_path, here, monkeypatch):
    """Without time for val, test is still decoded; a later session does the rest and gives the result of an
    uninterrupted run."""
    run, _, _ = finished
    work = run.parent.parent/'data'
    for name in ('short', 'long'): shutil.copytree(run, tmp_path/name)
    values = {'decode.beam': 30}
    run_stages(Run(tmp_path/'long', work, values))
    here.clear()

    def with_time(seconds, force=()):
        "Run the pending stages; returns the stages that stopped early."
        with monkeypatch.context() as m:
            m.setattr(StageRun, 'time_left', lambda stage: seconds[stage.name])
            rows = run_stages(Run(tmp_path/'short', work, values), force=force)
        rows = [row['stage'] for row in rows if row['state'] == 'stopped early']
        assert len(list(csv.DictReader((tmp_path/'short'/'submission.csv').open()))) == 4
        return rows

    assert with_time(dict(infer=0), force=['infer']) == ['infer']
    short = Run(tmp_path/'short', work)
    assert short.splits == ['test'] and StageRun(short, 'decode').stamp['metrics'] == {}
    before = short.logits('test').stat().st_mtime_ns
    assert with_time(dict(infer=np.inf)) == []
    assert short.logits('test').stat().st_mtime_ns == before # Only val was missing
    assert here == ['infer', 'decode', 'submit', 'report']*2
    for name in ('nbest_val.jsonl', 'nbest_test.jsonl', 'submission.csv'):
        assert (tmp_path/'short'/name).read_text() == (tmp_path/'long'/name).read_text()


def wer_of_lists(run, stage):
    "Word error rate, by jiwer, of the best sentences in a stage's n-best lists of val."
    val = TrialStore.open(run.packed_dir/'val.arrow').index
    best = {i: hyps[0].text for i, hyps in enumerate(run.nbest('val', stage)) if not val.is_instruction[i]}
    return jiwer.wer([normalize_sentence(val.sentence[i]) for i in best], list(best.values()))


def known_tuning(candidate, without):
    "A tuning result with four trials of val: weights tuned on all, and without each fold of the trials."
    from b2t_kaggle.decoding import tuning
    return tuning.Tuning(tuning.SearchWeights(0.8, 1., 1., 0.), candidate, tuple(without),
                         dict(start=9, candidate=5, validated=6), (3,)*len(without), (20//len(without),)*len(without),
                         (0, 1, 2, 3))


def test_lists_have_words_with_times_and_calibrated_confidences(finished, tmp_path, here, monkeypatch):
    """The temperature fitted on val is stored, and used for the lists of both splits and by every decoder that is
    opened; earlier lists can be read, and are decoded again without calibration if there are too few trials."""
    from b2t_kaggle.decoding import calibration
    from b2t_kaggle.pipeline.decoder import known_calibration
    run, _, _ = finished
    shutil.copytree(run, tmp_path/'run')
    own = Run(tmp_path/'run', run.parent.parent/'data', {'decode.beam': 7})
    assert Run(run, own.work).nbest('test')[0][0].posterior > 0 and known_calibration(own) is None
    monkeypatch.setattr(calibration, 'MIN_TRIALS', 4)
    run_stages(own, 'decode')
    found = known_calibration(own)
    decoder = open_decoder(own)
    options = decoder.options
    assert options.temperature == found.temperature and options.frame_ms == 20*own.cfg.model.frame_stride()
    for split in ('val', 'test'):
        for hyps, x in zip(own.nbest(split), LogitStore.open(own.logits(split)), strict=True):
            expected = decoder.decode(x)
            assert hyps == expected and [w[:3] for w in hyps[0].words] == [w[:3] for w in expected[0].words]
            for field in (lambda h: [w.confidence for w in h.words], lambda h: h.posterior):
                assert field(hyps[0]) == pytest.approx(field(expected[0]), rel=1e-5)
    index = TrialStore.open(own.packed_dir/'val.arrow').index
    trials = [(h, normalize_sentence(row.sentence)) for h, row in zip(own.nbest('val'), index.itertuples())
              if not row.is_instruction]
    n_words = sum(h[0].n_words for h, _ in trials)
    n_right = jiwer.process_words([said for _, said in trials], [h[0].text for h, _ in trials]).hits
    shares = [(n, n*right) for n, _, right in found.validated.bins]
    assert np.sum(shares, 0) == pytest.approx((n_words, n_right))
    monkeypatch.undo()
    run_stages(own, 'decode', force=['decode'])
    assert known_calibration(own) is None and open_decoder(own).options.temperature == 1


def test_weights_of_the_search_are_tuned_once(finished, tmp_path, here, monkeypatch):
    "Every decoder that is opened has the tuned weights; with too few trials no weights are tuned."
    from b2t_kaggle.decoding import tuning
    run, _, _ = finished
    shutil.copytree(run, tmp_path/'run')
    tuned = Run(tmp_path/'run', run.parent.parent/'data', {'decode.beam': 7})
    path = tuned.dir/'decode_weights.json'

    def decode(): return run_stages(tuned, 'decode')[-1]['state']

    assert decode() == 'done' and not path.exists()
    plain = StageRun(tuned, 'decode').stamp['metrics']
    assert plain.keys() == {'WER'} and open_decoder(tuned).options.blank_penalty == 1
    monkeypatch.setattr(tuning, 'MIN_TRIALS', 4)
    better = tuning.SearchWeights(0.4, 1., 9., 0.5)
    without = [better._replace(word_score=float(k)) for k in (-2, 3)] # For trials 0 and 2, and for 1 and 3
    found = known_tuning(better, without)
    asked = []
    def tune_search(decoder, trials, references, given, **options):
        asked.append((len(trials), len(references), given))
        return found
    monkeypatch.setattr(tuning, 'tune_search', tune_search)
    StageRun(tuned, 'decode').discard()
    assert decode() == 'done' and asked == [(4, 4, [])] and open_decoder(tuned).options.acoustic_scale == 0.4
    metrics = StageRun(tuned, 'decode').stamp['metrics']
    wer = wer_of_lists(tuned, 'decode')
    assert metrics == {'WER': pytest.approx(wer), 'WER as configured': 9/20} | better._asdict()
    decoder = open_decoder(tuned)
    assert {k: getattr(decoder.options, k) for k in better._fields} == better._asdict()
    logits = LogitStore.open(tuned.logits('test'))
    assert [h[0].text for h in tuned.nbest('test')] == [decoder.decode(x)[0].text for x in logits]
    decoders = [decoder.with_options(**without[i % 2]._asdict()) for i in range(4)]
    held_out = [d.decode(x)[0].text for d, x in zip(decoders, LogitStore.open(tuned.logits('val')))]
    assert [h[0].text for h in tuned.nbest('val')] == held_out
    run_stages(tuned)
    assert StageRun(tuned, 'report').stamp['metrics']['WER'] == pytest.approx(wer)
    tuned = Run(tuned.dir, tuned.work, {'decode.tune': False})
    assert decode() == 'done' and not path.exists() and len(asked) == 1
    assert StageRun(tuned, 'decode').stamp['metrics'] == plain


def spelled_in_noise(run, folder):
    """Stores of val and test of two models that observe the labels of a run with more and with less noise; test has no
    labels."""
    rng = np.random.default_rng(0)
    for split in ('val', 'test'):
        store = TrialStore.open(run.packed_dir/f'{split}.arrow')
        for model, noise in enumerate((2., 6.)):
            arrays = []
            for i in range(len(store)):
                frames = [k for label in (store.class_ids(i) if split == 'val' else range(1, 20)) for k in (label, 0)]
                x = 5*np.eye(41)[frames] + noise*rng.standard_normal((len(frames), 41))
                arrays.append((x - np.log(np.exp(x).sum(1, keepdims=True))).astype('float32'))
            LogitStore.write(folder/f'{model}-{split}.arrow', arrays, store.index, {})
    return [str(folder/f'{model}-{split}.arrow') for model in (0, 1) for split in ('val', 'test')]


def shares(text):
    "All numbers in a text that may be rates, in percent or not."
    return [float(n)/(100 if percent else 1) for n, percent in re.findall(r'(\d+\.\d+)( ?%)?', text)]


@pytest.mark.parametrize('last', ['decode', 'rescore', 'combine'])
def test_a_rate_is_the_same_everywhere(finished, tmp_path, monkeypatch, last):
    """Rates that are tuned on val (the search, the mixture with an LLM, the combination) are cross-validated: lists,
    stamps, results, the page and the commands' output agree with jiwer on the lists."""
    from tiny_models import tiny_lm

    from b2t_kaggle.decoding import tuning
    run, _, _ = finished
    work = run.parent.parent/'data'
    values = {'infer.logits': spelled_in_noise(Run(run, work), tmp_path)}
    if last != 'decode':
        pytest.importorskip('transformers', reason='needs transformers: pip install b2t_kaggle[llm]')
        values['rescore.llm'] = str(tiny_lm(tmp_path/'lm', 'opt', ['a few words']))
    if last == 'combine': values['combine.sources'] = [str(run)]
    best = tuning.SearchWeights(0.8, 1., 1., 0.)
    found = known_tuning(best._replace(word_score=0.1), [best._replace(word_score=s) for s in (-30., 4.)])
    monkeypatch.setattr(tuning, 'MIN_TRIALS', 4)
    monkeypatch.setattr(tuning, 'tune_search', lambda *_, **__: found)
    options = ['--out', tmp_path, '--work', work, '--name', 'tuned']
    tuned = Run(tmp_path/'tuned', work, SMALL | values)
    with stages_here(): run_stages(tuned)
    stamped = {n: StageRun(tuned, n).stamp['metrics'] for n in ('ensemble', 'decode', last, 'report')}
    for stage in ('decode', last): assert stamped[stage]['WER'] == pytest.approx(wer_of_lists(tuned, stage))
    wer = wer_of_lists(tuned, last)
    in_sample = open_decoder(tuned)
    val = TrialStore.open(tuned.packed_dir/'val.arrow').index
    texts = [in_sample.decode(x)[0].text for x in LogitStore.open(tuned.logits('val'))]
    assert abs(jiwer.wer([normalize_sentence(s) for s in val.sentence], texts) - wer_of_lists(tuned, 'decode')) > 0.05
    results = read_results(tuned.dir/RESULTS)
    assert jiwer.wer([normalize_sentence(s) for s in results.reference], results.text.to_list()) == pytest.approx(wer)
    per = jiwer.wer(results.phonemes.to_list(), results.greedy.to_list())
    assert stamped['ensemble']['PER'] == pytest.approx(per)
    assert stamped['report'] == {'WER': pytest.approx(wer), 'PER': pytest.approx(per)}
    for output in (command('runs', '--out', tmp_path), command('compare', 'tuned', run, '--out', tmp_path)):
        assert output.exit_code == 0 and 'tuned on these' not in output.output, output.output
        for rate in (wer, per): assert any(abs(s - rate) < 6e-4 for s in shares(output.output)), output.output
    if last != 'combine': return
    closing = command('report', *options, '--force', 'report')
    assert closing.exit_code == 0, closing.output
    page = (tuned.dir/'report.html').read_text()
    for text in (closing.output, page[:page.index('Training') if 'Training' in page else None]):
        for rate in (wer, per): assert any(abs(s - rate) < 6e-4 for s in shares(text))
    assert page.count('cross-validated</span>') == 1


def test_an_llm_inside_the_search(finished, tmp_path, here, monkeypatch):
    """The LLM's scores are in the lists and their totals, with weights that were tuned without it; a missing model is
    an error."""
    pytest.importorskip('transformers', reason='needs transformers: pip install b2t_kaggle[llm]')
    from tiny_models import tiny_lm

    from b2t_kaggle.decoding import tuning
    from b2t_kaggle.lm.causal import LanguageModelError
    monkeypatch.setattr(tuning, 'MIN_TRIALS', 4)
    run, _, _ = finished
    shutil.copytree(run, tmp_path/'run')
    lm = tiny_lm(tmp_path/'lm', 'opt', ['a few words'], max_position_embeddings=512)
    values = {'decode.llm': str(lm), 'decode.llm_weight': 0.3, 'rescore.keep': 'always'}
    fused = Run(tmp_path/'run', run.parent.parent/'data', values)
    run_stages(fused)
    assert here == ['decode', 'submit', 'report']
    tuned = read_record(fused.dir/'decode_weights.json', tuning.Tuning)
    metrics = StageRun(fused, 'decode').stamp['metrics']
    gain = {k: metrics[k] for k in ('before', 'after', 'difference', 'trials', 'kept')}
    assert metrics == {'WER': pytest.approx(wer_of_lists(fused, 'decode'))} | tuned.weights._asdict() | gain
    assert gain['after'] == metrics['WER'] and gain['trials'] == 4 and gain['kept']
    w = tuned.weights
    for hyps in fused.nbest('test'):
        for h in hyps:
            score = w.acoustic_scale*h.acoustic + w.lm_weight*h.ngram + w.word_score*h.n_words + 0.3*h.llm
            assert h.total == pytest.approx(score) and (h.llm < 0 or not h.text)
    lm.rename(tmp_path/'moved')
    with pytest.raises(LanguageModelError, match='not loaded .there is no such folder'): open_decoder(fused)
    moved = Run(tmp_path/'run', run.parent.parent/'data', {'decode.llm': str(tmp_path/'moved')})
    run_stages(moved)
    assert here == ['decode', 'submit', 'report'] # The same model is used


def test_an_llm_without_time_changes_nothing(finished, tmp_path, here, monkeypatch):
    "Trials for which there is no time keep the order of the search, and are rescored later."
    pytest.importorskip('transformers', reason='needs transformers: pip install b2t_kaggle[llm]')
    from tiny_models import tiny_lm
    run, _, _ = finished
    shutil.copytree(run, tmp_path/'run')
    values = {'rescore.llm': str(tiny_lm(tmp_path/'lm', 'opt', ['a few words'])), 'rescore.keep': 'always'}
    monkeypatch.setattr(StageRun, 'time_left', lambda stage: 0)
    ranked = Run(tmp_path/'run', run.parent.parent/'data', values)
    run_stages(ranked)
    assert here == ['rescore', 'submit', 'report']
    assert StageRun(ranked, 'rescore').stamp['metrics']['not_rescored'] == 8
    best = [hyps[0]['text'] for hyps in map(json.loads, (run/'nbest_test.jsonl').read_text().splitlines())]
    assert [row['text'] for row in csv.DictReader((ranked.dir/'submission.csv').open())] == best
    monkeypatch.undo()
    monkeypatch.setattr(pipeline, 'execute', execute_here)
    assert {row['state'] for row in run_stages(ranked, 'rescore')} == {'skipped, nothing changed', 'done'}
    assert all(h['llm'] < 0 for hyps in ranked.nbest('val') for h in map(vars, hyps) if h['text'])
