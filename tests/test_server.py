"The server with a real Redis: the official protocol in every detail, and all kinds of failures."
import json
import logging
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import contextmanager
from importlib.util import find_spec

import numpy as np
import pytest

redis = pytest.importorskip('redis', reason='redis-py is not installed; pip install b2t_kaggle[serve]')
if shutil.which('redis-server') is None: pytest.skip('redis-server is not installed', allow_module_level=True)

from tiny_models import tiny_lm

from b2t_kaggle.decoding import server
from b2t_kaggle.decoding.decoder import LexiconBeamDecoder
from b2t_kaggle.decoding.nbest import LLMHypothesis, Word
from b2t_kaggle.decoding.server import OnlineDecoder, check_redis, protocol, serve
from b2t_kaggle.decoding.streaming import Stream
from b2t_kaggle.devices.processes import tied
from b2t_kaggle.lm.automaton import Automaton
from b2t_kaggle.lm.causal import load_lm, score_sentences, token_sequences
from b2t_kaggle.lm.ngram import NGram, build_ngram
from b2t_kaggle.phonemes import BLANK, to_class_ids, to_lm_order
from b2t_kaggle.rescoring.mixture import Weights
from b2t_kaggle.rescoring.online import LLMRescorer, llm_scorer

pytestmark = pytest.mark.filterwarnings('ignore:.*too little text')
LEXICON = {
    word: [phonemes]
    for word, *phonemes in map(
        str.split,
        """how HH AW, are AA R, you Y UW, there DH EH R, their DH EH R, i AY, am AE M, here HH IY R, hear HH IY R,
    is IH Z, it IH T, good G UH D, to T UW, too T UW, see S IY, sea S IY""".split(','),
    )
}
TEXT = [
    'how are you',
    'are you there',
    'i am here',
    'how is it there',
    'you are here',
    'it is good to see you',
    'i see',
]
LIMIT = 60 # Longest wait on a busy machine, in seconds
FURTHER = {b'words'} # Fields that the official script does not read
# All that a user of the server needs, according to the notebook
COMMANDS = '+time +exists +get +xread +xadd +xrevrange +client|setname +client|list'


class Redis:
    "A separate redis-server in a temporary folder."
    def __init__(self, folder, *options, tls=False):
        self.reserved = socket.socket() # Also bound, so that no other process is given the port while Redis is down
        self.reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.reserved.bind(('127.0.0.1', 0))
        self.port = self.reserved.getsockname()[1]
        ports = ['--port', '0', '--tls-port', str(self.port)] if tls else ['--port', str(self.port)]
        self.command = [
            'redis-server',
            *ports,
            '--bind',
            '127.0.0.1',
            '--save',
            '',
            '--dir',
            str(folder),
            '--loglevel',
            'warning',
            *options,
        ]
        self.start()

    def start(self): self.process = subprocess.Popen(tied(self.command), stdout=subprocess.DEVNULL)

    def stop(self, kill=True):
        # Redis saves before it ends, if it is configured to save at all
        self.process.kill() if kill else self.process.terminate()
        self.process.wait()

    def client(self, **options):
        "A connection like the official client's, with a timeout so that a test cannot hang."
        return redis.Redis('127.0.0.1', self.port, socket_timeout=2*LIMIT, **options)


@pytest.fixture(scope='module')
def decoder(tmp_path_factory):
    path = build_ngram(TEXT, tmp_path_factory.mktemp('lm')/'lm.arpa', order=2)
    lm = (NGram if find_spec('kenlm') else Automaton).load(path) # KenLM's scores, if available, are not our code
    decoder = LexiconBeamDecoder(LEXICON, lm, nbest=5)
    stream = Stream(decoder) # Compile before any client waits
    stream.push(log_softmax(np.zeros((9, 41))))
    stream.partial()
    stream.finish()
    return decoder


@pytest.fixture(scope='module')
def plain(tmp_path_factory):
    server = Redis(tmp_path_factory.mktemp('redis'))
    wait_for(server.client().ping)
    yield server
    server.stop()


def wait_for(condition, seconds=LIMIT):
    "Wait until a condition holds; Redis may not have started yet."
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if found := condition(): return found
        except redis.ConnectionError: pass
        time.sleep(0.01)
    raise AssertionError('waited in vain')


@contextmanager
def serving(decoder, where, clients=None, **options):
    "Run a server in a thread; yields a client's connection, and raises the server's exception."
    stop = threading.Event()
    failure = []
    def run():
        try: serve(decoder, '127.0.0.1', where.port, stop=stop, **options)
        except BaseException as e: failure.append(e)
    thread = threading.Thread(target=run)
    client = where.client(**clients or {})
    wait_for(client.ping)
    client.flushall()
    thread.start()
    try:
        wait_for(lambda: failure or client.exists('remote_lm_args'))
        if failure: raise failure[0]
        yield client
    finally:
        stop.set()
        thread.join()
        client.close()
    assert not failure


