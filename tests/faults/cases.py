"""Undamaged, damaged and hostile files of every kind that the kit reads, for the campaign in `test_faults.py`. A kind
has a small real file and a reader. Damage is drawn from a seed, so a case is identified by its kind and number."""
import base64
import gzip
import io
import json
import math
import os
import pickle
import random
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import h5py
import numpy as np
import pyarrow as pa
import torch
import yaml

from b2t_kaggle.config import load_config, preset, save_config, with_overrides
from b2t_kaggle.data.sessions import Trial, validate, write_session
from b2t_kaggle.data.store import TrialStore
from b2t_kaggle.decoding.nbest import Hypothesis, read_nbest, write_nbest
from b2t_kaggle.decoding.phoneme_lists.confusions import N_WEIGHTS
from b2t_kaggle.decoding.phoneme_lists.decoder import ConfusionModel, load_confusions, save_confusions
from b2t_kaggle.decoding.scorers import KenLMScorer
from b2t_kaggle.devices.torch import pick_torch
from b2t_kaggle.lm.arpa import read_arpa
from b2t_kaggle.lm.automaton import load_ngram
from b2t_kaggle.logits import LogitStore
from b2t_kaggle.pipeline.run import Run
from b2t_kaggle.pipeline.stamps import StageRun
from b2t_kaggle.pipeline.submission import validate_submission
from b2t_kaggle.pytorch.audio.targets import TargetStore, build_targets
from b2t_kaggle.pytorch.checkpoint import load_model, save_atomic, save_official
from b2t_kaggle.pytorch.models import build_model
from b2t_kaggle.pytorch.parallel import start
from b2t_kaggle.pytorch.trainer import Trainer
from b2t_kaggle.rescoring.hypotheses import read_hypotheses, write_hypotheses
from b2t_kaggle.rescoring.mixture import read_weights

SECRET = 'what-no-message-may-hold'
DAY = 't15.2023.08.13'


@dataclass(frozen=True)
class Kind:
    "Files of one format."
    path: Path                      # Undamaged file, in a separate folder
    read: Callable[[Path], object]  # Returns the content, to compare as text
    has_checksum: bool = False      # Whether every change is detected; otherwise the content may differ
    n_lines: int = 1                # Lines that an error may have


def digest(*arrays: np.ndarray) -> str:
    "A text that differs if an array differs."
    return ' '.join(f'{a.dtype} {a.shape} {zlib.crc32(np.ascontiguousarray(a).tobytes())}' for a in arrays)


def as_text(trials) -> str:
    return '\n'.join(f'{t.key} {t.sentence!r} {digest(t.features, t.class_ids)}' for t in trials)


def read_store(path):
    store = TrialStore.open(path)
    return as_text(store[i] for i in range(len(store))) + store.index.to_csv()


def read_logits(path):
    store = LogitStore.open(path)
    return digest(*store) + store.index.to_csv()


def read_checkpoint(path):
    model, cfg = load_model(path)
    return digest(*(v.numpy() for v in model.state_dict().values())) + str(cfg.dump())


def read_official(path):
    "Read the official checkpoint, whichever of its two files was changed."
    return read_checkpoint(path.parent)


def read_model(path):
    model = load_ngram(path)
    return f'{model.score("how are you"):.4f} {len(read_arpa(path).words)}'


def read_sessions(path):
    "Results of `check` and `pack` for a session's file, which must agree."
    data = path.parents[1]
    problems = validate(data)
    text = problems.to_string()
    assert SECRET not in text, 'check shows another file'
    is_good = not (problems.severity == 'error').any()
    try: packed = TrialStore.build(data, 'train', data/'packed.arrow', progress=False)
    except ValueError as e:
        assert not is_good, f'check finds nothing, pack says: {e}'
        raise
    assert is_good, f'pack finds nothing, check says: {text}'
    return read_store(packed.path)


def sentences():
    "Three trials of a session."
    ids = np.array([17, 38, 40])
    for i in range(3):
        features = np.random.default_rng(i).standard_normal((20, 512)).astype('float32')
        yield Trial(DAY, 'train', f'trial_{i:04d}', 1, i, features, ids, 'Is.')


