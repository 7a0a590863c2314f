"""A language model inside the beam agrees with a plain search that scores every history from its beginning; models,
memory, simultaneous trials, and a run with it."""
import inspect
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny_models import tiny_lm

from b2t_kaggle.config import DecodeConfig, LLMConfig
from b2t_kaggle.decoding.decoder import LexiconBeamDecoder
from b2t_kaggle.decoding.histories import HistoryScorer
from b2t_kaggle.decoding.search import Search
from b2t_kaggle.decoding.streaming import Stream
from b2t_kaggle.lm.automaton import Automaton, walk
from b2t_kaggle.lm.causal import LanguageModelError, load_lm, start_tokens
from b2t_kaggle.lm.ngram import build_ngram
from b2t_kaggle.phonemes import BLANK, PHONEMES, SIL, to_class_ids
from b2t_kaggle.rescoring.fusion import LLMFusion, _TokenTree, _word_forms

LEXICON = {'two': ['T UW'], 'too': ['T UW'], 'to': ['T UW', 'T AH'], 'tea': ['T IY'], 'eat': ['IY T'], 'i': ['AY'],
           'eye': ['AY'], "i'd": ['AY D'], 'a': ['AH']}
LEXICON = {word: [p.split() for p in prons] for word, prons in LEXICON.items()}
WORDS = list(LEXICON)
SENTENCES = ['i eat too', 'i eat two tea', 'eat tea', 'i too', 'to eat a tea', "i'd eat", 'eye to eye']
MIXED_CASE = ['I eat too', 'i eat Two Tea', 'Tea to eat', "I'd tea", 'Eat a tea', 'eye to eye']
KINDS = ('opt', 'llama', 'qwen2', 'gpt2')
LM_WEIGHT, LLM_WEIGHT, SCALE = 0.6, 0.9, 0.7


def load(path): return load_lm(path, device='cpu', local_files_only=True)


@pytest.fixture(scope='module')
def lms(tmp_path_factory):
    folder = tmp_path_factory.mktemp('lms')
    return {kind: load(tiny_lm(folder/kind, kind, MIXED_CASE*4)) for kind in KINDS}


@pytest.fixture(scope='module')
def ngram(tmp_path_factory):
    with warnings.catch_warnings():
        warnings.simplefilter('ignore') # The text is too short to estimate discounts
        return Automaton.load(build_ngram(SENTENCES, tmp_path_factory.mktemp('lm')/'lm.arpa', order=3))


def noisy(n_frames, seed):
    "Vague log-probabilities, which only favour words of the lexicon."
    x = np.random.default_rng(seed).normal(0, 1.5, (n_frames, len(PHONEMES)))
    x[:, [BLANK, SIL, *to_class_ids(['T', 'UW', 'IY', 'AY', 'AH'])]] += 4
    spoken = to_class_ids('AH SIL SIL AY SIL T UW SIL IY T SIL AY SIL SIL'.split())
    x[np.arange(n_frames), spoken[len(spoken) - n_frames:]] += 4
    return x - np.logaddexp.reduce(x, axis=1, keepdims=True)


def sure(phonemes, sharp=9.):
    "Log-probabilities of frames that each clearly contain one phoneme."
    x = sharp*np.eye(len(PHONEMES))[to_class_ids(phonemes.split())]
    return x - np.logaddexp.reduce(x, axis=1, keepdims=True)