def stopped_after(seconds):
    "An event that stops a server which was started by mistake."
    stop = threading.Event()
    timer = threading.Timer(seconds, stop.set)
    timer.daemon = True
    timer.start()
    return stop


class OfficialClient:
    "Sends the same commands in the same order as the kit's evaluation script, and waits in the same way."
    def __init__(self, r, flush=True):
        self.r = r
        if flush: r.flushall()
        self.seen = {}
        for name in ('output_partial', 'output_final', 'done_resetting', 'done_finalizing', 'done_updating_params'):
            s, us = r.time()
            self.seen[f'remote_lm_{name}'] = int(s*1000 + us/1000)

    def wait(self, stream):
        "The next entry of a stream after the one seen last."
        found = self.r.xread({stream: self.seen[stream]}, count=1, block=1000*LIMIT)
        assert found, f'no answer on {stream}'
        (self.seen[stream], fields), = found[0][1]
        return fields

    def reset(self):
        self.r.xadd('remote_lm_reset', {'done': 0})
        return self.wait('remote_lm_done_resetting')

    def update(self, **params):
        self.r.xadd('remote_lm_update_params', params)
        return self.wait('remote_lm_done_updating_params')

    def send(self, logits):
        self.r.xadd('remote_lm_input', {'logits': np.float32(to_lm_order(logits)).tobytes()})
        return self.wait('remote_lm_output_partial')

    def finalize(self):
        self.r.xadd('remote_lm_finalize', {'done': 0})
        return self.wait('remote_lm_output_final')

    def trial(self, logits):
        """Send a trial like the kit's script, all frames at once. Returns the final fields, and the candidates as the
        script reads them."""
        assert self.reset() == {b'done': b'1'}
        assert set(self.send(logits)) - FURTHER == {b'lm_response_partial'}
        fields = self.finalize()
        assert set(fields) - FURTHER == {b'lm_response_final', b'scoring', b'context_str'}
        return fields, candidates(fields)


def candidates(fields):
    "Sentence, acoustic, n-gram, LLM and total score of each candidate, sorted by total."
    parts = fields[b'scoring'].decode().split(';')
    rows = list(zip(parts[::5], *(map(float, parts[i::5]) for i in range(1, 5)), strict=True))
    return sorted(rows, key=lambda row: -row[4])


def logits_of(sentence, seed=0, sharp=7.0):
    rng = np.random.default_rng(seed)
    ids = [BLANK]
    for k in to_class_ids([p for w in sentence.split() for p in (*LEXICON[w][0], 'SIL')]):
        ids += [k] * rng.integers(1, 3) + [BLANK]
    x = rng.standard_normal((len(ids), 41))
    x[np.arange(len(ids)), ids] += sharp
    return x.astype(np.float32)


def log_softmax(x): return x.astype(np.float64) - np.logaddexp.reduce(x.astype(np.float64), axis=1, keepdims=True)


def offline(decoder, logits):
    return [(h.text, h.acoustic, h.ngram, 0.0, h.total) for h in decoder.decode(log_softmax(logits))]


def same(found, expected):
    assert [row[0] for row in found] == [row[0] for row in expected]
    np.testing.assert_allclose([row[1:] for row in found], [row[1:] for row in expected], atol=1e-9)


def test_official_evaluation(decoder, plain):
    """Trials are sent as by the kit's script, one after another. The answers are the offline n-best, and only the
    client's own flush deletes data."""
    with serving(decoder, plain) as r:
        r.config_resetstat()
        client = OfficialClient(r)
        for seed, sentence in enumerate(TEXT):
            logits = logits_of(sentence, seed)
            fields, found = client.trial(logits)
            same(found, offline(decoder, logits))
            assert fields[b'lm_response_final'].decode() == found[0][0] and fields[b'context_str'] == b''
        for _ in TEXT: assert client.wait('remote_lm_done_finalizing') == {b'done': b'1'}
        for stream, n in dict(output_partial=1, output_final=1, done_resetting=1, done_finalizing=1).items():
            assert r.xlen(f'remote_lm_{stream}') == n * len(TEXT)
        for asked, answered in (
            ('reset', 'done_resetting'),
            ('input', 'output_partial'),
            ('finalize', 'output_final'),
        ):  # Otherwise the client, which counts in whole milliseconds, may miss it
            for (a, _), (b, _) in zip(r.xrange(f'remote_lm_{asked}'), r.xrange(f'remote_lm_{answered}'), strict=True):
                assert server.entry_id(b)[0] > server.entry_id(a)[0]
        (_, args), = r.xrange('remote_lm_args')
        assert {k: args[k] for k in (b'acoustic_scale', b'blank_penalty', b'nbest', b'alpha', b'do_opt')} == {
            b'acoustic_scale': b'0.8', b'blank_penalty': b'1.0', b'nbest': b'5', b'alpha': b'0.55', b'do_opt': b'0'}
        used = {k.removeprefix('cmdstat_'): v['calls'] for k, v in r.info('commandstats').items()}
        assert used['flushall'] == 1 and not {'del', 'unlink', 'flushdb', 'xtrim', 'xdel'} & set(used)


