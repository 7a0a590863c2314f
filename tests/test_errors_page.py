"""The pages of a run's errors and of a replay in a real browser: sorting, filtering, opening a trial, playback, width
and size."""
import base64
import json
import shutil
import time

import numpy as np
import pytest
from browser import CHROMIUM, DRIVER, browser

from b2t_kaggle.config import preset, with_overrides
from b2t_kaggle.pipeline import explore
from b2t_kaggle.pipeline.explore import OpenRun
from b2t_kaggle.pipeline.run import Run, write_json
from b2t_kaggle.pipeline.stages import PipelineError
from b2t_kaggle.pipeline.stamps import StageRun, run_stage

SETTINGS = {'simulate.n_sessions': 2, 'simulate.train': 24, 'simulate.val': 12, 'simulate.test': 2,
            'simulate.max_words': 5, 'simulate.lm_sentences': 300, 'data.batch_size': 8, 'data.days_per_batch': 2,
            'train.num_training_batches': 20, 'train.batches_per_val_step': 20, 'train.processes': 1,
            'train.accelerator': 'cpu'}
OPEN = "find('trials').tBodies[0].rows[0].querySelector('button').click()"


@pytest.fixture(scope='module')
def run(tmp_path_factory):
    d = tmp_path_factory.mktemp('errors')
    run = Run(d/'runs'/'small', d/'work', cfg=with_overrides(preset('quick'), SETTINGS))
    for stage in 'simulate', 'check', 'pack', 'train', 'infer', 'lm', 'decode': run_stage(stage, run.dir, run.work)
    return OpenRun(Run(run.dir, run.work, save=False))


@pytest.fixture(scope='module')
def page(run): return explore.write_errors(run)


def test_figures_agree_with_the_run(run):
    data, table = explore.error_data(run), run.table('val')
    assert [t['edits'] for t in data['trials']] == table.edits.tolist()
    assert [t['text'] for t in data['trials']] == table.hypothesis.tolist()
    np.testing.assert_allclose([t['per'] for t in data['trials']], table.per, atol=1e-4)
    for t in data['trials']: # Equal words are stored as one string
        pairs = [[op, op] if isinstance(op, str) else op for op in t['ops']]
        assert [r for r, _ in pairs if r] == t['reference'].split()


def test_sentences_that_do_not_fit_the_rest_of_a_run_are_refused(run, tmp_path):
    "Without lists, with lists of other log-probabilities, with fewer lists, or without packed trials."
    folder = shutil.copytree(run.run.dir, tmp_path/'small')
    def opened(): return OpenRun(Run(folder, run.run.work, save=False))
    lists = opened().run.nbest_path('val')
    lists.write_text(''.join(lists.read_text().splitlines(keepends=True)[:5]))
    with pytest.raises(PipelineError, match='found 5 lists, expected 1[24], one per trial of val'): opened().table()
    shutil.copyfile(run.run.nbest_path('val'), lists)
    inferred = StageRun(opened().run, 'infer')
    write_json(inferred.stamp | dict(made=1.), inferred.stamp_path)
    for use in OpenRun.table, OpenRun.nbest, explore.write_errors, lambda run: explore.write_replay(run, 3):
        with pytest.raises(PipelineError, match='older than what they are made from; `b2t decode` on'): use(opened())
    assert 'WER' not in repr(opened()) and 'PER' in repr(opened())
    with pytest.raises(PipelineError, match='older than'): explore.write_errors(run, opened())
    elsewhere = OpenRun(Run(run.run.dir, tmp_path, save=False))
    with pytest.raises(PipelineError, match='no such file; give the folder of packed trials with'): elsewhere.table()