class PlainLLM:
    "Scores each word by a forward pass over the whole sentence up to it, for each of its written forms."
    def __init__(self, model, tokenizer, capitals=True):
        self.model = model
        self.tokenizer = tokenizer
        self.capitals = capitals
        self.known = {}

    def ids(self, text):
        return start_tokens(self.tokenizer) + self.tokenizer(text, add_special_tokens=False).input_ids

    def next_tokens(self, text):
        with torch.no_grad(): return self.model(torch.tensor([self.ids(text)])).logits[0].double().log_softmax(-1)

    def word(self, before, word):
        "Log-probability of a word after a written text, and the text with the word."
        scores = {}
        for form in _word_forms(word, self.capitals):
            text = f'{before} {form}'.strip()
            ids = self.ids(text)
            n = len(self.ids(before))
            rows = self.next_tokens(text)
            scores[text] = [rows[t - 1, ids[t]].item() for t in range(n, len(ids))]
        best_token = max((s[0] for s in scores.values() if len(s) == 1), default=-np.inf)
        sums = {text: sum(s) for text, s in scores.items() if len(s) == 1 or s[0] >= best_token - 4}
        return np.logaddexp.reduce(list(sums.values())), max(sums, key=sums.get)

    def history(self, words):
        "Log-probability of a history's last word, and the written form of the history."
        if not words: return 0., ''
        if words not in self.known: self.known[words] = self.word(self.history(words[:-1])[1], words[-1])
        return self.known[words]

    def end(self, words):
        return self.next_tokens(self.history(words)[1])[-1, self.tokenizer.eos_token_id].item()


class PlainSearch:
    """The definition in `decoding.histories`, step by step. Hypotheses are words and a position in the lexicon, and
    every few frames each history of the beam is scored from its beginning."""
    def __init__(self, ngram, llm, beam, every):
        self.ngram = ngram
        self.llm = llm
        self.beam = beam
        self.every = every
        self.hyps = {((), ()): [-np.inf, 0.]} # Scores of paths that end in the last phoneme or a blank
        self.scored = set()
        self.t = 0
        prons = [(tuple(to_class_ids(p)), w) for w in LEXICON for p in LEXICON[w]]
        self.places = {p[:n] for p, _ in prons for n in range(len(p) + 1)}
        self.ends = {place: [w for p, w in prons if p == place] for place in self.places}
        unigram = {w: (LM_WEIGHT + LLM_WEIGHT)*self.unigram(w) for w in LEXICON}
        self.ahead = {place: max(unigram[w] for p, w in prons if p[:len(place)] == place) for place in self.places}

    def unigram(self, word): return np.log(10)*float(self.ngram.arrays.first['log_prob'][self.ngram.ids([word])[0]])

    def without_end(self, words):
        return np.log(10)*walk(self.ngram.arrays, self.ngram.begin, np.array(self.ngram.ids(list(words)), np.int64))[0]

    def log_ngram(self, words): return self.without_end(words) - self.without_end(words[:-1])

    def end_ngram(self, words): return self.ngram.score(' '.join(words)) - self.without_end(words)


    def value(self, words):
        "Contribution of a history's last word."
        ngram = self.log_ngram(words)
        second = self.llm.history(words)[0] if words in self.scored else ngram
        return LM_WEIGHT*ngram + LLM_WEIGHT*second

    def push(self, frame):
        new = {}
        def arrive(hyp, kind, score):
            scores = new.setdefault(hyp, [-np.inf, -np.inf])
            scores[kind] = max(scores[kind], score)
        for (words, place), (label, blank) in self.hyps.items():
            best = max(label, blank)
            symbol = place[-1] if place else SIL
            arrive((words, place), 1, best + frame[BLANK])
            arrive((words, place), 0, label + frame[symbol])
            for longer in self.places:
                if len(longer) != len(place) + 1 or longer[:-1] != place: continue
                arrive((words, longer), 0, (blank if longer[-1] == symbol else best) + frame[longer[-1]])
            for w in self.ends[place]: arrive(((*words, w), ()), 0, best + frame[SIL] + self.value((*words, w)))
        kept = sorted(new, key=lambda hyp: -max(new[hyp]) - self.ahead[hyp[1]])[:self.beam]
        self.hyps = {hyp: new[hyp] for hyp in kept if max(new[hyp]) > -np.inf}
        self.t += 1
        if self.t % self.every == 0: self.fuse(self.hyps)

    def fuse(self, wanted):
        before = {words: self.total(words) for words, _ in self.hyps}
        for words, _ in wanted: self.scored |= {words[:n] for n in range(1, len(words) + 1)}
        for (words, _), scores in self.hyps.items():
            for kind in (0, 1): scores[kind] += self.total(words) - before[words]

    def total(self, words): return sum(self.value(words[:n]) for n in range(1, len(words) + 1))

    def finish(self, end):
        "Texts of the complete hypotheses with their scores, best first."
        complete = [hyp for hyp in self.hyps if not hyp[1]]
        self.fuse(complete)
        scores = {}
        for hyp in complete:
            words = hyp[0]
            last = LM_WEIGHT*self.end_ngram(words) + (LLM_WEIGHT*self.llm.end(words) if end else 0)
            scores[' '.join(words)] = max(self.hyps[hyp]) + last
        return sorted(scores.items(), key=lambda item: -item[1])


