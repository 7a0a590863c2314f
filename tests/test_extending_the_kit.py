"""Follow the pages 'Extending the kit', 'Pretraining', 'Adding an encoder' and 'Adding a stage' in one copy of the
checkout: the kit trains with the new augmentation, loss term, objective and encoder, runs the new stage, and its tests
pass."""
import csv
import json
import sys
from importlib.util import find_spec

import jiwer
import nbformat
import numpy as np
import pytest
from checkouts import ROOT, cells_of_page, checkout_with, exported, run
from test_pipeline import SMALL, sets

from b2t_kaggle.pipeline.submission import validate_submission

GUIDES = ROOT/'nbs'/'guides'
# Module: its page, and the tag of its cells there
ENCODERS = {'gain': ('extending_the_kit', 'augmentation'), 'smooth': ('extending_the_kit', 'loss'),
            'masked': ('pretraining', 'pretraining'), 'conv': ('adding_an_encoder', 'encoder'),
            'slow': ('adding_an_encoder', 'lengths')}

# Added below the cells that define an encoder of whole trials, which needs more than a hundred steps: its logits hardly
# move
SLOW_ENCODER = """
class SlowConfig(CentredConfig):
    name: Literal['slow'] = 'slow'

class Slow(Centred):
    Config = SlowConfig
    def encode(self, x, day_idx, n_bins): return 0.05*super().encode(x, day_idx, n_bins)
"""
SLOW_IMPORTS = 'from typing import Literal\nfrom b2t_kaggle.pytorch.models.conv import Conv, ConvConfig'


def page(name, tag): return cells_of_page(GUIDES/f'{name}.ipynb', tag)


def encoder_notebook(name):
    cells = page(*ENCODERS[name])
    if name == 'slow': cells = [SLOW_IMPORTS, *cells, SLOW_ENCODER]
    return exported(f'pytorch.models.{name}', 'An encoder of our own.', *cells)


def stage_notebook():
    "The notebook that executes the stage."
    def cells(tag):
        sources = [source.removeprefix('#| eval: false\n') for source in page('adding_a_stage', tag)]
        return [nbformat.v4.new_code_cell(source, metadata=dict(tags=[tag])) for source in sources]
    about = nbformat.v4.new_markdown_cell('# Least risk\n\n> Sentences with the fewest expected word errors.')
    raw = nbformat.v4.new_raw_cell('---\nskip_exec: true\n---')
    return nbformat.v4.new_notebook(cells=[raw, about, *cells('parameters'), *cells('notebook')])


@pytest.fixture(scope='module')
def checkout(tmp_path_factory):
    notebooks = {f'nbs/pytorch/models/{number:02}_{name}.ipynb': encoder_notebook(name)
                 for number, name in enumerate(ENCODERS, 6)}
    module = exported('pipeline.stages.risk', 'Sentences with the fewest expected word errors.',
                      *page('adding_a_stage', 'stage'))
    stage = {'nbs/pipeline/stages/16_risk.ipynb': module, 'nbs/stages/14_risk.ipynb': stage_notebook()}
    return checkout_with(tmp_path_factory.mktemp('clone'), notebooks | stage)


TRAIN = """
import json, sys
sys.path.insert(0, 'tests')
from pathlib import Path
import encoders
from b2t_kaggle.config import with_overrides
from b2t_kaggle.pytorch.checkpoint import load_file
from b2t_kaggle.pytorch.trainer import train
from b2t_kaggle.training.history import plot_history, read_history
folder = Path(sys.argv[1])
encoders.write_toy(folder)
stores = encoders.open_toy(folder)
found = {}
def trained(name, run, **changes):
    cfg = encoders.config(name, **dict(num_training_batches=4, batches_per_val_step=2, batches_per_save=2) | changes)
    result = train(*stores, cfg, folder/run, progress=False)
    rows = read_history(folder/run/'history.csv')
    panels = [ax.get_ylabel() for ax in plot_history(folder/run/'history.csv').axes]
    found[run] = dict(steps=result['step'], panels=panels, **rows.iloc[-1].dropna().to_dict())
for precision in ('float32', 'bfloat16', 'float16'): trained('smooth', f'smooth {precision}', precision=precision)
trained('smooth', 'two views', cr_ctc=.2)
trained('smooth', 'in parts', accumulate=2)
trained('gain', 'gain', max_gain=.5)
trained('gain', 'again', max_gain=.5)
trained('gain', 'without', max_gain=0.)
trained('masked', 'masked')
trained('gru', 'tuned', init_checkpoint_path=str(folder/'masked'/'last.pt'))
print(json.dumps(found))
"""