def test_a_page_of_all_trials_of_val_stays_below_five_megabytes(run, page):
    "Estimated with 160 frames and 7 words per trial, at least the averages of real trials."
    frames = explore.frame_picture(np.log(np.full((160, 41), 1/41)))
    def size(t): return len(json.dumps(t | dict(frames=''), separators=(',', ':')))
    texts = [(size(t) - len(t['features']))/t['words'] for t in explore.error_data(run)['trials']]
    n_bytes = explore.FEATURE_ROWS*explore.N_COLUMNS*4/3 + len(frames) + 7*np.mean(texts)
    assert page.stat().st_size + 1426*n_bytes < 5e6


def test_text_of_a_trial_is_escaped(run, monkeypatch):
    data = explore.error_data(run)
    data['trials'][0]['text'] = '</script><b>x</b>'
    monkeypatch.setattr(explore, 'error_data', lambda *_: data)
    path = explore.write_errors(run)
    assert '</script><b>' not in path.read_text()


needs_browser = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason='needs chromium and chromium-driver')


@needs_browser
def test_a_trial_plays_in_real_time(run):
    page = explore.write_replay(run, 3)
    text = run.nbest('val')[3][0].text
    with browser() as b:
        b.show(page, 390)
        assert b.run("return [find('words').textContent, find('time').textContent.slice(0, 3)]") == ['', '0.0']
        b.run("find('play').click(); window.began = performance.now()")
        time.sleep(1)
        shown, elapsed = b.run("find('play').click(); return [+find('at').value, performance.now() - began]")
        assert abs(shown - elapsed) < 250 and shown > 500
        def at(part):
            return b.run(f"const at = find('at'); at.value = {part}*at.max; at.dispatchEvent(new Event('input'));"
                         "return [find('words').textContent, find('sounds').textContent]")
        (some, first_sounds), (words, sounds) = at(.6), at(1)
        assert words == text and len(some) <= len(words) and sounds.startswith(first_sounds) and sounds
        assert b.run("return getComputedStyle(find('list')).display") == 'none'
        assert b.run('return document.documentElement.scrollWidth') == 390
        assert b.messages() == []


@needs_browser
def test_trials_can_be_sorted_filtered_and_opened(run, page):
    explore.write_errors(run)
    def column(k): return (f"return [...find('trials').tBodies[0].rows].map(r => r.cells[{k}].textContent)")
    with browser() as b:
        b.show(page, 1280)
        edits = [int(e) for e in b.run(column(2))]
        assert edits == sorted(edits, reverse=True) and len(edits) == 12
        b.run("find('trials').tHead.rows[0].cells[7].querySelector('button').click()")
        texts = b.run(column(7))
        assert texts == sorted(texts)
        b.run("form.edits.value = 99; form.dispatchEvent(new Event('input'))")
        assert b.run("return find('count').textContent").startswith('0 of 12 trials')
        session = b.run("form.edits.value = 0; form.session.selectedIndex = 1; "
                        "form.dispatchEvent(new Event('input')); return form.session.value")
        assert set(b.run(column(1))) == {session}
        kinds = b.run("return [...form.change.options].map(o => o.textContent)")
        assert kinds[1:] == ['n-gram: changed', 'n-gram: fixed', 'n-gram: broke']
        b.run(OPEN)
        assert b.run("return !find('trial').hidden && find('trial').querySelectorAll('canvas').length") == 2
        number = b.run(column(0))[0]
        assert b.run('return location.hash') == f'#trial-{number}'
        assert run.trials('val')[int(number)].key in b.run("return find('trial').textContent")
        assert b.messages() == []
        b.show(page, 390)
        b.run(OPEN)
        assert b.run('return document.documentElement.scrollWidth') == 390


@pytest.mark.parametrize('n_features', [12, 16, 40])
def test_a_picture_of_features_is_never_empty(n_features):
    "Even if there are fewer features than rows."
    x = np.random.default_rng(0).normal(size=(100, n_features)) + 5*np.arange(n_features)
    picture = np.frombuffer(base64.b64decode(explore.feature_picture(x)), np.uint8).reshape(explore.FEATURE_ROWS, -1)
    assert (np.diff(picture.mean(1)) >= 0).all() and picture.mean(1)[-1] > picture.mean(1)[0] + 50