def places_of(decoder, search):
    "Words and phonemes of the hypotheses, with their scores."
    trie, tree = decoder.trie, search.scorer.histories
    def phonemes(node):
        path = []
        while node > 0:
            path.append(int(trie.nodes['symbol'][node]))
            node = trie.nodes['parent'][node]
        return tuple(path[::-1])
    def words(h): return () if h == 0 else (*words(tree.parent[h]), decoder.words[tree.word[h]])
    hyps = search.state.hyps
    n = search.state.counters['n_hyps'][0]
    return {(words(hyp['state']), phonemes(hyp['node'])): [hyp['label'], hyp['blank']] for hyp in hyps[:n]}


def decoder_of(ngram, fusion, beam=30, **options):
    return LexiconBeamDecoder(LEXICON, ngram, beam=beam, lm_weight=LM_WEIGHT, acoustic_scale=SCALE, threshold=np.inf,
                              blank_skip=1, nbest=1000, fusion=fusion, **options)


def fusion_of(lm, every=4, **options): return LLMFusion(*lm, weight=LLM_WEIGHT, every=every, **options)


def assert_same(found, expected, both):
    """Check for the same hypotheses with the same scores, relative to the best one. In a narrow beam only the better
    score of each hypothesis is compared: the search drops a path that is worse than the whole beam if a better path
    leads to the same hypothesis."""
    assert found.keys() == expected.keys()
    a = np.array([found[hyp] for hyp in expected])
    b = np.array(list(expected.values()))
    if not both: a, b = a.max(1), b.max(1)
    np.testing.assert_allclose(a - a.max(), b - b.max(), atol=2e-3)


@pytest.mark.parametrize('kind, beam, every, n_frames, capitals, end', [
    ('opt', 10_000, 2, 6, True, True), ('opt', 25, 4, 13, True, True), ('gpt2', 35, 1, 13, True, False),
    ('llama', 25, 3, 13, False, True), ('qwen2', 40, 6, 13, True, False)])
def test_equals_the_plain_definition(lms, ngram, kind, beam, every, n_frames, capitals, end):
    "After each frame the hypotheses and scores are the same, and finally the sentences."
    decoder = decoder_of(ngram, fusion_of(lms[kind], every, capitals=capitals, end=end), beam)
    plain = PlainSearch(ngram, PlainLLM(*lms[kind], capitals), beam, every)
    log_probs = noisy(n_frames, seed=beam)
    search = decoder.take_search()
    frames = decoder.prepare(log_probs)
    for t in range(len(log_probs)):
        search.push(frames.scores[t:t + 1], frames.skip[t:t + 1])
        plain.push(frames.scores[t].astype(float))
        assert_same(places_of(decoder, search), plain.hyps, both=beam > 1000)
    ids, starts = search.texts(1000)
    texts = [' '.join(decoder.words[w] for w in ids[a:b]) for a, b in zip(starts, starts[1:])]
    expected = plain.finish(end)
    assert expected and (kind != 'opt' or len({len(t.split()) for t, _ in expected}) > 1)
    assert texts == [text for text, _ in expected]
    llm = [sum(plain.llm.history(tuple(t.split()[:n]))[0] for n in range(1, len(t.split()) + 1))
           + (plain.llm.end(tuple(t.split())) if end else 0) for t in texts]
    np.testing.assert_allclose(search.llm_scores(ids, starts), llm, atol=2e-3)
    hyps = decoder.decode(log_probs)
    assert {h.text for h in hyps} == set(texts)
    for h in hyps:
        assert abs(h.llm - llm[texts.index(h.text)]) < 2e-3
        assert abs(h.total - (SCALE*h.acoustic + LM_WEIGHT*h.ngram + LLM_WEIGHT*h.llm)) < 1e-9