def test_frame_by_frame(decoder, plain):
    "Each entry of any length gets a partial answer, and the final answer equals that of the whole trial."
    logits = logits_of('it is good to see you', 3)
    with serving(decoder, plain) as r:
        client = OfficialClient(r)
        client.reset()
        stream = Stream(decoder)
        log_probs = log_softmax(logits)
        partials = []
        for a, b in ((0, 1), (1, 2), (2, 2), (2, 9), *((i, i + 1) for i in range(9, len(logits)))):
            partials.append(client.send(logits[a:b])[b'lm_response_partial'].decode())
            stream.push(log_probs[a:b])
            assert partials[-1] == stream.partial()
        assert len(set(partials)) > 3 and partials[-1] == 'it is good to see you'
        same(candidates(client.finalize()), offline(decoder, logits))


def test_words_with_times(decoder, plain):
    """Next to the official fields, which do not change, answers have words with times and confidences. After an LLM,
    these are the words of the sentence that it prefers."""
    timed = decoder.with_options(frame_ms=80., frame_offset_ms=100.)
    logits = logits_of('i am here', 4, sharp=4)
    log_probs = log_softmax(logits)
    def read(fields): return [Word(**values) for values in json.loads(fields[b'words'])]
    def check(found, expected):
        assert [w[:3] for w in found] == [w[:3] for w in expected]
        assert [w.confidence for w in found] == pytest.approx([w.confidence for w in expected])
    with serving(timed, plain) as r:
        client = OfficialClient(r)
        client.reset()
        stream = Stream(timed)
        for row, frame in zip(logits, log_probs):
            fields = client.send(row[None])
            stream.push(frame[None])
            assert fields.keys() == {b'lm_response_partial', b'words'}
            check(read(fields), stream.partial_words())
            assert ' '.join(w.text for w in read(fields)) == fields[b'lm_response_partial'].decode()
        fields = client.finalize()
        assert fields.keys() == {b'lm_response_final', b'scoring', b'context_str', b'words'}
        same(candidates(fields), offline(decoder, logits))
        check(read(fields), timed.decode(log_probs)[0].words)
    def prefer_last(hyps, context): return [LLMHypothesis(**vars(h), llm=10.*i) for i, h in enumerate(hyps)]
    rescorer = LLMRescorer(prefer_last, timed, n_augment=0, temperature=2.)
    with serving(timed, plain, rescorer=rescorer) as r:
        client = OfficialClient(r)
        client.send(logits)
        fields = client.finalize()
        hyps = timed.decode(log_probs)
        assert fields[b'lm_response_final'].decode() == hyps[-1].text != hyps[0].text
        assert [w[:3] for w in read(fields)] == [w[:3] for w in hyps[-1].words]
        rows = candidates(fields)
        p = np.exp((np.array([row[4] for row in rows]) - rows[0][4])/2)
        same_first = [row[0].split()[0] == rows[0][0].split()[0] for row in rows]
        assert read(fields)[0].confidence == pytest.approx(p[same_first].sum()/p.sum())


def test_logits_sent_without_waiting(decoder, plain):
    "A client may write a whole trial before it reads an answer; the finalize does not overtake the logits."
    logits = logits_of('how is it there', 5)
    with serving(decoder, plain) as r:
        client = OfficialClient(r)
        with r.pipeline(transaction=True) as p: # In one transaction, so within a millisecond or two
            p.xadd('remote_lm_reset', {'done': 0})
            for row in to_lm_order(logits): p.xadd('remote_lm_input', {'logits': row.tobytes()})
            p.xadd('remote_lm_finalize', {'done': 0})
            p.execute()
        same(candidates(client.wait('remote_lm_output_final')), offline(decoder, logits))
        assert r.xlen('remote_lm_output_partial') == len(logits)