@pytest.fixture(scope='module')
def found(checkout, tmp_path_factory):
    done = run(checkout, sys.executable, '-c', TRAIN, tmp_path_factory.mktemp('toy'))
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize('name', ['smooth float32', 'smooth bfloat16', 'smooth float16', 'two views', 'in parts'])
def test_a_term_of_the_loss_has_its_curves(found, name):
    last = found[name]
    assert last['steps'] == 4 and 'change' in last['panels']
    assert last['change'] > 0 and last['val_change'] > 0
    others = .2*last['consistency'] if name == 'two views' else 0
    assert last['loss'] > .1*last['change'] + others and last['val_loss'] > .1*last['val_change']


def test_an_augmentation_changes_the_training_and_is_repeated(found):
    assert found['gain']['loss'] == found['again']['loss'] != found['without']['loss']


def test_a_custom_objective_and_its_weights(found):
    assert found['masked']['steps'] == 4 and found['masked']['val_loss'] < 10 # An error of features, not a CTC loss
    assert found['tuned']['steps'] == 4


def test_the_pretraining_fits_in_80_lines():
    assert len(cells_of_page(GUIDES/'pretraining.ipynb', 'pretraining')[0].splitlines()) < 80


def least_risk(hyps):
    "The sentence with the fewest expected word errors, computed by jiwer, and its risk."
    totals = np.array([h['total'] for h in hyps])
    p = np.exp(totals - np.logaddexp.reduce(totals))
    def errors(reference, text):
        if not reference: return len(text.split())
        counts = jiwer.process_words(reference, text)
        return counts.substitutions + counts.deletions + counts.insertions
    risks = [sum(q*errors(other['text'], own['text']) for q, other in zip(p, hyps)) for own in hyps]
    best = int(np.argmin(np.round(risks, 9)))
    return hyps[best]['text'], risks[best]


RUN = """
import json, sys
sys.path.insert(0, 'tests')
from test_pipeline import cli, stages_here
for line in map(json.loads, sys.argv[1:]):
    with stages_here() as names: cli.main(line, standalone_mode=False)
    print('executed', *names)
"""


def b2t(root, *lines):
    "Stages executed by each command, all in one process; test_pipeline tests stages in separate processes."
    lines = [json.dumps(list(map(str, line))) for line in lines]
    printed = run(root, sys.executable, '-c', RUN, *lines).stdout.splitlines()
    return [line.split()[1:] for line in printed if line.startswith('executed')]


@pytest.fixture(scope='module')
def runs(checkout, tmp_path_factory):
    "A run with the new loss term, a run with the new encoder, and the stages that each command executed."
    folder = tmp_path_factory.mktemp('runs')
    shared = ['--out', folder, '--work', folder/'data']
    # The word score favours sentences of several words, whose risks differ
    smooth = [*shared, '--name', 'smooth', *sets(SMALL | {'model.name': 'smooth', 'decode.word_score': 6})]
    others = {k: v for k, v in SMALL.items() if not k.startswith('model.')}
    conv = [*shared, '--name', 'conv', *sets(others | {'model.name': 'conv', 'model.n_channels': 16})]
    return folder, b2t(checkout, ['run', *smooth], ['risk', *smooth], ['submit', *smooth, '--force', 'risk'],
                       ['run', *conv])


