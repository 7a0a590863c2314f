"""Every stage that is killed at or between its writes and executed again gives the same result and leaves no other
files. A few kills of each stage are drawn; `pytest tests/faults/test_kills.py --faults 1000 -o faulthandler_timeout=0`
tries all, which takes longer than the usual limit of ten minutes per test."""
import hashlib
import shutil
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
from copies import TRAINER, start, status_of  # noqa: E402
from stage_kills import OWN, STAGES, do, restore, run_of  # noqa: E402
from tiny_models import tiny_audio_llm, tiny_lm  # noqa: E402

from b2t_kaggle.logits import LogitStore  # noqa: E402
from b2t_kaggle.pytorch.checkpoint import load_file  # noqa: E402
from b2t_kaggle.rescoring.hypotheses import Entry, Hypotheses, read_hypotheses, write_hypotheses  # noqa: E402
from b2t_kaggle.training.history import read_history  # noqa: E402

NEVER = 10**9


def write_inputs(root: Path) -> None:
    "Write the external inputs of stages: another system, a language model, and the log-probabilities of two models."
    run = run_of(root)
    given = root.parent/'given'
    given.mkdir(exist_ok=True)
    for split in ('val', 'test') if run.hypotheses('test').exists() else ():
        h = read_hypotheses(run.hypotheses(split))
        entries = {t: [Entry(t, trial.reference or f'the sentence {t}', 'theirs')] for t, trial in h.trials.items()}
        write_hypotheses(given/f'theirs_{split}.jsonl', Hypotheses(h.trials, entries))
        for i in range(2): shutil.copyfile(run.logits(split), given/f'{i}_{split}.arrow')
    if (given/'lm').exists(): return
    tiny_lm(given/'lm', 'opt', ['how are you', 'the sentence'])
    tiny_audio_llm(given/'audio_llm', ['how are you', 'the sentence'])


@pytest.fixture(scope='module')
def stages(tmp_path_factory):
    "The folder of the run, its content before each stage, the number of writes of each stage, and the results."
    tmp = tmp_path_factory.mktemp('kills')
    root = tmp/'room'
    root.mkdir()
    start([*TRAINER, 'stage_kills', 'b2t_kaggle.decoding.decoder', 'b2t_kaggle.lm.ngram', 'b2t_kaggle.lm.automaton',
           'transformers.models.opt.modeling_opt', 'transformers.models.qwen2_audio.modeling_qwen2_audio', 'peft',
           'matplotlib.pyplot'])
    known = {}
    for name in STAGES:
        write_inputs(root)
        for earlier in OWN.get(name, ()): assert status_of(do, root, name, NEVER, False, None, earlier) == 0, earlier
        restore(root, tmp/name)
        assert status_of(do, root, name, NEVER, False, tmp/'counted') == 0, name
        known[name] = int((tmp/'counted').read_text()), made(root)
    return root, known


def _numbers(value) -> list[bytes]:
    "All tensors in a checkpoint, in order, without recorded times."
    if torch.is_tensor(value): return [value.float().numpy().tobytes()]
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [number for v in values for number in _numbers(v)]


def made(root: Path) -> dict[str, str]:
    "A hash of each file that stages made, without recorded times."
    run = run_of(root)
    found = {}
    for path in sorted(p for p in root.rglob('*') if p.is_file()):
        name = str(path.relative_to(root))
        if path.suffix in ('.hdf5', '.csv', '.jsonl', '.arpa', '.txt') or path.parent == run.packed_dir:
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
        if path.name == 'history.csv': found[name] = read_history(path).drop(columns='seconds').to_csv()
        if path.suffix == '.pt': found[name] = hashlib.sha256(b''.join(_numbers(load_file(path)))).hexdigest()
        if path.parent.name == 'logits':
            found[name] = hashlib.sha256(b''.join(x.tobytes() for x in LogitStore.open(path))).hexdigest()
    return found


def draw(name: str, n: int, count: int) -> list[tuple[int, bool]]:
    "A random sample of kills, before and in the middle of each of `count` writes."
    cases = [(at, halfway) for at in range(count) for halfway in (False, True)]
    rng = np.random.default_rng(list(name.encode()))
    return [cases[i] for i in sorted(rng.permutation(len(cases))[:n])]


@pytest.mark.parametrize('name', STAGES)
def test_a_stage_killed_at_a_write_has_the_same_result(stages, name, request):
    root, known = stages
    count, expected = known[name]
    assert count > 3 and expected
    kills = 0
    for at, halfway in draw(name, request.config.getoption('--faults')//4, count):
        when = f'after a kill {"in the middle of" if halfway else "before"} write {at}'
        restore(root.parent/name, root)
        status = status_of(do, root, name, at, halfway)
        # After the last events no file grows, so the process may survive
        assert status in ((-signal.SIGXFSZ, 0) if halfway else (-signal.SIGKILL,)), f'{name} ended with {status} {when}'
        kills += status != 0
        assert status_of(do, root, name, NEVER) == 0, f'{name} does not continue {when}'
        assert made(root) == expected, f'{name} makes other files {when}'
        left = [p for p in root.rglob('.*') if '.tmp' in p.name]
        assert not left, f'{name} leaves something {when}: {left}'
    assert kills > 0
    print(f'{name}: {kills} kills, {count} writes')
