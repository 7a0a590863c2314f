"""Kill stages at one of their writes, in a separate process. Python raises an audit event before it opens, renames or
removes a file or folder, so a kill can come before each of these operations. To kill it in the middle of the next
write, the system limits the size of files."""
import itertools
import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

from test_pipeline import SMALL, stages_here

from b2t_kaggle.pipeline.execute import run_stages
from b2t_kaggle.pipeline.run import Run

STAGES = ['simulate', 'check', 'pack', 'train', 'infer', 'lm', 'decode', 'rescore', 'combine', 'submit', 'report',
          'ensemble', 'generate']
TINY = SMALL | {'simulate.train': 12, 'simulate.val': 3, 'simulate.test': 3, 'simulate.lm_sentences': 100,
                'decode.beam': 5, 'decode.nbest': 3, 'decode.tune': False, 'data.feature_subset': list(range(12)),
                'model.neural_dim': 12}
# External inputs of stages, in the folder `given`; later stages also use them
GIVEN = {'rescore': {'rescore.llm': 'lm'}, 'combine': {'combine.sources': ['theirs_val.jsonl', 'theirs_test.jsonl']},
         'ensemble': {'infer.logits': [f'{i}_{split}.arrow' for i in range(2) for split in ('val', 'test')]},
         'generate': {'audio.llm': 'audio_llm'}}
# A stage of a separate run, its preceding stages, which are not killed, and its values
OWN = {'generate': ('infer', 'lm')}
VALUES = {'generate': {'audio.lora_rank': 2, 'generate.max_tokens': 6, 'train.num_training_batches': 2}}
PART = 100  # Bytes of a file that are written before the kill
WRITES = {'os.rename', 'os.remove', 'os.mkdir', 'os.rmdir', 'os.link', 'os.truncate'}


def values_of(root: Path, stage: str) -> dict:
    "Configuration values of a stage."
    folder = root.parent/'given'
    values = TINY | VALUES.get(stage, {})
    for name in [stage] if stage in OWN else STAGES[:STAGES.index(stage) + 1]:
        for key, given in GIVEN.get(name, {}).items():
            values[key] = [str(folder/g) for g in given] if isinstance(given, list) else str(folder/given)
    return values


def run_of(root: Path, stage: str = 'simulate') -> Run:
    return Run(root/'runs'/(stage if stage in OWN else 'tiny'), root/'data', values_of(root, stage), save=False)


def _is_write(event: str, args: tuple, root: str) -> bool:
    "Whether an audit event changes a file in a folder."
    if event == 'open': changes = isinstance(args[2], int) and bool(args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
    else: changes = event in WRITES
    name = args[0] if args else ''
    return changes and isinstance(name, str | bytes | os.PathLike) and os.fsdecode(name).startswith(root)


def _kill(halfway: bool) -> None:
    "End this process now, or after it has written a part of a file."
    if not halfway: os.kill(os.getpid(), signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (PART, PART))


def kill_at_write(root: Path, at: int, halfway: bool) -> Callable[[], int]:
    """Kill this process before write number `at` in the folder, counted from 0, or in the middle of that write. Returns
    a function that counts the writes so far."""
    os.environ['TMPDIR'] = str(root/'temporary')
    sys.dont_write_bytecode = True  # Python would leave and use an incomplete .pyc file
    with open(os.devnull, 'w') as null:
        for stream in 1, 2: os.dup2(null.fileno(), stream)  # They may be files, which the limit affects
    n = 0
    def watch(event, args):
        nonlocal n
        if not _is_write(event, args, f'{root}/'): return
        if n == at: _kill(halfway)
        n += 1
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    (root/'temporary').mkdir(exist_ok=True)
    sys.addaudithook(watch)
    return lambda: n


def do(root: Path, stage: str, at: int, halfway: bool = False, counted: Path | None = None,
       until: str = '') -> None:
    """Execute a stage, to be killed at one of its writes; if it survives, write the number of writes into the file
    `counted`. With `until`, execute that stage of its run."""
    n_writes = kill_at_write(root, at, halfway)
    # Stages must not be refused because of the limit
    with stages_here(), patch('resource.getrlimit', lambda which: (resource.RLIM_INFINITY,)*2):
        run_stages(run_of(root, stage), until or stage)
    if counted: counted.write_text(str(n_writes()))


def tune(root: Path, model: Path, sentences: list[str], at: int, halfway: bool = False,
         counted: Path | None = None) -> None:
    "Fine-tune a language model, with its state saved before each step, to be killed at one of the writes."
    from b2t_kaggle.lm.causal import load_lm
    from b2t_kaggle.lm.finetune import finetune
    n_writes = kill_at_write(root, at, halfway)
    lm = load_lm(model, device='cpu', local_files_only=True)
    with patch('b2t_kaggle.lm.finetune.time.monotonic', itertools.count(0, 999).__next__):
        finetune(*lm, sentences, root/'adapter', epochs=1, batch_size=4, progress=False)
    if counted: counted.write_text(str(n_writes()))


def restore(saved: Path, root: Path) -> None:
    "Restore a folder."
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(saved, root)