ARPA = '''\\data\\
ngram 1=6
ngram 2=3

\\1-grams:
-1.1\t<unk>
0\t<s>\t-0.3
-0.9\t</s>
-0.8\thow\t-0.2
-0.7\tare\t-0.1
-0.6\tyou\t-0.1

\\2-grams:
-0.2\t<s> how
-0.3\thow are
-0.1\tyou </s>

\\end\\
'''


# Output of KenLM's build_binary (0.3.0), packed: not every machine has the program
BINARIES = {
    'trie': (
        'eNrLzU0sUMjJVcgoKSmw0tfPzkhNTMtMzUnRS87P1U/OT0lVSMsvyk0sUShLLSrOzM9TMOViQIAGeyCxnxFI/AcCkAgjVIYJTB6w'
        'Z4KKgTAbVI4ZyQRWKF1Qp7jXsq2U4dXqXRPO1J4QMX1weh17Hm9ga/XPeQ8CLdO4cr5/rC1+kA3Td/ZMz36QA5CMYpg1c+Y+GNvY'
        '2Hj/2TNn9iLU+wD5PvsY4WolwfJMUH5aWhrYPCYGVMDMgB1cPnPmy9KZM08eT0t7JocsYVOal23HYFNsx5BYlMqQkV/OUJlfymCj'
        'DxQAAE04VLI='),
    'probing': (
        'eNrLzU0sUMjJVcgoKSmw0tfPzkhNTMtMzUnRS87P1U/OT0lVSMsvyk0sUShLLSrOzM9TMOViQIAGeyCxnxFI/AcCkAgjVIYJTB6w'
        'RxZjg9LMDKgAJN5a/XPeg0DLNFYG4gBXzvePtcUPspnQxAvqFPdatpWC7TR9cHodex5vIMi+V6t3TThTe0KEBcg+e6ZnP8jxIPWz'
        'Zs7cl5aWBnJnw9kzPvZAvM/Y2BhIn9k7a6bkfhANM5vjE1NGy0ZjYZCexqK3H2qra1pB6hVip+zrmmCjjawWBGxK87LtGGyKgVgf'
        'SGTklzMkFqUyVOaXMgAALANd6A=='),
}


def read_binary(path):
    "A sentence's score, and the queries of a search: words without context, and words after states."
    lm = load_ngram(path)
    search = KenLMScorer(lm, ['how', 'are', 'you'])
    search.resolve(np.arange(5))
    return f'{lm.score("how are you"):.4f} {search.unigrams().round(4)} {search.arcs["log_prob"].round(4).sum()}'


def read_last(path):
    "The state from which a training continues."
    store = TrialStore.open(path.parents[1]/'train.arrow')
    trainer = Trainer(store, None, last_config(store), start(pick_torch('cpu', 'float32')), path)
    return digest(*(v.numpy() for v in trainer.model.state_dict().values())) + f' {trainer.step} {trainer.best.metrics}'


def read_weights_h5(path):
    "Weights and configuration, which have checksums; everything else is only read."
    from b2t_kaggle.tensorflow.checkpoint import load_last, load_weights
    load_last(path)
    weights, cfg = load_weights(path)
    return digest(*weights.values()) + str(cfg.dump())


def read_targets(path):
    store = TargetStore(path)
    text = '\n'.join(f'{s!r} {digest(store[s])} {seconds}' for s, seconds in zip(store.sentences, store.seconds))
    return text + f'{store.dimension} {store.frame_seconds} {store.ragged.metadata}'


def read_stamp(path):
    root = path.parents[1]
    return StageRun(Run(root, root/'work', cfg=preset('demo')), 'train').status()


def small_config(**overrides):
    "Configuration of a model with a few hundred weights."
    return with_overrides(preset('official'), {'neural_dim': 4, 'n_units': 3, 'n_layers': 1, 'patch_size': 2,
                                               'patch_stride': 1, 'data.sessions': [DAY], **overrides})


def last_config(store):
    "Configuration of a training of a few steps."
    return small_config(**{'num_training_batches': 3, 'lr_warmup_steps': 1, 'lr_warmup_steps_day': 1, 'random_cut': 0,
                           'feature_subset': [0, 1, 2, 3], 'data.batch_size': 2, 'days_per_batch': 1})


