"Package metadata comes from settings.ini, the one place where nbdev keeps it."
from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup

config = ConfigParser(delimiters=['='])
config.read('settings.ini', encoding='utf-8')
cfg = config['DEFAULT']
extras = {k.removesuffix('_requirements'): v.split() for k, v in cfg.items() if k.endswith('_requirements')}

# The stage notebooks travel inside the wheel as b2t_kaggle/notebooks, so that `b2t run` works without a checkout
stages = f'{cfg["lib_name"]}.notebooks'

setup(
    name=cfg['lib_name'],
    version=cfg['version'],
    description=cfg['description'],
    long_description=Path('README.md').read_text(encoding='utf-8'),
    long_description_content_type='text/markdown',
    keywords=cfg['keywords'].split(),
    author=cfg['author'],
    author_email=cfg['author_email'],
    license='Apache-2.0',
    url=cfg['git_url'],
    classifiers=['Development Status :: 3 - Alpha', 'Intended Audience :: Science/Research',
                 *(f'Programming Language :: Python :: {v}' for v in ('3.11', '3.12', '3.13'))],
    packages=find_packages(include=[f'{cfg["lib_name"]}*']) + [stages],
    package_dir={stages: f'{cfg["nbs_path"]}/stages'},
    include_package_data=False,  # package_data below says all of it
    package_data={stages: ['*.ipynb'], cfg['lib_name']: ['py.typed', '__init__.pyi', 'core/pages.css',
                                                         'pipeline/errors.html', 'data/vocabulary/*.txt',
                                                         'kaggle/images.yaml']},
    python_requires=f'>={cfg["min_python"]}',
    install_requires=cfg['requirements'].split(),
    extras_require=extras,
    entry_points={'console_scripts': cfg['console_scripts'].split()},
)