def test_the_delay_matters(lms, ngram):
    "Results depend on the delay, so the test above would detect a wrong one."
    log_probs = noisy(13, seed=25)
    found = [[h.text for h in decoder_of(ngram, fusion_of(lms['opt'], every), beam=8).decode(log_probs)]
             for every in (1, 6, 100)]
    assert found[0] != found[1] and found[1] != found[2]


def test_streams_trials_at_once_and_pieces(lms, ngram):
    "Results depend neither on the pieces nor on the number or order of trials that share the model."
    decoder = decoder_of(ngram, fusion_of(lms['opt']))
    trials = [noisy(n, n) for n in (0, 3, 9, 14)]
    expected = [decoder.decode(x) for x in trials]
    assert decoder.decode_all(trials, n_jobs=2, progress=False) == expected
    one, other = Stream(decoder), Stream(decoder)
    for a, b in ((0, 1), (1, 6), (6, 6), (6, 14)):
        one.push(trials[3][a:b])
        other.push(trials[2][a:b])
    assert one.partial() in {h.text for h in expected[3]} | {' '.join(h.text.split()[:-1]) for h in expected[3]}
    assert (one.finish(), other.finish()) == (expected[3], expected[2])
    assert all(search.scorer.trial is None for search in decoder._idle) # Caches have been freed


def test_trials_that_end_within_a_word(lms, ngram):
    "If no hypothesis in the beam is complete, the LLM scores the completed sentence."
    decoder = decoder_of(ngram, fusion_of(lms['opt']), beam=1)
    hyps = decoder.decode(sure('AY AY SIL IY T T'))
    plain = PlainLLM(*lms['opt'])
    assert {h.text for h in hyps} & {'i eat', 'eye eat'}
    for h in hyps:
        words = tuple(h.text.split())
        assert abs(h.llm - sum(plain.history(words[:n])[0] for n in range(1, len(words) + 1))) < 1e-3


def test_each_word_is_run_once_and_memory_is_bounded(lms, ngram, monkeypatch):
    "In a long trial the cache holds only what the beam can continue, and cached tokens are not computed again."
    decoder = decoder_of(ngram, fusion_of(lms['opt'], every=3), beam=40)
    search = decoder.take_search()
    sizes = []
    runs = []
    run = []  # Tokens that the model has read
    append = _TokenTree.append
    monkeypatch.setattr(_TokenTree, 'append', lambda tree, tokens, parents: (run.extend(tokens),
                                                                            append(tree, tokens, parents)))
    frames = decoder.prepare(sure('AY SIL IY T SIL T UW SIL T IY SIL AH SIL '*4 + 'SIL SIL', sharp=4))
    for t in range(len(frames.scores)):
        search.push(frames.scores[t:t + 1], frames.skip[t:t + 1])
        written = search.scorer.trial
        tree = search.scorer.histories
        sizes.append(sum(x.nbytes for layer in written.tree.cache.layers for x in (layer.keys, layer.values)))
        runs.append(len(run))
    held = {a for h in search.beam['state'].copy().tolist() for a in ancestors(tree, h)}
    needed = 1 + sum(len(written.tokens[h]) for h in held) # The last frame is fused, so all texts are written
    assert len(frames.scores) % 3 == 0 and len(written.tree.depth) <= 1.5*needed
    assert runs[-1] > 2*len(written.tree.depth) and sizes[-1] < max(sizes)*2
    scored = 1 + np.flatnonzero(np.isfinite(tree.llm[1:search.scorer.n]))
    from_beginning = sum(1 + sum(len(written.tokens[i]) for i in ancestors(tree, h)) for h in scored)
    assert len(scored) > 100 and runs[-1] < from_beginning/2


