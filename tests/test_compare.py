"""The bootstrap agrees with binomial and normal distributions, and comparisons with sums by hand; refusals of `b2t
compare`."""
import math

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from b2t_kaggle.cli import command as cli
from b2t_kaggle.metrics import ErrorCounts
from b2t_kaggle.metrics.bootstrap import (
    LEADERBOARD_WORDS,
    bootstrap_rates,
    difference_interval,
    rate_interval,
    smallest_clear_difference,
)
from b2t_kaggle.metrics.comparison import (
    PER,
    PER_WITHOUT_SIL,
    WER,
    comparison_tables,
    results_of,
    same_trials,
    summary_tables,
    trial_groups,
    write_results,
)
from b2t_kaggle.pipeline.results import RESULTS
from b2t_kaggle.pipeline.run import Run, write_json
from b2t_kaggle.pipeline.stages import plan
from b2t_kaggle.pipeline.stamps import StageRun
from b2t_kaggle.rescoring.hypotheses import Entry, Hypotheses, Trial, write_hypotheses


def counts(edits, length):
    "Trials with these numbers of substitutions."
    return [ErrorCounts(hits=n - e, substitutions=e) for e, n in zip(edits, length, strict=True)]


def binomial_quantile(n, p, q):
    "The smallest k with P(X ≤ k) ≥ q."
    total = 0.
    for k in range(n + 1):
        total += math.comb(n, k)*p**k*(1 - p)**(n - k)
        if total >= q: return k


@pytest.mark.parametrize('n, wrong', [(40, 10), (200, 6), (731, 300)])
def test_the_interval_agrees_with_the_binomial_distribution(n, wrong):
    "With one word per trial, the number of errors in a resample is binomial."
    rate = rate_interval(counts([1]*wrong + [0]*(n - wrong), [1]*n))
    assert rate.value == wrong/n
    exact = [binomial_quantile(n, wrong/n, q)/n for q in (0.025, 0.975)]
    assert rate[1:] == pytest.approx(exact, abs=1.01/n) # A quantile of resamples may be the next number


def test_the_interval_of_a_ratio_is_normal_for_many_trials():
    "For trials of different lengths, the variance of a ratio is known by linear approximation (Cochran, 1977)."
    rng = np.random.default_rng(3)
    length = rng.integers(1, 15, 4000)
    edits = rng.binomial(length, 0.1)
    rates = bootstrap_rates(edits, length)
    rest = edits - edits.sum()/length.sum()*length
    error = rest.std()/math.sqrt(len(rest))/length.mean()
    assert rates.std() == pytest.approx(error, rel=0.06)
    assert rates.mean() == pytest.approx(edits.sum()/length.sum(), abs=error/5)


trials = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(4, 9)), min_size=1, max_size=12)

@settings(max_examples=30)
@given(trials, st.randoms(use_true_random=False))
def test_the_order_of_trials_changes_nothing(some, random):
    shuffled = random.sample(some, len(some))
    def compared(rows):
        a, b = (counts([row[k] for row in rows], [row[2] for row in rows]) for k in (0, 1))
        return rate_interval(a), difference_interval(a, b), smallest_clear_difference(a, b)
    assert compared(some) == compared(shuffled)


@settings(max_examples=30)
@given(trials)
def test_a_system_does_not_differ_from_itself(some):
    a = counts([e for e, *_ in some], [n for *_, n in some])
    assert difference_interval(a, a) == (0, 0, 0) and smallest_clear_difference(a, a) == 0


def test_smallest_clear_difference_for_a_number_of_words():
    """In a test set that repeats each trial of val n times, the interval of the difference begins at zero if the
    difference is the smallest clear one."""
    rng = np.random.default_rng(0)
    length = rng.integers(3, 10, 500)
    a, b = (counts(rng.binomial(length, p), length) for p in (0.1, 0.12))
    smallest = smallest_clear_difference(a, b, words=4*int(length.sum()))
    large = difference_interval(a*4, b*4)
    assert smallest == pytest.approx((large.high - large.low)/2, rel=0.08)
    assert smallest_clear_difference(a, b, words=16*int(length.sum())) == pytest.approx(smallest/2)


SPOKEN = ['How are you?', 'Fine, and you?', 'Not so bad.', 'I would like to sit here for a while, please.']
PHONEMES = ['HH AW SIL AA R SIL', 'F AY N SIL', 'N AA T SIL', 'AY SIL']

