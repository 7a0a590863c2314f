"""A fine-tuning that is killed at its writes and started again gives the same adapter and leaves no other files. A few
writes are tried; `pytest tests/faults/test_finetune_kills.py --faults 1000` tries all, in minutes."""
import hashlib
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
from copies import TRAINER, start, status_of  # noqa: E402
from stage_kills import tune  # noqa: E402
from tiny_models import tiny_lm  # noqa: E402

TEXT = ['how are you', 'is she old', 'i am fine thank you', 'what is this']*2
NEVER = 10**9


def made(root: Path) -> dict[str, str]:
    "The files in the folder, and hashes of their contents."
    files = (p for p in root.rglob('*') if p.is_file())
    return {str(p.relative_to(root)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def test_killed_at_a_write(tmp_path, request):
    start([*TRAINER, 'stage_kills', 'transformers.models.opt.modeling_opt', 'peft'])
    model = tiny_lm(tmp_path/'model', 'opt', TEXT)
    root = tmp_path/'room'
    root.mkdir()
    assert status_of(tune, root, model, TEXT, NEVER, False, tmp_path/'counted') == 0
    whole = made(root)
    assert {Path(name).parts[0] for name in whole} == {'adapter'}
    n_writes = int((tmp_path/'counted').read_text())
    assert n_writes >= 10
    tried = min(n_writes, max(4, request.config.getoption('--faults')//20))
    for i in range(tried):
        for p in (root/'adapter').glob('*'): p.unlink()
        at = i*n_writes//tried
        assert status_of(tune, root, model, TEXT, at, i % 2 == 1) in (-signal.SIGKILL, -signal.SIGXFSZ, 0)
        assert status_of(tune, root, model, TEXT, NEVER) == 0
        assert made(root) == whole, at
