"The automaton against KenLM: a million questions, states, models with gaps."
import gzip
import math

import numpy as np
import pytest
from numba import njit

from b2t_kaggle.decoding.automaton import Automaton, step
from b2t_kaggle.decoding.ngram import NGram, build_ngram

pytestmark = pytest.mark.filterwarnings('ignore:.*too little text')


def zipf_text(n, seed):
    "Sentences of 1 to 12 words of some 700, frequent and rare ones."
    rng, names = np.random.default_rng(seed), np.array([a + b + c for a in 'bcdfghjlm' for b in 'aeiou' for c in 'bcdfghjklmnpqrst'])
    return [' '.join(names[np.minimum(rng.zipf(1.3, rng.integers(1, 13)), len(names) - 1)]) for _ in range(n)]


@njit
def scores_along(lm, begin, end, words, starts):
    "log10 probabilities of the words of sentences, and of their ends."
    out, n = np.empty(len(words) + len(starts) - 1, np.float32), 0
    for i in range(len(starts) - 1):
        state = begin
        for k in range(starts[i], starts[i + 1]):
            out[n], state = step(lm, state, words[k])
            n += 1
        out[n], _ = step(lm, state, end)
        n += 1
    return out


def compare(automaton, lm, sentences):
    "The largest difference of log10 probabilities, and how many there were."
    words = [s.split() for s in sentences]
    starts = np.cumsum([0, *map(len, words)])
    ours = scores_along(automaton.arrays, automaton.begin, automaton.end, automaton.ids([w for ws in words for w in ws]), starts)
    theirs = np.fromiter((score for s in sentences for score, _, _ in lm.model.full_scores(s)), np.float32, len(ours))
    return np.abs(ours - theirs).max(), len(ours)


@pytest.fixture(scope='module')
def model(tmp_path_factory):
    text = zipf_text(30_000, 0)
    return text, build_ngram(text, tmp_path_factory.mktemp('lm')/'lm.arpa', order=4, prune=(0, 0, 1), estimator='own')


def test_a_million_questions(model):
    text, path = model
    rng, automaton = np.random.default_rng(1), Automaton.load(path)
    seen = text + [' '.join(rng.permutation((a + ' ' + b).split())) for a, b in zip(text, text[1:])] # What it knows, and what it does not
    new = zipf_text(60_000, 2) + ['unknown ' + s + ' words of others' for s in text[:2000]]
    worst, n = compare(automaton, NGram.load(path), seen + new)
    assert n > 1_000_000 and worst < 1e-5


def test_states_merge_histories_as_kenlm_does(model):
    "As many states as KenLM tells apart, so the search recombines no less."
    import kenlm
    text, path = model
    automaton, lm, pairs = Automaton.load(path), NGram.load(path).model, set()
    for s in text[:3000]:
        ours, before = automaton.begin, kenlm.State()
        lm.BeginSentenceWrite(before)
        for word, w in zip(s.split(), automaton.ids(s.split())):
            after = kenlm.State()
            lm.BaseScore(before, word, after)
            before, ours = after, step(automaton.arrays, ours, w)[1]
            pairs.add((ours, before))
    assert len(pairs) == len({o for o, _ in pairs}) == len({k for _, k in pairs}) > 1000


def model_with_gaps():
    "A pruned model: of some n-grams the shorter ones that they end in are missing, and so are <unk> and some backoffs; one backoff raises probabilities."
    pairs = ['<s> a\t-0.1', 'a c\t0.05', 'c b\t-0.7', *(f'{x} {y}\t-0.2' for x in 'bdef' for y in 'acdef')]
    return '\n'.join(['\\data\\', 'ngram 1=8', f'ngram 2={len(pairs)}', 'ngram 3=3', '', '\\1-grams:', '-99\t<s>\t-0.5', '-1.0\t</s>', '-0.9\ta\t-0.25', '-1.1\tb', '-2e0\tc\t-0.125',
                      *(f'-1.{i}\t{w}\t-0.{i}' for i, w in enumerate('def', 1)), '', '\\2-grams:', *(f'-0.{i % 7 + 3}\t{p}' for i, p in enumerate(pairs)), '',
                      '\\3-grams:', '-0.01\t<s> a b', '-0.02\ta c a', '-0.5\tb c b', '', '\\end\\', ''])


def test_pruned_files(tmp_path):
    (tmp_path/'lm.arpa').write_text(model_with_gaps())
    with gzip.open(tmp_path/'lm.arpa.gz', 'wt') as f: f.write(model_with_gaps())
    lm, rng = NGram.load(tmp_path/'lm.arpa'), np.random.default_rng(0)
    sentences = [' '.join(rng.choice(['a', 'b', 'c', 'd', 'x'], rng.integers(0, 7))) for _ in range(2000)]
    for name in ('lm.arpa', 'lm.arpa.gz'): assert compare(Automaton.load(tmp_path/name), lm, sentences)[0] < 1e-5
    assert Automaton.load(tmp_path/'lm.arpa').score('x', eos=False) == pytest.approx(-100.5*math.log(10), abs=1e-3)


@pytest.mark.parametrize('order', [1, 2, 6])
def test_orders(order, tmp_path):
    text = zipf_text(300, 3)
    path = build_ngram(text, tmp_path/'lm.arpa', order=order, estimator='own')
    assert compare(Automaton.load(path), NGram.load(path), text + zipf_text(300, 4))[0] < 1e-5


def test_kept_files(model, tmp_path):
    "What is kept beside the file is used while it fits, replaced when the file changes, and never half written."
    class Kept(Automaton): CACHED = 0
    path = tmp_path/'lm.arpa'
    path.write_bytes(model[1].read_bytes())
    first = Kept.load(path)
    kept = tmp_path/'lm.arpa.automaton'
    written = kept.stat().st_mtime_ns
    again = Kept.load(path)
    assert kept.stat().st_mtime_ns == written and again.score(model[0][0]) == first.score(model[0][0])
    assert sorted(p.name for p in tmp_path.iterdir()) == ['lm.arpa', 'lm.arpa.automaton']
    build_ngram(['a b'], path, order=2, estimator='own')
    assert Kept.load(path).order == 2 and kept.stat().st_mtime_ns != written
    for damage in (b'', b'{}\n', kept.read_bytes()[:-1], b'[]\n', b'{"source": 1, "lengths": 2}\n'):
        kept.write_bytes(damage)
        assert Kept.load(path).order == 2
    tmp_path.chmod(0o500)
    try: assert Kept.load(path).order == 2
    finally: tmp_path.chmod(0o700)


def test_large_ids_do_not_collide():
    "Keys hold state and word side by side, whatever their size."
    from b2t_kaggle.decoding.automaton import ARC, _empty, find
    rng, table = np.random.default_rng(0), _empty(ARC, 3000)
    keys = {(int(s) << 32) | int(w) for s, w in rng.integers(0, 2**31 - 1, (3000, 2))}
    for k in keys: table[find(table, k)]['key'] = k
    assert all(table[find(table, k)]['key'] == k for k in keys)
    assert all(table[find(table, k ^ 1)]['key'] == -1 for k in keys if k ^ 1 not in keys)