def scored(texts, greedy=PHONEMES, spoken=SPOKEN):
    "Results of a system."
    facts = [dict(session=f't15.2023.08.1{3 + i//2}', block=i, corpus=('Harvard', 'Random')[i % 2], seen=i == 0)
             for i in range(4)]
    return results_of([f | dict(trial=i, reference=spoken[i], text=texts[i], phonemes=PHONEMES[i], greedy=greedy[i])
                       for i, f in enumerate(facts)])

FIRST = scored(['how are you', 'mine and you', 'not so bad', 'i would like'], ['HH AW AA R SIL', *PHONEMES[1:]])
TOO_OLD = 'results_val.jsonl is missing, or older than other results; `b2t report` on this run makes it'
SECOND = scored(['how you', 'fine and you', 'not so bad', 'i would like to sit here for a while please'])


def test_differences_by_group_agree_with_counts_by_hand():
    systems = same_trials({'a': FIRST, 'b': SECOND[::-1]})
    tables = comparison_tables(systems)
    wer = tables[WER]
    assert wer['more errors'].to_dict() == {
        ('all', 'all'): -7, ('corpus', 'Harvard'): 1, ('corpus', 'Random'): -8, ('length', '1 to 3 words'): 0,
        ('length', '10 words and more'): -7, ('sentence', 'seen in text'): 1, ('sentence', 'not in text'): -8,
        ('session', 't15.2023.08.13'): 0, ('session', 't15.2023.08.14'): -7}
    assert wer.loc[('corpus', 'Random'), 'difference'].value == -8/13
    assert list(tables[PER]['more errors'])[0] == -1 and set(tables[PER_WITHOUT_SIL]['more errors']) == {0}
    assert (tables[PER].phonemes.iloc[0], tables[PER_WITHOUT_SIL].phonemes.iloc[0]) == (16, 11)
    row = summary_tables(systems)[WER].loc['b']
    assert row['− a'].value == -7/19 and row[f'on {LEADERBOARD_WORDS:,} words'] == round(-7/19*LEADERBOARD_WORDS)


def test_every_trial_is_in_one_group_of_each_kind():
    for by, groups in trial_groups(FIRST).items():
        assert sorted(i for positions in groups.values() for i in positions) == [0, 1, 2, 3], by


@pytest.fixture
def runs(tmp_path):
    "Two runs that were scored against the same references, and the command that compares them."
    for name, results in dict(one=FIRST, two=SECOND).items():
        run = Run(tmp_path/name, tmp_path)
        h = Hypotheses()
        for trial, row in results.iterrows():
            h.add(Trial(trial, reference=row.reference), [Entry(trial, row.text, name, 'gru', 'lexicon', 0)])
        write_hypotheses(run.hypotheses('val'), h)
        write_results(run.dir/RESULTS, results)
        for stage in (StageRun(run, n) for n in plan(run.cfg)):
            write_json(dict(key='', outputs={}, needs={n.name: n.id for n in stage.needs}), stage.stamp_path)
    def compare(*args):
        r = CliRunner().invoke(cli.main, ['compare', *map(str, args), '--out', str(tmp_path)])
        assert r.exception is None or isinstance(r.exception, SystemExit), r.exception
        return r.exit_code, r.output
    return tmp_path, compare


def test_runs_and_files_side_by_side(runs):
    folder, compare = runs
    (folder/'theirs_val.csv').write_text('id,text\n' + ''.join(f'{i},"{t}"\n' for i, t in enumerate(SPOKEN)))
    status, told = compare('one', 'two', folder/'theirs_val.csv')
    assert status == 0 and '\n4 trials\n' in told, told
    assert told.startswith('two and one: no significant difference on 4 trials'), told
    for words in ('All systems: WER', 'two − one: PER without SIL', 'theirs − one: WER', '0.0 % (0.0 to 0.0)'):
        assert words in told, words
    assert 'theirs − one: PER' not in told # Its phonemes are unknown


def test_tables_fit_the_terminal(runs, monkeypatch):
    _, whole = runs[1]('one', 'two')
    monkeypatch.setattr('b2t_kaggle.cli.compare.terminal_width', lambda: 80)
    _, fitting = runs[1]('one', 'two')
    def tables(told): return [line for line in told.splitlines()[1:] if '  ' in line]
    assert max(map(len, tables(whole))) > 80 >= max(map(len, tables(fitting)))
    def cells(told): return sorted(cell for line in tables(told) for cell in line.split() if cell[:1] in '+0123456789')
    assert set(cells(whole)) == set(cells(fitting))


