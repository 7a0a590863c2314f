"""The kit without kenlm, which does not compile on Python 3.13.

Each test runs a process in which kenlm cannot be imported. tests/test_imports.py imports every module this way.
"""
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BINARY = b'mmap lm http://kheafield.com/code format version 5\n\0'
HIDE = '''
import sys, warnings

class Refuse:
    "A finder that refuses one package."
    def find_spec(self, name, *args):
        if name.split('.')[0] == 'kenlm': raise ModuleNotFoundError("No module named 'kenlm'", name='kenlm')

sys.meta_path.insert(0, Refuse())
warnings.simplefilter('ignore')
'''
EVERYTHING = '''
import json
import numpy as np
from b2t_kaggle import LexiconBeamDecoder, build_ngram, load_ngram
from b2t_kaggle.lm.interpolate import interpolate_ngrams
from b2t_kaggle.lm.ngram import NGram, perplexity_report
from b2t_kaggle.lm.backoff import prune_ngram
from b2t_kaggle.phonemes import to_class_ids
ours = build_ngram(['a b', 'a b a'], 'ours.arpa', order=2)
other = build_ngram(['b a', 'b b'], 'other.arpa', order=2)
interpolate_ngrams([ours, other], 'mixed.arpa', dev=['a b'])
prune_ngram('mixed.arpa', 'pruned.arpa', 1e-9)
lm = load_ngram('pruned.arpa')
frames = np.full((4, 41), -20.)
frames[np.arange(4), to_class_ids(['AA', 'SIL', 'AE', 'SIL'])] = 0
frames -= np.logaddexp.reduce(frames, axis=1, keepdims=True)
found = LexiconBeamDecoder({'a': [['AA']], 'b': [['AE']]}, lm).decode(frames)[0].text
errors = {}
for load in (load_ngram, NGram.load):
    for path in ('model.bin', 'ours.arpa'):
        try: load(path)
        except ImportError as e: errors[f'{load.__name__} {path}'] = str(e)
report = perplexity_report(lm, {'text': ['a b', 'a c']}).loc['text', ['words', 'oov']].tolist()
print(json.dumps([found, report, errors]))
'''


def process(code, folder, *args):
    env = os.environ | {'PYTHONPATH': str(ROOT)}
    return subprocess.run([sys.executable, '-c', HIDE + code, *args], capture_output=True, text=True, timeout=600,
                          env=env, cwd=folder)


def test_everything_but_binaries(tmp_path):
    (tmp_path/'model.bin').write_bytes(BINARY)
    r = process(EVERYTHING, tmp_path)
    assert r.returncode == 0, r.stderr
    found, report, errors = json.loads(r.stdout.splitlines()[-1])
    assert found == 'a b' and report == [4, 1]
    needs = 'the package kenlm, which reads KenLM binaries, is not installed; pip install b2t_kaggle[kenlm]'
    assert errors.keys() == {'load_ngram model.bin', 'load model.bin', 'load ours.arpa'}
    for call, error in errors.items():
        assert error.startswith(f'{call.split()[1]}: {needs}') and '\n' not in error
        assert ('give the ARPA file' in error) == call.endswith('.bin')
        assert ('load_ngram' in error) == call.endswith('.arpa')


@pytest.mark.parametrize('args', [
    ['run', '--work', 'work', '--out', 'out', '--set', 'lm.path=model.bin'],
    ['lm', 'report', 'model.bin', '--text', 'text.txt'],
], ids=['run', 'report'])
def test_a_command_says_in_one_line_what_to_install(args, tmp_path):
    "A run also prints it, before it starts."
    (tmp_path/'model.bin').write_bytes(BINARY)
    (tmp_path/'text.txt').write_text('a b\n')
    r = process('from b2t_kaggle.cli.command import main\nmain(sys.argv[1:])', tmp_path, *args)
    banner = 'Simulated participant, ' if args[0] == 'run' else 'Error: '
    *before, error = r.stderr.splitlines()
    assert r.returncode == 1 and len(before) == (args[0] == 'run') and r.stderr.startswith(banner), r.stderr
    assert error.startswith('Error: ') and 'model.bin: the package kenlm, which' in error
    assert './kit env kenlm' in r.stderr and 'give the ARPA file' in r.stderr
    assert not list((tmp_path/'out').rglob('*.csv')) and not list((tmp_path/'work').rglob('*.hdf5'))