def test_parameters(decoder, plain, caplog):
    """Parameters are updated between reset and logits, like the script does; updates within a trial apply to the next
    trial."""
    logits = logits_of('you are here', 1, sharp=4)
    other = LexiconBeamDecoder(LEXICON, decoder.lm, acoustic_scale=0.35, blank_penalty=90.0, nbest=3)
    with serving(decoder, plain) as r:
        client = OfficialClient(r)
        client.reset()
        assert client.update(
            acoustic_scale=0.35, blank_penalty=90.0, alpha=0.55, nbest=3, max_active=7000, beam=17.0
        ) == {b'done': b'1'}
        assert r.xrevrange('remote_lm_args', count=1)[0][1][b'blank_penalty'] == b'90.0'
        client.update(
            **{k.decode(): v for k, v in r.xrevrange('remote_lm_args', count=1)[0][1].items()}
        )  # All values shown by the server may be sent back
        client.send(logits[:10])
        client.update(acoustic_scale=0.8, blank_penalty=1.0, nbest=5)
        client.send(logits[10:])
        assert {row[0] for row in candidates(client.finalize())} == {row[0] for row in offline(other, logits)}
        client.reset(), client.send(logits)
        same(candidates(client.finalize()), offline(decoder, logits))
        for params, words in (
            (dict(acoustic_scale='loud'), "acoustic_scale: found 'loud'"),
            (dict(nbest=0), "nbest: found '0'"),
            (dict(nbest='2.5'), 'a whole number'),
            (dict(alpha='nan'), "alpha: found 'nan'"),
            (dict(do_opt=1), 'without an LLM'),
            (dict(score_penalty_percent=2), "found '2', expected a number from 0 to 1"),
        ):
            answer = client.update(**params)
            assert answer[b'done'] == b'0' and words in answer[b'error'].decode()
        same(client.trial(logits)[1], offline(decoder, logits))
        for params, name in ((dict(acoustic_scal=1), 'acoustic_scal'), ({b'\xff': b'\xfe'}, '\ufffd'),
                             (dict(specific_word_bias=5), 'specific_word_bias')): # Sent by the official client
            r.xadd('remote_lm_update_params', params | {'alpha': 0.25})
            assert client.wait('remote_lm_done_updating_params') == {b'done': b'1'}
            assert f'{name} = ' in caplog.text and 'is ignored: this server takes acoustic_scale' in caplog.text
            assert r.xrevrange('remote_lm_args', count=1)[0][1][b'alpha'] == b'0.25'
            caplog.clear()


def test_llm(decoder, plain):
    """The official mixture, with the context from the key; α and the use of the LLM may be changed. After a failure,
    the answer reports it and contains the n-gram's result."""
    asked = []
    def rescore(hyps, context):
        asked.append(context)
        if context == 'fail': raise MemoryError('no room')
        return [LLMHypothesis(**vars(h), llm=-float(len(h.text))) for h in hyps]
    logits = logits_of('i see', 2, sharp=4)
    rescorer = LLMRescorer(rescore, decoder, Weights(acoustic_scale=0.5, alpha=0.3, word_score=1.0), n_augment=0)
    with serving(decoder, plain, rescorer=rescorer) as r:
        client = OfficialClient(r)
        r.set('contextual_decoding_current_context', '  where are they ')
        fields, found = client.trial(logits)
        assert fields[b'context_str'] == b'where are they' and fields[b'lm_response_final'].decode() == found[0][0]
        plain_scores = {row[0]: row for row in offline(decoder, logits)}
        assert {row[0] for row in found} == set(plain_scores)
        for text, acoustic, ngram, llm, total in found:
            assert (acoustic, ngram) == pytest.approx(plain_scores[text][1:3]) and llm == -len(text)
            assert total == pytest.approx(0.5*acoustic + 0.7*ngram + 0.3*llm + len(text.split()))
        r.set('contextual_decoding_current_context', 'fail')
        client.reset(), client.send(logits)
        failed = client.finalize()
        assert 'the LLM failed' in failed[b'error'].decode() and 'no room' in failed[b'error'].decode()
        same(candidates(failed), offline(decoder, logits))
        r.delete('contextual_decoding_current_context')
        client.update(alpha=0.0, acoustic_scale=0.8)  # The official kit has one scale for search and mixture
        assert client.trial(logits)[1][0][4] == pytest.approx(
            max(row[4] + len(row[0].split()) for row in plain_scores.values())
        )
        client.reset(), client.send(logits), client.update(do_opt=0)   # Too late for this trial
        assert candidates(client.finalize())[0][3] < 0
        same(client.trial(logits)[1], offline(decoder, logits))
    assert asked == ['where are they', 'fail', '', '']