def test_a_stage_runs_and_its_sentences_are_submitted(runs):
    folder, (executed, again, forced, _) = runs
    assert executed == 'simulate check pack train infer lm decode risk submit report'.split()
    assert again == [] and forced == ['risk', 'submit'] # The verb exists, and skips a finished stage
    def lists(name): return [json.loads(line) for line in (folder/'smooth'/name).read_text().splitlines()]
    searched, ranked = lists('nbest_test.jsonl'), lists('risk_test.jsonl')
    submitted = [row['text'] for row in csv.DictReader((folder/'smooth'/'submission.csv').open())]
    expected = [least_risk(hyps) for hyps in searched]
    assert submitted == [text for text, _ in expected] == [hyps[0]['text'] for hyps in ranked]
    assert [hyps[0]['total'] for hyps in ranked] == pytest.approx([-risk for _, risk in expected])
    for before, after in zip(searched, ranked):
        assert sorted(h['text'] for h in before) == sorted(h['text'] for h in after)
    assert submitted != [hyps[0]['text'] for hyps in searched], 'the stage changed no sentence'
    assert (folder/'smooth'/'hypotheses'/'risk_test.jsonl').exists()


def test_a_run_has_the_curves_of_a_loss_term(runs):
    header = (runs[0]/'smooth'/'train'/'history.csv').read_text().splitlines()[0].split(',')
    assert {'change', 'val_change'} <= set(header)


def test_an_encoder_trains_and_decodes(runs):
    folder, (*_, executed) = runs
    assert executed == 'train infer lm decode risk submit report'.split() # The sessions are shared
    validate_submission(folder/'conv'/'submission.csv', expected=4)
    stamp = json.loads((folder/'conv'/'stages'/'train.json').read_text())
    assert stamp['metrics']['steps'] == 6


def test_an_encoder_has_its_keys_and_tensorflow_refuses_it_in_one_line(checkout):
    code = ("from b2t_kaggle.cli.command import main\nmain(['keys', 'model.'], standalone_mode=False)\n"
            "print('end of keys')\n")
    if find_spec('tensorflow'): code += (
        "from b2t_kaggle.config import load_config, ConfigError\nfrom b2t_kaggle.tensorflow.models import build_model\n"
        "try: build_model(load_config(overrides={'model.name': 'conv'}).model, 1)\nexcept ConfigError as e: print(e)")
    keys, refusal = run(checkout, sys.executable, '-c', code).stdout.split('end of keys\n')
    assert 'model.n_channels' in keys and 'conv, slow: Channels of the hidden layer.' in keys
    expected = 'model.name = conv: TensorFlow has no such encoder, it has gru, transformer, triple_gru\n'
    assert refusal == (expected if find_spec('tensorflow') else '')


def test_the_tests_of_stages_and_their_growth_pass(checkout):
    tests = ['tests/test_stages.py', 'tests/test_growth.py', 'tests/test_house.py', 'nbs/pipeline/03_stages.ipynb',
             'nbs/pipeline/stages']
    run(checkout, sys.executable, '-m', 'pytest', '-q', '-p', 'no:cacheprovider', *tests)


def test_encoders_are_tested_without_further_files(checkout):
    "`-k conv`, as on the page, selects the tests of the whole registry; files of other tests are ignored here."
    others = ['--ignore-glob', 'tests/test_[!e]*', *(f'--ignore=tests/{f}' for f in ('faults', 'tf', 'xla'))]
    tests = sys.executable, '-m', 'pytest', '-q', '-p', 'no:cacheprovider', 'tests/test_triple_gru.py', 'tests', *others
    done = run(checkout, *tests, '-k', 'conv or slow or gain or smooth')
    assert '42 passed' in done.stdout, done.stdout[-500:]


@pytest.mark.parametrize('word, finds', [('conv', True), ('bootstrap', False)])
def test_an_encoders_name_finds_the_tests_on_xla(checkout, word, finds):
    "`./kit test -k WORD` would run these tests in a separate environment."
    plan = run(checkout, 'bash', '-c', 'make_env() { echo "environment ${1:-}"; }; pytest_some() { echo "run $*"; };'
               f'eval "$(sed -n \'/^test_some() {{/,/^}}/p\' kit)"; test_some -k {word}').stdout
    assert ('run tests/xla' in plan) == finds and 'run nbs tests --ignore tests/xla' in plan
