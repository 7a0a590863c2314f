"""The pages in a reader's order, from the first hour to the last module."""
from pathlib import Path

# Title and pages of each group: notebooks, or folders, whose notebooks are ordered by number
GROUPS = (
    ('Begin', ('index.ipynb', 'guides/tutorial.ipynb', 'guides/design.ipynb', 'guides/comparison.ipynb',
               'guides/beside_the_official_kit.ipynb', 'guides/coming_from_other_decoders.ipynb')),
    ('How to', (
        'guides/colab.ipynb', 'guides/explore.ipynb', 'guides/official_checkpoint.ipynb',
        'guides/which_encoder.ipynb', 'guides/a_week_on_kaggle.ipynb',
        'guides/kaggle_gpu.ipynb', 'guides/kaggle_tpu.ipynb',
        'guides/measured_on_hardware.ipynb', 'guides/memory_and_disk.ipynb',
        'guides/more_than_one_machine.ipynb',
        'guides/own_language_model.ipynb', 'guides/a_language_model_that_helps.ipynb', 'guides/personal_words.ipynb',
        'guides/closed_vocabularies.ipynb', 'guides/streaming.ipynb', 'guides/one_trial.ipynb',
        'guides/two_participants.ipynb', 'guides/ensembles.ipynb', 'guides/tried_and_dropped.ipynb',
        'guides/your_own_idea.ipynb', 'guides/extending_the_kit.ipynb', 'guides/adding_an_encoder.ipynb',
        'guides/adding_a_stage.ipynb', 'guides/pretraining.ipynb', 'guides')),
    ('Benchmarks', ('benchmarks',)),
    ('Stages of a run', ('stages',)),
    ('Notebooks for Kaggle', ('kaggle/train.ipynb', 'kaggle/submit.ipynb')),
    ('Library: basics', ('.', 'core', 'metrics')),
    ('Library: configuration', ('config', 'config/encoders')),
    ('Library: data', ('data',)),
    ('Library: training', ('training', 'devices')),
    ('Library: PyTorch', ('pytorch', 'pytorch/models', 'pytorch/models/zipformer', 'pytorch/optimizer',
                          'pytorch/scaling')),
    ('Library: TensorFlow', ('tensorflow', 'tensorflow/models')),
    ('Library: language models', ('lm',)),
    ('Library: decoding', ('decoding', 'decoding/phoneme_lists', 'decoding/server')),
    ('Library: rescoring', ('rescoring',)),
    ('Library: audio', ('pytorch/audio', 'pytorch/audio/llm')),
    ('Library: pipeline', ('pipeline', 'pipeline/stages', 'cli')),
    ('Library: Kaggle', ('kaggle',)),
)


def groups(folder: Path) -> dict[str, list[Path]]:
    "Notebooks by group, each once; a folder that no group names belongs to the group of the folder above it."
    made, home = {}, {}
    for title, places in GROUPS:
        made[title] = []
        for place in places:
            found = [folder/place] if place.endswith('.ipynb') else sorted((folder/place).glob('*.ipynb'))
            made[title] += [p for p in found if p.exists() and not any(p in pages for pages in made.values())]
            if not place.endswith('.ipynb'): home[folder/place] = title
    named = {p for pages in made.values() for p in pages}
    for p in sorted(folder.rglob('*.ipynb')):
        if p in named or '.ipynb_checkpoints' in p.parts: continue
        made[next(home[above] for above in p.parents if above in home)].append(p)
    return {title: pages for title, pages in made.items() if pages}
