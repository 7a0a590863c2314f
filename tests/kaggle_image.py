"""Python as on one of Kaggle's images, for processes that a test starts. It finds only the packages that `images.yaml`
lists, their requirements, and those that the stand-in for pip (`trap_pip`) was asked for."""
import json
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from importlib.resources import files

import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

# Python imports a module of this name from the path when it starts; import the next one on the path as well
HOOK = '''
import json, os, runpy, sys
from pathlib import Path

HERE = Path(__file__).parent
for folder in sys.path:
    other = Path(folder or '.')/'sitecustomize.py'
    if other.is_file() and other.parent != HERE:
        runpy.run_path(str(other))
        break
facts = json.loads((HERE/'image.json').read_text())
hidden = set(facts['hidden'])

def is_hidden(name):
    if name not in hidden: return False
    calls = Path(os.environ['PIP_CALLS'])
    lines = calls.read_text().splitlines() if calls.exists() else ()
    asked = [word for line in lines if '--no-index' in line.split() for word in line.split()]
    return not any(name in facts['brought'].get(word.partition('==')[0], ()) for word in asked)

class OnImage:
    def __init__(self, finder): self.finder = finder
    def __getattr__(self, name): return getattr(self.finder, name)
    def find_spec(self, name, *args):
        return None if is_hidden(name.partition('.')[0]) else self.finder.find_spec(name, *args)

sys.meta_path[:] = map(OnImage, sys.meta_path)
'''


def with_needed(distributions):
    "Distributions and all of their requirements that are installed here."
    known = set()
    waiting = [(canonicalize_name(name), '') for name in distributions]
    while waiting:
        name, extra = waiting.pop()
        if (name, extra) in known: continue
        try: wishes = [Requirement(text) for text in requires(name) or ()]
        except PackageNotFoundError: continue
        known.add((name, extra))
        wishes = [w for w in wishes if w.marker is None or w.marker.evaluate({'extra': extra})]
        waiting += [(canonicalize_name(w.name), wanted) for w in wishes for wanted in ('', *w.extras)]
    return {name for name, _ in known}


def pretend_image(folder, image, needed):
    """Write the hook into a folder of the path. `needed` maps the modules that the kit may install with pip to their
    packages; the image has only those that it lists itself. Returns the hidden modules."""
    providers = {module: set(map(canonicalize_name, names)) for module, names in packages_distributions().items()}
    listed = yaml.safe_load(files('b2t_kaggle.kaggle').joinpath('images.yaml').read_text())[image]['holds']
    # TensorFlow's distribution has another name on a machine without a GPU
    listed = {*map(canonicalize_name, listed), *(name for module in listed for name in providers.get(module, ()))}
    held = with_needed(listed)
    hidden = {module for module, names in providers.items() if not names & held} - {'b2t_kaggle', 'pip'}
    hidden |= {module for module in needed if not providers.get(module, set()) & listed}
    packages = {text.partition('==')[0] for text in needed.values()}
    brought = {package: with_needed([package]) for package in packages}
    brought = {package: [m for m, some in providers.items() if some & names] for package, names in brought.items()}
    (folder/'sitecustomize.py').write_text(HOOK)
    (folder/'image.json').write_text(json.dumps(dict(hidden=sorted(hidden), brought=brought)))
    return hidden
