"""Helpers of the trials with several machines: a small run, the scripts of the guide, and a comparison of weights.

These trials are run by hand, in the environment of `./kit env dev`, and print what happens:

    python tests/machines/two_agents.py
    python tests/machines/slurm.py            (as root, with Debian's slurm-wlm and munge)
    python tests/machines/ray_nodes.py        (with the extra `ray`)
"""
import json
import os
import re
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GUIDE = ROOT/'nbs'/'guides'/'more_than_one_machine.ipynb'
# 24 batches of 16 trials from two simulated sessions
SMALL = ['--preset', 'quick'] + [word for value in (
    'simulate.n_sessions=2', 'simulate.train=24', 'simulate.val=6', 'simulate.test=6', 'days_per_batch=2',
    'batch_size=16', 'train.processes=1', 'num_training_batches=24', 'batches_per_val_step=12', 'batches_per_save=3',
    'lr_warmup_steps=5', 'lr_warmup_steps_day=5', 'model.n_units=64') for word in ('--set', value)]


def scripts() -> dict[str, str]:
    "Scripts of the guide by file name, which the line after the shebang gives."
    texts = [''.join(cell['source']) for cell in json.loads(GUIDE.read_text(encoding='utf-8'))['cells']]
    blocks = re.findall(r'^```(?:sh|python)\n(.*?)^```', '\n'.join(texts), re.S | re.M)
    named = ((re.search(r'^# (\S+\.(?:sh|py))', block, re.M), block) for block in blocks)
    return {name[1]: block for name, block in named if name}


def folder() -> Path:
    "Change to a new folder; processes started there find `b2t` and this checkout."
    path = Path(tempfile.mkdtemp(prefix='b2t-machines-'))
    os.chdir(path)
    (path/'bin').mkdir()
    b2t = path/'bin'/'b2t'
    b2t.write_text(f'#!/bin/sh\nexec {sys.executable} -m b2t_kaggle.cli "$@"\n')
    b2t.chmod(0o755)
    os.environ.update(PATH=f'{path/"bin"}:{Path(sys.executable).parent}:{os.environ["PATH"]}', PYTHONPATH=str(ROOT),
                      OMP_NUM_THREADS='1')
    print(f'everything is in {path}', flush=True)
    return path


def wait_for(is_true, what: str, seconds: float = 600) -> None:
    "Wait until a condition holds."
    end = time.monotonic() + seconds
    while not is_true():
        if time.monotonic() > end: raise SystemExit(f'no {what} after {seconds:.0f} s')
        time.sleep(.2)


def batches(name: str) -> int:
    "Number of a run's batches that are saved."
    history = Path(f'submissions/{name}/train/history.csv')
    lines = history.read_text().splitlines() if history.exists() else []
    return int(lines[-1].partition(',')[0]) if len(lines) > 1 else 0


def compare(name: str, other: str) -> None:
    "Print whether two runs have bitwise equal weights."
    import torch
    for file in ('best.pt', 'last.pt'):
        states = [torch.load(f'submissions/{n}/train/{file}', weights_only=False)['model_state_dict']
                  for n in (name, other)]
        same = sum(torch.equal(states[0][k], states[1][k]) for k in states[0])
        print(f'{file} of {name} and {other}: {same} of {len(states[0])} tensors are equal to the last bit', flush=True)
        if same < len(states[0]) or states[0].keys() != states[1].keys(): raise SystemExit(1)


def show(text: str, among: str = '') -> None:
    "Print a command's output without progress bars, or only its lines with a word."
    for line in text.splitlines():
        if line.strip() and among in line and '%|' not in line: print('  |', line, flush=True)