SPELLING = SimpleNamespace(speak=lambda text: SimpleNamespace(text=text, seconds=1.), provenance=lambda: dict(name='a'))
NUMBERS = SimpleNamespace(frame_seconds=0.02, dimension=2, provenance=lambda: dict(name='b'), encode=lambda speeches: [
    np.array([[ord(c), 1] for c in s.text], 'float32') for s in speeches])


# Name: file in a separate folder, reader, and whether every change is detected
KINDS = {
    'session': (f'{DAY}/data_train.hdf5', read_sessions, False),
    'trials': ('train.arrow', read_store, True),
    'logits': ('val.arrow', read_logits, True),
    'best.pt': ('best.pt', read_checkpoint, True),
    'last.pt': ('run/last.pt', read_last, True),
    'official weights': ('checkpoint/best_checkpoint', read_official, True),
    'args.yaml': ('checkpoint/args.yaml', read_official, False),
    'config': ('config.yaml', lambda p: load_config(p).dump(), False),
    'nbest': ('nbest_val.jsonl', read_nbest, True),
    'hypotheses': ('a.jsonl', read_hypotheses, False),
    'submission': ('a.csv', read_hypotheses, False),
    'arpa': ('lm.arpa', read_model, False),
    'arpa.gz': ('lm.arpa.gz', read_model, False),
    **({f'KenLM {k}': ('lm.binary', read_binary, False) for k in BINARIES} if find_spec('kenlm') else {}),
    'weights': ('rescore_weights.json', read_weights, False),
    'confusions': ('confusions.json', load_confusions, False),
    'stamp': ('run/stages/train.json', read_stamp, False),
    'targets': ('targets.arrow', read_targets, True),
    'submission to check': ('submission.csv', lambda p: validate_submission(p, 2), False, 12),
}
TF_KINDS = {'weights.h5': ('last.weights.h5', read_weights_h5, True)}  # In processes with TensorFlow


def kinds_in(folder: Path) -> dict[str, Kind]:
    "The kinds whose files were written by `make_kinds` and `make_tf_kinds`."
    return {name: Kind(folder/name/file, *rest) for name, (file, *rest) in (KINDS | TF_KINDS).items()}


def make_kinds(folder: Path) -> None:
    "Write a file of each kind."
    path = {name: kind.path for name, kind in kinds_in(folder).items() if name in KINDS}
    for p in path.values(): p.parent.mkdir(parents=True)
    write_session(path['session'], sentences())
    trials = TrialStore.build(path['session'].parents[1], 'train', path['trials'], progress=False)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, 12, 41)).astype('float32')
    x -= np.log(np.exp(x).sum(-1, keepdims=True))
    LogitStore.write(path['logits'], x, trials.index, dict(model='m', split='val'))
    cfg = small_config()
    torch.manual_seed(0)
    model = build_model(cfg.model, 1)
    save_atomic(dict(model_state_dict=model.state_dict(), config=cfg.dump(), val_per=0.1), path['best.pt'])
    for name in ('official weights', 'args.yaml'): save_official(model, cfg, folder/name, 0.1)
    save_config(cfg, path['config'])
    hyps = [[Hypothesis('how are you', -2.5, -4., 3, -6.5), Hypothesis('how', -3.5, -5., 1, -8.5)]]*3
    write_nbest(path['nbest'], hyps)
    write_hypotheses(path['hypotheses'], read_hypotheses(path['nbest']))
    path['submission'].write_text('id,text\n0,how are you\n1,how\n')
    path['arpa'].write_text(ARPA)
    for kind, packed in BINARIES.items():
        if f'KenLM {kind}' in path: path[f'KenLM {kind}'].write_bytes(zlib.decompress(base64.b64decode(packed)))
    path['arpa.gz'].write_bytes(gzip.compress(ARPA.encode(), mtime=0))
    weights = dict(acoustic_scale=.3, alpha=.5, word_score=0., length_penalty=0., gate=None)
    path['weights'].write_text(json.dumps(weights))
    save_confusions(path['confusions'], ConfusionModel(np.zeros(N_WEIGHTS), np.zeros(N_WEIGHTS)))
    run = Run(path['stamp'].parents[1], path['stamp'].parents[2]/'work', cfg=preset('demo'))
    stamp = dict(key=run.key('train'), fingerprint='f', finished=True, outputs={'train/best.pt': [1, 'h']},
                 needs={n.name: n.id for n in StageRun(run, 'train').needs},
                 metrics={}, seconds=1., made=1.)
    path['stamp'].write_text(json.dumps(stamp))
    build_targets(['how are you', 'fine'], SPELLING, NUMBERS, path['targets'], progress=False)
    path['submission to check'].write_text('id,text\n0,how are you\n1,how\n')
    make_last(path['last.pt'], path['session'].parents[1])


