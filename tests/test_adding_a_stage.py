"""The page 'Adding a stage', done as it says: a module and a notebook in a copy of the checkout, and a run has a step
more, whose sentences are submitted."""
import csv
import json
import sys

import jiwer
import nbformat
import numpy as np
import pytest
from checkouts import ROOT, cells_of_page, checkout_with, exported, run

GUIDE = ROOT/'nbs'/'guides'/'adding_a_stage.ipynb'
MODULE, NOTEBOOK = 'nbs/pipeline/stages/16_risk.ipynb', 'nbs/stages/14_risk.ipynb'

RUN = """
import sys
sys.path.insert(0, 'tests')
from test_pipeline import SMALL, cli, sets, stages_here
with stages_here() as names: cli.main([*sys.argv[1:], *sets(SMALL)], standalone_mode=False)
print('executed', *names)
"""


def shown():
    "The notebook that executes the stage."
    def cells(tag):
        sources = [source.removeprefix('#| eval: false\n') for source in cells_of_page(GUIDE, tag)]
        return [nbformat.v4.new_code_cell(source, metadata=dict(tags=[tag])) for source in sources]
    about = nbformat.v4.new_markdown_cell('# Least risk\n\n> Sentences with the fewest expected word errors.')
    raw = nbformat.v4.new_raw_cell('---\nskip_exec: true\n---')
    return nbformat.v4.new_notebook(cells=[raw, about, *cells('parameters'), *cells('notebook')])


@pytest.fixture(scope='module')
def checkout(tmp_path_factory):
    module = exported('pipeline.stages.risk', 'Sentences with the fewest expected word errors.',
                      *cells_of_page(GUIDE, 'stage'))
    return checkout_with(tmp_path_factory.mktemp('clone'), {MODULE: module, NOTEBOOK: shown()})


def b2t(root, *args):
    "The stages that a command executes, in one process: that each may have its own is tried in test_pipeline."
    return run(root, sys.executable, '-c', RUN, *args).stdout.splitlines()[-1].split()[1:]


def least_risk(hyps):
    "The sentence with the fewest expected word errors, by jiwer, and its risk."
    totals = np.array([h['total'] for h in hyps])
    p = np.exp(totals - np.logaddexp.reduce(totals))
    def errors(reference, text):
        if not reference: return len(text.split())
        counts = jiwer.process_words(reference, text)
        return counts.substitutions + counts.deletions + counts.insertions
    risks = [sum(q*errors(other['text'], own['text']) for q, other in zip(p, hyps)) for own in hyps]
    best = int(np.argmin(np.round(risks, 9)))
    return hyps[best]['text'], risks[best]


def test_its_sentences_are_submitted(checkout, tmp_path):
    longer = ['--set', 'decode.word_score=6'] # Sentences of one word have hardly any that are nearer to all others
    folders = ['--out', tmp_path, '--work', tmp_path/'data', '--name', 'small', *longer]
    executed = b2t(checkout, 'run', *folders)
    assert executed == 'simulate check pack train infer lm decode risk submit report'.split()
    def lists(name): return [json.loads(line) for line in (tmp_path/'small'/name).read_text().splitlines()]
    searched, ranked = lists('nbest_test.jsonl'), lists('risk_test.jsonl')
    submitted = [row['text'] for row in csv.DictReader((tmp_path/'small'/'submission.csv').open())]
    expected = [least_risk(hyps) for hyps in searched]
    assert submitted == [text for text, _ in expected] == [hyps[0]['text'] for hyps in ranked]
    assert [hyps[0]['total'] for hyps in ranked] == pytest.approx([-risk for _, risk in expected])
    for before, after in zip(searched, ranked):
        assert sorted(h['text'] for h in before) == sorted(h['text'] for h in after)
    assert submitted != [hyps[0]['text'] for hyps in searched], 'it changed nothing, so that nothing was tried'
    assert (tmp_path/'small'/'hypotheses'/'risk_test.jsonl').exists()
    assert b2t(checkout, 'risk', *folders) == []  # The verb is there, and nothing is done twice
    assert b2t(checkout, 'submit', *folders, '--force', 'risk') == ['risk', 'submit']


def test_the_tests_of_stages_and_their_growth_pass_with_it(checkout):
    tests = ['tests/test_stages.py', 'tests/test_growth.py', 'nbs/pipeline/03_stages.ipynb', 'nbs/pipeline/stages']
    run(checkout, sys.executable, '-m', 'pytest', '-q', '-p', 'no:cacheprovider', *tests)