def ancestors(tree, h):
    while h:
        yield h
        h = int(tree.parent[h])


def test_the_model_chooses_homophones_and_capitals(ngram):
    "Among homophones, the model's preference wins; a capitalised form maps to the lexicon's word."
    class Likes:
        every = 2
        weight = 0.9
        def __init__(self, word): self.word = word
        def begin(self, words): return SimpleNamespace(score=lambda h, p, ids: np.array(
            [0. if words[w] == self.word else -5. for w in ids]), end=lambda h: np.zeros(len(h)), keep=len)
    x = sure('AY SIL T UW SIL')
    for word in ('two', 'too', 'to'): assert decoder_of(ngram, Likes(word)).decode(x)[0].text.split()[1] == word


def test_unsupported_models(tmp_path, lms, ngram):
    for kind, reason in (('gemma2', 'transforms its logits'), ('bloom', 'cannot compute prefix trees')):
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            lm = load(tiny_lm(tmp_path/kind, kind, MIXED_CASE))
            with pytest.raises(LanguageModelError, match=reason): LLMFusion(*lm)
    model, tokenizer = lms['qwen2']
    class Bare:
        eos_token_id = bos_token_id = None
        def __call__(self, text, **options): return SimpleNamespace(input_ids=[1])
    with pytest.raises(LanguageModelError, match='has no start or end token'): LLMFusion(model, Bare())
    class Endless(Bare):
        bos_token_id = 0
    with pytest.raises(LanguageModelError, match='set bos_token and eos_token'): LLMFusion(model, Endless(), end=True)


@pytest.mark.filterwarnings('ignore:invalid value')
def test_long_trials_and_overflow_are_errors(lms, ngram):
    decoder = decoder_of(ngram, fusion_of(lms['opt'], every=1), beam=4)
    with pytest.raises(LanguageModelError, match='tokens is too long for OPTForCausalLM, which takes up to 64'):
        decoder.decode(sure('AY SIL '*70, sharp=40))
    model, tokenizer = lms['gpt2']
    broken = type(model)(model.config).eval()
    fusion = LLMFusion(broken, tokenizer)
    torch.nn.init.constant_(broken.get_output_embeddings().weight, np.nan)
    with pytest.raises(LanguageModelError, match='not a number'):
        fusion.begin(WORDS).score(np.array([1]), np.array([0]), np.array([0]))


def test_defaults_equal_the_configurations():
    parameters = {k: p.default for k, p in inspect.signature(LLMFusion).parameters.items()
                  if k not in ('model', 'tokenizer', 'every')}
    of_config = DecodeConfig().model_dump()
    assert {f'llm_{k}': v for k, v in parameters.items()}.items() <= of_config.items()
    of_model = LLMConfig.model_fields.keys() - {'llm_dtype'}
    assert {k for k in of_config if k.startswith('llm')} == {f'llm_{k}' for k in parameters} | of_model


def test_a_search_without_a_fusion(ngram):
    decoder = LexiconBeamDecoder(LEXICON, ngram)
    search = decoder.take_search()
    assert isinstance(search, Search) and not isinstance(search.scorer, HistoryScorer)
    assert search.llm_scores(np.zeros(0, int), np.zeros(1, int)) is None