def make_last(path: Path, sessions: Path) -> None:
    "Write a training's checkpoint before the first step, and its trials."
    store = TrialStore.build(sessions, 'train', path.parents[1]/'train.arrow', feature_subset=range(4), progress=False)
    Trainer(store, None, last_config(store), start(pick_torch('cpu', 'float32'))).save_last(path)


def make_tf_kinds(folder: Path) -> None:
    "Write the files of TensorFlow."
    from b2t_kaggle.tensorflow.checkpoint import save_last
    from b2t_kaggle.tensorflow.models import build_model
    path = kinds_in(folder)['weights.h5'].path
    path.parent.mkdir(parents=True)
    cfg = small_config(**{'train.framework': 'tensorflow'})
    moments = dict(h0=dict(m=np.zeros(3, 'float32'), v=np.ones(3, 'float32')))
    save_last(path, build_model(cfg.model, 1), cfg, dict(val_per=0.1), moments, dict(step=3))


# Damage

def flip(data: bytearray, r: random.Random):
    for _ in range(r.choice((1, 1, 3, 20))): data[r.randrange(len(data))] ^= 1 << r.randrange(8)


def truncate(data: bytearray, r: random.Random): del data[r.randrange(len(data)):]


def zeros(data: bytearray, r: random.Random):
    begin = r.randrange(len(data))
    n = min(r.choice((16, 512)), len(data) - begin)
    data[begin:begin + n] = bytes(n)


def insert(data: bytearray, r: random.Random):
    at = r.randrange(len(data))
    data[at:at] = r.randbytes(r.choice((1, 7, 64)))


def leave_out(data: bytearray, r: random.Random):
    at = r.randrange(len(data))
    del data[at:at + r.choice((1, 7, 64))]