def test_a_run_and_itself(runs):
    status, told = runs[1]('one', 'one')
    line = [line for line in told.splitlines() if line.startswith('one (2)')][1] # After the verdict
    assert status == 0 and '+0.0 points (+0.0 to +0.0)' in line and '0 words (0.0 points)' in line
    assert '*' not in told


def test_runs_of_other_trials_are_refused(runs):
    folder, compare = runs
    def rewrite(results):
        h = Hypotheses()
        for trial, text in results.text.items(): h.add(Trial(trial), [Entry(trial, text, 'two')])
        write_hypotheses(folder/'two'/'hypotheses'/'decode_val.jsonl', h)
        write_results(folder/'two'/RESULTS, results)
        return compare('one', 'two')
    status, told = rewrite(SECOND[1:])
    assert status == 1 and 'two lacks 1 of the 4 trials of one, such as 0; expected the same trials' in told
    status, told = rewrite(scored(list(SECOND.text), spoken=[*SPOKEN[:3], 'Something else.']))
    assert status == 1 and "one and two: trial 3, reference: found 'I would like" in told and told.count('\n') == 1


def test_without_labels_of_val_nothing_is_compared(runs):
    folder, compare = runs
    (folder/'two'/RESULTS).unlink()
    status, told = compare('one', 'two')
    assert status == 1 and TOO_OLD in told
    (folder/'a_val.csv').write_text('id,text\n0,yes\n')
    (folder/'b.txt').write_text('no\n')
    status, told = compare(folder/'a_val.csv', folder/'b.txt')
    assert status == 0 and 'References are unknown' in told and '100.0 %' in told and 'rror rate' not in told
    (folder/'c.txt').write_text('no\n'*99)
    status, told = compare(folder/'c.txt', folder/'c.txt', '--truth', folder/'one'/'hypotheses'/'decode_val.jsonl')
    assert status == 1 and 'c, trial 4: its reference is unknown (95 of 99 trials); give ref' in told
    status, told = compare(folder/'a_val.csv', folder/'b.txt', '--truth', folder/'one'/'hypotheses'/'decode_val.jsonl')
    assert status == 0 and '1 trial' in told


def test_files_of_another_split_are_refused(runs):
    "Trials of test and val have the same numbers, so sentences of test could be scored against val's references."
    folder, compare = runs
    for name in 'test.csv', 'submission.csv', 'theirs_test.jsonl', 'theirs_test.txt':
        (folder/name).write_text('id,text\n' + ''.join(f'{i},"{t}"\n' for i, t in enumerate(SPOKEN)))
        status, told = compare('one', folder/name)
        assert status == 1 and f'{name} has sentences of test and one of val' in told and told.count('\n') == 1, told
        status, told = compare(folder/name, folder/name, '--truth', folder/'one'/'hypotheses'/'decode_val.jsonl')
        assert status == 1 and 'decode_val.jsonl of val' in told, told


def test_results_of_lists_that_were_decoded_again_are_refused(runs):
    folder, compare = runs
    decoded = StageRun(Run(folder/'one', folder), 'decode')
    write_json(decoded.stamp | dict(made=1.), decoded.stamp_path)
    status, told = compare('one', 'two')
    assert status == 1 and TOO_OLD in told


def test_runs_with_different_text_are_compared(runs):
    "Sentences that occur in the text of one of the runs are seen."
    folder, compare = runs
    write_results(folder/'two'/RESULTS, SECOND.assign(seen=[True]*4))
    status, told = compare('one', 'two')
    assert status == 0 and 'seen in text' in told and 'not in text' not in told, told


def test_files_without_references(runs):
    "Different trials are an error, such as a truncated file, and so is a file of references without any."
    folder, compare = runs
    a, b, c = (folder/f'{name}.txt' for name in 'abc')
    for path, n in (a, 9), (b, 9), (c, 3): path.write_text('how are you\n'*n)
    assert 'References are unknown' in compare(a, b)[1]
    assert compare(a, c) == (1, 'Error: found different trials: a 9 trials, c 3 trials; expected the same trials for '
                                'all systems\n')
    status, shown = compare(a, b, '--truth', b)
    assert status == 1 and 'b.txt: no trial has a reference' in shown, shown