def test_a_causal_language_model(decoder, plain, tmp_path):
    """A tiny model of transformers is used as `b2t serve` uses a large one; its scores equal those of `score_sentences`
    after the context."""
    pytest.importorskip('transformers', reason='transformers is not installed; pip install b2t_kaggle[llm]')
    model, tokenizer = load_lm(tiny_lm(tmp_path, 'gpt2', TEXT))
    logits = logits_of('it is good to see you', 1, sharp=4)
    totals = lambda found: [0.8 * a + 0.45 * n + 0.55 * m for _, a, n, m, _ in found]
    with serving(decoder, plain, rescorer=LLMRescorer(llm_scorer(model, tokenizer), decoder)) as r:
        r.set('contextual_decoding_current_context', 'who is there')
        client = OfficialClient(r, flush=False)
        fields, found = client.trial(logits)
        client.update(length_penalty=0.5)
        _, penalized = client.trial(logits)
    texts = [row[0] for row in found]
    assert len(found) > 5 and fields[b'lm_response_final'].decode() == texts[0]
    log_probs = dict(zip(texts, score_sentences(model, tokenizer, texts, context='who is there')))
    n_tokens = dict(zip(texts, map(len, token_sequences(tokenizer, texts)[0])))
    np.testing.assert_allclose([row[3] for row in found], [log_probs[t] for t in texts], atol=1e-4)
    np.testing.assert_allclose(
        [row[3] for row in penalized], [log_probs[row[0]] - 0.5 * n_tokens[row[0]] for row in penalized], atol=1e-4
    )
    for rows in (found, penalized): np.testing.assert_allclose([row[4] for row in rows], totals(rows), atol=1e-6)


def test_exchanged_words(decoder, plain):
    "The client chooses how many candidates exchange words and at what cost, from the next trial on."
    logits = logits_of('it is good to see you', 1, sharp=4)
    def zeros(hyps, context): return [LLMHypothesis(**vars(h)) for h in hyps]
    with serving(decoder, plain, rescorer=LLMRescorer(zeros, decoder)) as r:
        client = OfficialClient(r)
        nbest = {row[0]: row for row in offline(decoder, logits)}
        cheap = {row[0]: row for row in client.trial(logits)[1]}
        client.update(score_penalty_percent=0.5)
        dear = {row[0]: row for row in client.trial(logits)[1]}
        client.reset(), client.send(logits), client.update(top_candidates_to_augment=0) # Too late for this trial
        assert {row[0] for row in candidates(client.finalize())} == set(dear)
        assert {row[0] for row in client.trial(logits)[1]} == set(nbest) < set(cheap) == set(dear)
    for text in cheap:
        assert cheap[text][2] == pytest.approx(decoder.lm.score(text))
        if text in nbest: assert dear[text] == cheap[text]
        else: assert dear[text][1]/1.5 == pytest.approx(cheap[text][1]/1.01) # Acoustic scores are below 0


@pytest.mark.parametrize('fields, words', [
    ({'logits': b'abc'}, 'found 3 bytes, expected a multiple of 164'),
    ({'logits': np.zeros((5, 40), np.float32).tobytes()}, 'found 800 bytes'),
    ({'logits': np.full((2, 41), np.nan, np.float32).tobytes()}, 'frame 0, class 0: found nan'),
    ({'logits': np.full((2, 41), -np.inf, np.float32).tobytes()}, 'frame 0, class 0: found -inf'),
    ({'logits': np.zeros((21_000, 41), np.float32).tobytes()}, 'found 21000 frames, expected at most'),
    ({'logit': b''}, "no field logits; found b'logit'"),
])
def test_entries_that_cannot_be_used(fields, words, decoder, plain):
    "The client's answers give the reason, including the final one; the next trial is not affected."
    logits = logits_of('i am here')
    with serving(decoder, plain) as r:
        client = OfficialClient(r)
        client.reset()
        client.send(logits[:8])
        r.xadd('remote_lm_input', fields)
        answer = client.wait('remote_lm_output_partial')
        assert words in answer[b'error'].decode() and answer[b'lm_response_partial'].decode() in 'i am here'
        client.send(logits[8:])
        final = client.finalize()
        assert final[b'lm_response_final'] == b'i am here' and words in final[b'error'].decode()
        same(client.trial(logits)[1], offline(decoder, logits))


def test_extreme_logits(decoder, plain):
    "The largest numbers of float32 and classes excluded by -inf are valid logits."
    logits = logits_of('i am here')
    best = logits == logits.max(1, keepdims=True)
    extreme, ruled_out, equal = (
        np.where(best, a, b).astype(np.float32) for a, b in ((3e38, -3e38), (0, -np.inf), (-3e38, -3e38))
    )
    with serving(decoder, plain) as r:
        client = OfficialClient(r)
        assert client.trial(extreme)[1][0][:2] == client.trial(ruled_out)[1][0][:2] == ('i am here', 0.0)
        same(client.trial(equal)[1], offline(decoder, np.zeros_like(logits)))


def test_trials_without_data(decoder, plain):
    "Reset after reset, finalize at once, and logits without a reset."
    logits = logits_of('how are you')
    with serving(decoder, plain) as r:
        client = OfficialClient(r)
        client.reset(), client.reset()
        fields = client.finalize()
        (text, acoustic, ngram, llm, total), = candidates(fields)
        assert (text, acoustic, llm, fields[b'lm_response_final']) == ('', 0, 0, b'') and total == pytest.approx(
            decoder.lm.score('')
        )
        client.finalize()
        client.send(logits)                                            # After a finalize, a new trial starts by itself
        same(candidates(client.finalize()), offline(decoder, logits))