def exchange(data: bytearray, r: random.Random):
    "Exchange two blocks."
    n = min(64, len(data)//3)
    a = r.randrange(len(data) - 2*n)
    b = r.randrange(a + n, len(data) - n)
    b += (b - a) % 8 == 0 # Words exchanged within a page are not detected (`ragged`)
    data[a:a + n], data[b:b + n] = data[b:b + n], data[a:a + n]


def long_digits(data: bytearray, r: random.Random):
    "Replace digits by longer numbers."
    places = [i for i, c in enumerate(data) if chr(c).isdigit()] or [0]
    at = r.choice(places)
    data[at:at + 1] = r.choice((b'-1e999', b'9'*30, b'nan', b'-', b'0x7f', b'9'*5000))


DAMAGE = (flip, flip, flip, truncate, zeros, insert, leave_out, exchange, long_digits)


def damaged(kind: Kind, name: str, number: int) -> bytes:
    "The contents of case `number` of a kind."
    r = random.Random(f'{name} {number}')
    data = bytearray(kind.path.read_bytes())
    r.choice(DAMAGE)(data, r)
    return bytes(data)


# Hostile files, by kind

def hdf5(change):
    "A session's file with a change in its second trial."
    def make(path, secret):
        with h5py.File(path, 'a') as f: change(f['trial_0001'], secret)
    return make


def replace_with(name, **options):
    "Replace a dataset."
    def change(group, secret):
        del group[name]
        group.create_dataset(name, **options)
    return hdf5(change)


def link(name, target):
    def change(group, secret):
        del group[name]
        group[name] = target(secret)
    return hdf5(change)


def virtual(group, secret):
    layout = h5py.VirtualLayout((500,), 'i4')
    layout[:] = h5py.VirtualSource(secret.with_suffix('.h5'), 'codes', (500,))
    del group['transcription']
    group.create_virtual_dataset('transcription', layout)


def external_storage(group, secret):
    del group['transcription']
    group.create_dataset('transcription', (6,), 'i4', external=[(str(secret), 0, 24)])


def attribute(name, value): return hdf5(lambda group, secret: group.attrs.__setitem__(name, value))


def trial_elsewhere(path, secret):
    with h5py.File(path, 'a') as f:
        del f['trial_0002']
        f['trial_0002'] = h5py.ExternalLink(str(secret.with_suffix('.h5')), '/')


def through_a_link(path, secret):
    with h5py.File(path, 'a') as f:
        f['elsewhere'] = h5py.ExternalLink(str(secret.with_suffix('.h5')), '/')
        del f['trial_0001/transcription']
        f['trial_0001/transcription'] = h5py.SoftLink('/elsewhere/codes')


def content(value): return lambda path, secret: path.write_bytes(value if isinstance(value, bytes) else value.encode())
def saved(value): return lambda path, secret: torch.save(value(torch.load(path, weights_only=True)), path)


def weights(change):
    "A checkpoint with each weight changed."
    return saved(lambda c: c | dict(model_state_dict={k: change(v) for k, v in c['model_state_dict'].items()}))


def model_fields(**fields):
    return saved(lambda c: c | dict(config=c['config'] | dict(model=c['config']['model'] | fields)))


def compressed(path, secret):
    "The file as an archive that expands two hundred times."
    out = io.BytesIO()
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(out, 'w', zipfile.ZIP_DEFLATED) as new:
        for r in old.infolist(): new.writestr(r.filename, old.read(r))
        new.writestr('best/data/99', bytes(10**8))
    path.write_bytes(out.getvalue())


def h5(change):
    "A TensorFlow weights file with a change."
    def make(path, secret):
        with h5py.File(path, 'a') as f: change(f, secret)
    return make


def h5_texts(change):
    "Texts next to the weights, as another program may write them, with the correct checksum."
    def make(f, secret):
        texts = {k: json.loads(v) for k, v in f.attrs.items() if isinstance(v, str)}
        change(texts)
        texts = {k: json.dumps(v) for k, v in texts.items()}
        f.attrs.update(texts | dict(crc32=zlib.crc32(''.join(texts[k] for k in sorted(texts)).encode())))
    return h5(make)


def h5_config(**fields): return h5_texts(lambda t: t['config']['model'].update(fields))


def some_weight(f):
    "Group and name of a dataset of Keras."
    found = []
    f.visititems(lambda name, item: found.append(name) if isinstance(item, h5py.Dataset) and '/vars/' in name else None)
    group, _, name = found[0].rpartition('/')
    return f[group], name


def vast_weight(f, secret):
    group, name = some_weight(f)
    del group[name]
    group.create_dataset(name, (10**9, 512), 'f4', chunks=(64, 512))


def virtual_weight(f, secret):
    group, name = some_weight(f)
    shape = group[name].shape
    layout = h5py.VirtualLayout(shape, 'f4')
    layout[:] = h5py.VirtualSource(secret.with_suffix('.h5'), 'codes', shape)
    del group[name]
    group.create_virtual_dataset(name, layout)


class Program:
    def __reduce__(self): return os.system, ('true',)


def bomb():
    lines = ['a0: &a0 [x, x, x, x, x, x, x, x, x, x]']
    lines += [f'a{i + 1}: &a{i + 1} [{", ".join([f"*a{i}"]*10)}]' for i in range(9)]
    return '\n'.join(lines)


def fifo(path, secret):
    path.unlink()
    os.mkfifo(path)


def device(path, secret):
    path.unlink()
    path.symlink_to('/dev/zero')


def edit_yaml(change):
    def make(path, secret):
        values = yaml.safe_load(path.read_text())
        change(values)
        path.write_text(yaml.safe_dump(values))
    return make


def arrow(compression=None, shape=(10,), kind='log_probs', columns=()):
    "An Arrow file as another program may write it."
    def make(path, secret):
        header = json.dumps(dict(version=1, kind=kind, metadata=dict(sessions=[DAY], split='train')))
        item = pa.float32()
        for n in reversed(shape): item = pa.list_(item, n)
        fields = [pa.field(n, pa.int64()) for n in columns] + [pa.field('values', pa.large_list(item))]
        schema = pa.schema(fields, metadata={'b2t_kaggle': header})
        n = 10**6 if compression else 100 # Arrays of 40 numbers if compressed
        values = pa.array(np.zeros(n*math.prod(shape), 'float32'))
        for m in reversed(shape): values = pa.FixedSizeListArray.from_arrays(values, m)
        values = pa.LargeListArray.from_arrays(pa.array([0, n], pa.int64()), values)
        with pa.ipc.new_file(str(path), schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as f:
            f.write_batch(pa.record_batch([*(pa.array([0]) for _ in columns), values], schema=schema))
    return make


def long_lines():
    "300 MB of n-grams in a few kilobytes."
    head = ARPA.partition('-0.9')[0].replace('1=6', '1=100000')
    return gzip.compress(head.encode()) + gzip.compress((b'-1\tw' + b'a'*50_000 + b'\n')*20)*300


JSON_TEXTS = {'empty': '', 'null': 'null', 'list': '[1]', 'deep': '['*10**5, 'not UTF-8': b'"\xff\xfe"',
              'digits': '1'*10**4}
YAML_TEXTS = {
    'empty': '', 'list': '- 1', 'deep': '['*10**4, 'deep mapping': '{a: '*3000, 'bomb': bomb(), 'not UTF-8': b'a: \xff',
    'python': 'a: !!python/object/apply:os.system [ls]', 'no date': 'a: 2020-99-99', 'control': 'a: "\x07"\x00',
    'numbers as keys': '1: {2: 3}', 'alias of itself': 'a: &a [*a]', 'many digits': 'train: {seed: ' + '9'*6000 + '}',
}

HOSTILE = {
    'session': {
        'vast features': replace_with('input_features', shape=(10**9, 512), dtype='f4', chunks=(64, 512)),
        'half a million rows': replace_with('input_features', shape=(5*10**5, 512), dtype='f4', chunks=(64, 512)),
        'absent features': replace_with('input_features', shape=(89_000, 512), dtype='f4', chunks=(64, 512)),
        'vast transcription': replace_with('transcription', shape=(10**9,), dtype='i4', chunks=(10**4,)),
        'vast labels': replace_with('seq_class_ids', shape=(10**9,), dtype='i8', chunks=(10**4,), compression='gzip'),
        'texts as features': replace_with('input_features', data=['a']*10, dtype=h5py.string_dtype()),
        'external link': link('transcription', lambda s: h5py.ExternalLink(str(s.with_suffix('.h5')), '/codes')),
        'link to itself': link('transcription', lambda s: h5py.SoftLink('/trial_0001/transcription')),
        'link to nowhere': link('transcription', lambda s: h5py.SoftLink('/etc/passwd')),
        'link through an external one': through_a_link,
        'trial in another file': trial_elsewhere,
        'virtual': hdf5(virtual),
        'external storage': hdf5(external_storage),
        'block beyond 64 bits': attribute('block_num', np.uint64(2**64 - 1)),
        'label that is not UTF-8': attribute('sentence_label', np.bytes_(b'na\xefve')),
        'session that is not UTF-8': attribute('session', np.bytes_(b't15\xff')),
        'label of pages': attribute('sentence_label', 'word '*12_000),
        'numbers as label': attribute('sentence_label', np.arange(5)),
        'beyond float16': hdf5(lambda g, s: g['input_features'].__setitem__((3, 4), 1e30)),
    },
    'trials': {
        'another kind': arrow(), 'no columns': arrow(kind='trials'),
        'wrong columns': arrow(kind='trials', columns=('day', 'n_bins')),
        'zstd': arrow('zstd', (40,), kind='trials'), 'JSON': content('{}'),
    },
    'logits': {
        'no columns': arrow(), 'texts as trials': arrow(columns=('session', 'key')), 'no classes': arrow(shape=()),
        'zstd': arrow('zstd', (40,), columns=('session', 'key')),
        'three axes': arrow(shape=(2, 3), columns=('session', 'key')),
    },
    'best.pt': {
        'text': content('epoch: 3'), 'empty': content(''), 'null': saved(lambda c: None), 'list': saved(lambda c: [c]),
        'tensor': saved(lambda c: torch.ones(3)), 'lists as weights': weights(lambda w: w.tolist()),
        'sparse': weights(lambda w: w.to_sparse()), 'complex': weights(lambda w: w.to(torch.complex64)),
        'meta': weights(lambda w: w.to('meta')), 'stride 0': weights(lambda w: w.reshape(-1)[:1].expand(10**5, 10**5)),
        'numbers as names': saved(lambda c: c | dict(model_state_dict={1: torch.ones(1)})),
        'weights alone': saved(lambda c: c['model_state_dict']),
        'no mapping': saved(lambda c: c | dict(model_state_dict=3)),
        'config is text': saved(lambda c: c | dict(config='gru')),
        'a million layers': model_fields(n_layers=10**6), 'a thousand layers': model_fields(n_layers=1000),
        'wide': model_fields(n_units=10**5), 'many features': model_fields(neural_dim=8192),
        'another encoder': model_fields(name='zipformer'), 'no encoder': model_fields(name='../gru'),
        'not a number': model_fields(input_dropout=float('nan')),
        'a program': saved(lambda c: c | dict(extra=Program())),
        'a pickle': content(pickle.dumps(dict(a=1))), 'a pickled program': content(pickle.dumps(Program())),
        'compressed': compressed,
    },
    'last.pt': {
        'text': content('epoch: 3'), 'null': saved(lambda c: None), 'lists as weights': weights(lambda w: w.tolist()),
        'stride 0': weights(lambda w: w.reshape(-1)[:1].expand(10**5, 10**5)),
        'no optimizer': saved(lambda c: c | dict(optimizer_state_dict=None)),
        'numbers as optimizer': saved(lambda c: c | dict(optimizer_state_dict={1: 2})),
        'state of the optimizer': saved(lambda c: c | dict(optimizer_state_dict=dict(state={0: 'a'}, param_groups=3))),
        'step is text': saved(lambda c: c | dict(step='three')), 'huge step': saved(lambda c: c | dict(step=10**30)),
        'negative step': saved(lambda c: c | dict(step=-1)), 'step is nan': saved(lambda c: c | dict(step=math.nan)),
        'best is a list': saved(lambda c: c | dict(best=[1])),
        'no fingerprint': saved(lambda c: c | dict(fingerprint=1)),
        'training state': saved(lambda c: c | dict(training_state=[1])), 'a program': saved(
            lambda c: c | dict(extra=Program())), 'weights alone': saved(lambda c: c['model_state_dict'])},
    'official weights': {'null': saved(lambda c: None), 'lists': weights(lambda w: w.tolist()),
                         'stride 0': weights(lambda w: w.reshape(-1)[:1].expand(10**5, 10**5))},
    'args.yaml': {k: content(v) for k, v in YAML_TEXTS.items()} | {
        'a million layers': edit_yaml(lambda a: a['model'].__setitem__('n_layers', 10**6)),
        'a thousand layers': edit_yaml(lambda a: a['model'].__setitem__('n_layers', 1000)),
        'section is a number': edit_yaml(lambda a: a.__setitem__('dataset', 1)),
        'ten million sessions': edit_yaml(lambda a: a['dataset'].__setitem__('sessions', 10**7)),
    },
    'config': {k: content(v) for k, v in YAML_TEXTS.items() if k != 'empty'} | {
        k: content(v) for k, v in {
            'nan': 'train: {lr_max: .nan}', 'inf': 'decode: {threshold: .inf}', 'negative seed': 'simulate: {seed: -3}',
            'group is a list': 'train: [1]', 'group is null': 'train:',
            'home of nobody': 'data: {dataset_dir: ~nobody-here/x}',
            'null character': 'rescore: {model: "a\\0b"}', 'name is a list': 'model: {name: [gru]}',
            'schema is a list': 'schema: [2]'}.items()},
    'nbest': {k: content(v) for k, v in (JSON_TEXTS | {
        'numbers': '[1, 2]', 'no score': '[{"text": "a"}]', 'not finite': '[{"text": "a", "acoustic": NaN}]',
        'text is a list': '[{"text": [], "acoustic": 0, "ngram": 0, "n_words": 1, "total": 0}]'}).items()
        if k not in ('empty',)},
    'hypotheses': {k: content(v) for k, v in (JSON_TEXTS | {
        'huge rank': '{"trial": "a", "text": "b", "rank": ' + '9'*400 + '}',
        'huge score': '{"trial": 1, "text": "b", "total": 1e999}',
        'huge whole score': '{"trial": 1, "text": "b", "total": ' + '9'*400 + '}',
        'text is a mapping': '{"trial": "a", "text": {}}'}).items() if k != 'empty'},
    'submission': {'not UTF-8': content(b'id,text\n0,\xff\n'), 'a long field': content('id,text\n0,' + 'a'*200_000),
                   'three fields': content('id,text\n0,a,b'), 'null characters': content('id,text\n\0,\0')},
    'arpa': {
        '-1e999': content(ARPA.replace('-0.8', '-1e999')), '-1e39': content(ARPA.replace('-0.2\t<s>', '-1e39\t<s>')),
        '-inf': content(ARPA.replace('-0.8', '-inf')), 'backoff': content(ARPA.replace('-0.3\n', '1e39\n')),
        'vast': content(ARPA.replace('1=6', f'1={10**12}')), 'digits': content(ARPA.replace('1=6', '1=' + '9'*5000)),
        'superscript': content(ARPA.replace('1=6', '1=²')), 'orders': content('\\data\\\n' + ''.join(
            f'ngram {n}=1\n' for n in range(1, 3000)))},
    'arpa.gz': {
        'one line': content(gzip.compress(b'a'*10**6)*300), 'long lines': content(long_lines()),
        'no gzip': content(ARPA),
        'vast': content(gzip.compress(ARPA.replace('1=6', f'1={10**12}').encode()))},
    'targets': {
        'no columns': arrow(kind='audio targets'), 'another kind': arrow(), 'JSON': content('{}'),
        'wrong columns': arrow(kind='audio targets', columns=('sentence', 'seconds', 'phonemes', 'starts')),
        'zstd': arrow('zstd', (40,), kind='audio targets', columns=('sentence', 'seconds', 'phonemes', 'starts'))},
    'submission to check': {
        'not UTF-8': content(b'id,text\n0,\xff\n'), 'a long field': content('id,text\n0,' + 'a'*200_000),
        'null characters': content('id,text\n\0,\0'), 'a huge id': content('id,text\n' + '9'*6000 + ',a\n'),
        'an open quote': content('id,text\n0,"' + 'a\n'*1000)},
    'weights.h5': {
        'text': content('epoch: 3'), 'empty': content(''), 'of PyTorch': lambda path, secret: torch.save({}, path),
        'a thousand layers': h5_config(n_layers=1000), 'wide': h5_config(n_units=10**5),
        'many features': h5_config(neural_dim=8192), 'another encoder': h5_config(name='zipformer'),
        'not a number': h5_config(input_dropout=float('nan')),
        'ten thousand days': h5_texts(lambda t: t['config']['data'].update(sessions=['t15.2023.08.13']*10**4)),
        'no list of weights': h5_texts(lambda t: t.update(weights=[1])),
        'no shapes': h5_texts(lambda t: t.update(weights=dict.fromkeys(t['weights'], 3))),
        'vast shapes': h5_texts(lambda t: t['weights']['h0'].update(shape=[10**9, 10**9])),
        'external link': h5(lambda f, s: f.__setitem__('x', h5py.ExternalLink(str(s.with_suffix('.h5')), '/codes'))),
        'vast': h5(lambda f, s: f.create_dataset('x', (10**9, 512), 'f4', chunks=(64, 512))),
        'in place of a weight': h5(vast_weight),
        'virtual': h5(virtual_weight)},
    'weights': {k: content(v) for k, v in (JSON_TEXTS | {'gate is a list': '{"gate": [1]}'}).items()},
    'confusions': {k: content(v) for k, v in JSON_TEXTS.items()},
    'stamp': {k: content(v) for k, v in (JSON_TEXTS | {
        'another type': '{"key": 1, "outputs": 3}', 'outside': '{"key": "a", "outputs": {"../../x": []}}'}).items()},
}
for _name in (name for name in KINDS if name.startswith('KenLM')): HOSTILE[_name] = {
    'empty': content(''), 'text': content(ARPA[::-1]),
    'the beginning': lambda path, secret: path.write_bytes(path.read_bytes()[:60])}
for _name in HOSTILE: HOSTILE[_name] |= {'a pipe': fifo, 'a device without an end': device}