def test_dead_clients_and_simultaneous_clients(decoder, plain, caplog):
    """Input of a dead client does not affect the next client's trial. Two simultaneous clients get as many answers as
    they requested, and the log has a warning."""
    logits = logits_of('are you there')
    with serving(decoder, plain) as r, caplog.at_level(logging.WARNING, 'b2t_kaggle.serve'):
        dead = OfficialClient(plain.client())
        dead.reset()
        dead.send(logits_of('good')), dead.send(logits[:5])
        dead.r.close()
        client = OfficialClient(r)
        same(client.trial(logits)[1], offline(decoder, logits))
        client.wait('remote_lm_done_finalizing') # Otherwise the counts below may miss it
        assert 'its client has died, or there are two' in caplog.text
        with plain.client() as r2:
            second = OfficialClient(r2, flush=False)
            counts = lambda: [
                r.xlen(f'remote_lm_{s}')
                for s in ('done_resetting', 'output_partial', 'output_final', 'done_finalizing')
            ]
            before = counts()
            for c in (client, second): c.r.xadd('remote_lm_reset', {'done': 0})
            for c in (client, second): c.r.xadd('remote_lm_input', {'logits': to_lm_order(logits).tobytes()})
            for c in (client, second): c.r.xadd('remote_lm_finalize', {'done': 0})
            wait_for(lambda: counts() == [n + 2 for n in before])
        same(OfficialClient(r).trial(logits)[1], offline(decoder, logits))


def rescore_that_waits(asked: threading.Event, go: threading.Event):
    "A rescorer that signals each call, and answers when it is allowed to."
    def rescore(hyps, context):
        asked.set()
        assert go.wait(LIMIT)
        return [LLMHypothesis(**vars(h)) for h in hyps]
    return rescore


def test_flush_while_an_answer_is_computed(decoder, plain):
    """The official client flushes the database when it starts. Earlier requests are not answered afterwards, as the
    client would take the old sentence for its own."""
    slow, go = threading.Event(), threading.Event()
    rescore = rescore_that_waits(slow, go)
    logits = logits_of('i see')
    with serving(decoder, plain, rescorer=LLMRescorer(rescore, decoder)) as r:
        with plain.client() as r1:
            first = OfficialClient(r1)
            first.reset(), first.send(logits_of('how are you'))
            r1.xadd('remote_lm_finalize', {'done': 0})
        assert slow.wait(LIMIT)
        second = OfficialClient(r)
        go.set()
        assert second.trial(logits)[1][0][0] == 'i see'
        wait_for(lambda: r.xlen('remote_lm_done_finalizing') == r.xlen('remote_lm_output_final') == 1)


def test_requests_from_before_the_server(decoder, plain):
    "A request from before the server started gets no answer."
    with plain.client() as r:
        r.flushall()
        r.xadd('remote_lm_input', {'logits': b''}, '1700000000002-0')
        with server.connect(port=plain.port) as own:
            server.RedisConnection(own, OnlineDecoder(decoder), server.greet(own)).step()
        assert not r.exists('remote_lm_output_partial')


def test_keys_of_the_wrong_type(decoder, plain, caplog):
    "Once these keys are deleted, the server answers."
    with serving(decoder, plain) as r, caplog.at_level(logging.INFO, 'b2t_kaggle.serve'):
        client = OfficialClient(r)
        for _ in range(2):
            caplog.clear()
            wait_for(lambda: r.exists('remote_lm_args'))
            r.set('remote_lm_input', 'x')
            wait_for(lambda: 'WRONGTYPE' in caplog.text)
            r.delete('remote_lm_input')
            same(client.trial(logits_of('i see'))[1], offline(decoder, logits_of('i see')))
        caplog.clear()
        r.rpush('contextual_decoding_current_context', 'a list')
        client.reset(), client.send(logits_of('i see'))
        r.xadd('remote_lm_finalize', {'done': 0})
        wait_for(lambda: 'WRONGTYPE' in caplog.text)
        r.delete('contextual_decoding_current_context')
        same(candidates(client.wait('remote_lm_output_final')), offline(decoder, logits_of('i see')))


def test_redis_restarts(decoder, tmp_path, caplog):
    "The server reconnects to the new Redis, and the trial continues if its client continues."
    db = Redis(tmp_path)
    logits = logits_of('it is good to see you')
    try:
        with caplog.at_level(logging.INFO, 'b2t_kaggle.serve'), serving(decoder, db) as r:
            client = OfficialClient(r)
            client.reset()
            client.send(logits[:9])
            db.stop()
            wait_for(lambda: 'trying again' in caplog.text)
            db.start()
            wait_for(lambda: r.exists('remote_lm_args'))
            client = OfficialClient(r, flush=False)
            client.send(logits[9:])
            same(candidates(client.finalize()), offline(decoder, logits))
            same(client.trial(logits)[1], offline(decoder, logits))
    finally: db.stop()


def test_broken_connections(decoder, plain, caplog):
    "If a connection breaks while Redis runs, the trial continues, and no answer is missing or sent twice."
    logits = logits_of('it is good to see you')
    def cut(r):
        for c in r.client_list():
            if c['name'].startswith('b2t-serve'): r.client_kill_filter(_id=c['id'])
    with serving(decoder, plain) as r, caplog.at_level(logging.INFO, 'b2t_kaggle.serve'):
        client = OfficialClient(r)
        client.reset()
        for i, row in enumerate(logits):
            if i % 10 == 5: cut(r)
            client.send(row[None])
        cut(r)
        same(candidates(client.finalize()), offline(decoder, logits))
        assert r.xlen('remote_lm_output_partial') == len(logits) and r.xlen('remote_lm_output_final') == 1
        assert 'trying again' in caplog.text


@pytest.mark.parametrize('command', ['pipeline', 'GET', 'XADD']) # Reading, the context, and answers
def test_cut_at_a_command(command, decoder, plain, monkeypatch):
    """The connection breaks at every third use of a command, in turn before and after Redis has received it. No answer
    is missing or sent twice, and the words are correct."""
    uses, cuts = Counter(), Counter()
    def cutting(whole, name):
        def execute(self, *args, **kwargs):
            if (name or args[0]) != command or not (
                self.connection_pool.connection_kwargs.get('client_name') or ''
            ).startswith('b2t-serve'):
                return whole(self, *args, **kwargs)
            uses[command] += 1
            when = {3: 'before', 0: 'after'}.get(uses[command] % 6)
            cuts[when] += 1
            if when != 'before': result = whole(self, *args, **kwargs)
            if when: raise redis.ConnectionError('cut off')
            return result
        return execute
    with serving(decoder, plain) as r:
        monkeypatch.setattr(redis.Redis, 'execute_command', cutting(redis.Redis.execute_command, None))
        monkeypatch.setattr(redis.client.Pipeline, 'execute', cutting(redis.client.Pipeline.execute, 'pipeline'))
        client = OfficialClient(r)
        for sentence in TEXT[:5]:
            same(client.trial(logits_of(sentence))[1], offline(decoder, logits_of(sentence)))
            assert client.wait('remote_lm_done_finalizing') == {b'done': b'1'}
        monkeypatch.undo()
        for stream in ('output_partial', 'output_final', 'done_resetting', 'done_finalizing'):
            assert r.xlen(f"remote_lm_{stream}") == 5
    assert cuts['before'] and cuts['after']


def test_writes_that_redis_refuses(decoder, plain, caplog):
    "If the key of an answer has the wrong type, the log reports it, and the server keeps running."
    with serving(decoder, plain) as r, caplog.at_level(logging.INFO, 'b2t_kaggle.serve'):
        OfficialClient(r)
        r.set('remote_lm_done_resetting', 'x')
        r.xadd('remote_lm_reset', {'done': 0})
        wait_for(lambda: 'WRONGTYPE' in caplog.text)
        same(OfficialClient(r).trial(logits_of('i see'))[1], offline(decoder, logits_of('i see')))


def test_a_bug_in_the_server(decoder, plain, monkeypatch, caplog):
    "An answer is sent even after a bug, so that no client waits forever."
    with serving(decoder, plain) as r:
        client = OfficialClient(r)
        with monkeypatch.context() as m:
            m.setattr(protocol, 'read_logits', lambda *_: 1/0)
            assert 'ZeroDivisionError' in client.send(logits_of('i see'))[b'error'].decode()
            m.setattr(protocol, 'scoring', lambda *_: 1/0)
            assert 'ZeroDivisionError' in client.finalize()[b'error'].decode()
            assert b'error' in client.wait('remote_lm_done_finalizing')
        same(client.trial(logits_of('i see'))[1], offline(decoder, logits_of('i see')))
    assert 'Traceback' in caplog.text


def test_one_server_per_database(decoder, plain):
    "A second server would answer every client twice; it may use another database."
    with serving(decoder, plain) as r:
        with pytest.raises(RuntimeError, match='another b2t serve is connected to this database'):
            serve(decoder, '127.0.0.1', plain.port, stop=stopped_after(LIMIT))
        with serving(decoder, plain, clients=dict(db=1), db=1) as r1:
            found = OfficialClient(r1, flush=False).trial(logits_of('i see'))[1]
            assert not r.exists('remote_lm_output_final') and r1.exists('remote_lm_output_final')
        same(found, offline(decoder, logits_of('i see')))
        with pytest.raises(RuntimeError, match='another b2t serve'): check_redis(port=plain.port)
        check_redis(port=plain.port, db=1)


def test_a_missing_redis(caplog):
    "A missing Redis is detected first, but is not an error, because Redis may start later."
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0)) # No process listens on this port
        check_redis(port=s.getsockname()[1])
    assert 'waiting for it' in caplog.text


def test_passwords(decoder, tmp_path):
    """A user with only the permissions that the server needs is accepted; with a wrong or missing password, the error
    says so."""
    db = Redis(
        tmp_path, '--requirepass', 'master', '--user', *f'lm on >secret ~remote_lm_* ~contextual_* {COMMANDS}'.split()
    )
    options = dict(clients=dict(password='master'))
    try:
        for wrong in (dict(), dict(password='wrong'), dict(username='lm', password='master')):
            with (
                pytest.raises(PermissionError, match='refused us: .*; check user, password'),
                serving(decoder, db, **options, **wrong),
            ):
                pass
            with pytest.raises(PermissionError, match='check user, password'): check_redis(port=db.port, **wrong)
        with serving(decoder, db, **options, username='lm', password='secret') as r:
            same(OfficialClient(r).trial(logits_of('i see'))[1], offline(decoder, logits_of('i see')))
        db.client(password='master').acl_setuser('lm', enabled=True, commands=['-client|list'])
        with (
            pytest.raises(PermissionError, match='refused us: .*client|list'),
            serving(decoder, db, **options, username='lm', password='secret'),
        ):
            pass
    finally: db.stop()


@pytest.mark.skipif(shutil.which('openssl') is None, reason='openssl is not installed')
def test_tls(decoder, tmp_path):
    "The connection is encrypted, with certificates on both sides; an untrusted certificate is refused."
    def openssl(*args): subprocess.run(['openssl', *args], cwd=tmp_path, check=True, capture_output=True)

    openssl(
        'req',
        '-x509',
        '-newkey',
        'ec',
        '-pkeyopt',
        'ec_paramgen_curve:prime256v1',
        '-nodes',
        '-days',
        '2',
        '-keyout',
        'ca.key',
        '-out',
        'ca.pem',
        '-subj',
        '/CN=ca',
    )
    (tmp_path/'names').write_text('subjectAltName=IP:127.0.0.1')
    for who in ('redis', 'us'):
        openssl(
            'req',
            '-newkey',
            'ec',
            '-pkeyopt',
            'ec_paramgen_curve:prime256v1',
            '-nodes',
            '-keyout',
            f'{who}.key',
            '-out',
            f'{who}.csr',
            '-subj',
            f'/CN={who}',
        )
        openssl(
            'x509',
            '-req',
            '-days',
            '2',
            '-in',
            f'{who}.csr',
            '-CA',
            'ca.pem',
            '-CAkey',
            'ca.key',
            '-CAcreateserial',
            '-out',
            f'{who}.pem',
            '-extfile',
            'names',
        )
    ca, cert, key = (str(tmp_path/f) for f in ('ca.pem', 'us.pem', 'us.key'))
    db = Redis(
        tmp_path,
        '--tls-cert-file',
        'redis.pem',
        '--tls-key-file',
        'redis.key',
        '--tls-ca-cert-file',
        'ca.pem',
        tls=True,
    )
    clients = dict(ssl=True, ssl_ca_certs=ca, ssl_certfile=cert, ssl_keyfile=key)
    try:
        with serving(decoder, db, clients, tls=True, tls_ca=ca, tls_cert=cert, tls_key=key) as r:
            same(OfficialClient(r).trial(logits_of('i see'))[1], offline(decoder, logits_of('i see')))
        for options in (dict(), dict(tls_ca=cert)):  # Signed neither by an authority that the system trusts nor by ours
            with (
                pytest.raises(PermissionError, match='CERTIFICATE_VERIFY_FAILED.*check user, password, certificates'),
                serving(decoder, db, clients, tls=True, **options),
            ):
                pass
    finally: db.stop()


def test_import_needs_neither_torch_nor_redis_py():
    "The module can be imported without its optional packages, and names the missing one when it is needed."
    code = """import sys; sys.modules.update(dict.fromkeys(["torch", "tensorflow", "transformers", "IPython", "redis"]))
from b2t_kaggle.decoding.server import connect
try: connect()
except RuntimeError as e: print(e)"""
    assert (
        'pip install b2t_kaggle[serve]'
        in subprocess.run([sys.executable, '-c', code], check=True, capture_output=True, text=True).stdout
    )


def test_words_that_the_protocol_cannot_carry(decoder):
    with pytest.raises(ValueError, match="word 'a;b': semicolons separate sentences"):
        OnlineDecoder(LexiconBeamDecoder(LEXICON | {'a;b': [['AA']]}, decoder.lm))
