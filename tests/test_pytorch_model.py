"""The PyTorch model agrees with a plain implementation of the published formulas; hostile and damaged checkpoints are
refused."""

import os
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from b2t_kaggle.config import from_official, load_config, preset, with_overrides
from b2t_kaggle.core.ctc import n_frames
from b2t_kaggle.core.files import _owner
from b2t_kaggle.pytorch.checkpoint import (
    load_file,
    load_model,
    save_atomic,
    save_official,
    to_official_args,
    to_official_state,
)
from b2t_kaggle.pytorch.models import build_model
from b2t_kaggle.pytorch.models.gru import GRUDecoder, from_official_state
from b2t_kaggle.pytorch.recurrence import cpu_gru, frame_order
from b2t_kaggle.training.checkpoints import CheckpointError


class Plain(nn.Module):
    """The baseline as its paper describes it: lists of day parameters, patches of one trial after another, PyTorch's
    own GRU."""

    def __init__(self, F, H, D, K, L, size, stride):
        super().__init__()
        self.size, self.stride = size, stride
        self.day_weights = nn.ParameterList([nn.Parameter(torch.eye(F)) for _ in range(D)])
        self.day_biases = nn.ParameterList([nn.Parameter(torch.zeros(1, F)) for _ in range(D)])
        self.gru = nn.GRU(F * size, H, L, batch_first=True)
        self.out = nn.Linear(H, K)
        self.h0 = nn.Parameter(torch.zeros(1, 1, H))

    def forward(self, x, day_idx):
        frames = []
        for trial, day in zip(x, day_idx):
            y = trial @ self.day_weights[day] + self.day_biases[day]
            y = y / (1 + y.abs())
            starts = range(0, len(y) - self.size + 1, self.stride)
            frames.append(torch.stack([torch.cat([y[t] for t in range(s, s + self.size)]) for s in starts]))
        h0 = self.h0.expand(self.gru.num_layers, len(x), -1).contiguous()
        return self.out(self.gru(torch.stack(frames), h0)[0])


def random_plain(*sizes, seed=0):
    torch.manual_seed(seed)
    plain = Plain(*sizes)
    for p in plain.parameters(): nn.init.normal_(p, std=p.shape[-1]**-0.5)
    return plain


def ours_from(plain, F, H, D, K, L, size, stride):
    model = GRUDecoder(F, H, D, K, n_layers=L, patch_size=size, patch_stride=stride)
    model.load_state_dict(from_official_state(plain.state_dict()))
    return model.eval()


@pytest.mark.parametrize('prefix', ['', 'module.', '_orig_mod.'])
def test_official_weights_give_the_logits_of_the_formulas(prefix):
    sizes = (512, 48, 3, 41, 5, 14, 4)
    plain = random_plain(*sizes)
    model = GRUDecoder(512, 48, 3, 41, n_layers=5, patch_size=14, patch_stride=4).eval()
    model.load_state_dict({prefix + k: v for k, v in plain.state_dict().items()})
    x = torch.randn(4, 90, 512)
    day = torch.tensor([2, 0, 0, 1])
    with torch.no_grad(): ours, theirs = model(x, day), plain(x, day)
    assert ours.shape == (4, n_frames(90, 14, 4), 41)
    assert (ours - theirs).abs().max() < 1e-5
    assert theirs.std() > 0.05  # The logits vary


@settings(max_examples=25, deadline=None)
@given(
    F=st.integers(1, 5),
    H=st.integers(1, 6),
    L=st.integers(1, 3),
    stride=st.integers(1, 4),
    more=st.integers(0, 4),
    extra=st.lists(st.integers(0, 12), min_size=1, max_size=4),
    seed=st.integers(0, 99),
)
def test_logits_and_gradients_for_any_shape(F, H, L, stride, more, extra, seed):
    "Packed trials of different lengths agree with the plain model, trial by trial."
    size = stride + more
    D = 3
    sizes = (F, H, D, 4, L, size, stride)
    plain = random_plain(*sizes, seed=seed).double()
    model = ours_from(plain, *sizes).double()
    lengths = [size + e for e in extra]
    x = torch.randn(len(extra), max(lengths), F).double()
    day = torch.randint(0, D, (len(extra),))
    ours = model(x, day, n_bins=torch.tensor(lengths))
    loss, plain_loss = 0, 0
    for i, n in enumerate(lengths):
        one = plain(x[i:i+1, :n], day[i:i+1])[0]
        frames = n_frames(n, size, stride)
        assert torch.allclose(ours[i, :frames], one, atol=1e-10)
        loss, plain_loss = loss + (ours[i, :frames]**3).sum(), plain_loss + (one**3).sum()
    loss.backward(); plain_loss.backward()
    theirs = from_official_state(
        {k: torch.zeros_like(p) if p.grad is None else p.grad for k, p in plain.named_parameters()}
    )
    for name, p in model.named_parameters(): assert torch.allclose(p.grad, theirs[name], atol=1e-9), name


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_gru_equals_pytorch_within_its_precision(dtype):
    torch.manual_seed(0)
    gru = nn.GRU(32, 300, 2)
    x = torch.randn(4, 25, 32)
    h0 = torch.randn(2, 4, 300)
    order = frame_order(torch.full((4,), 25))
    with torch.autocast('cpu', torch.bfloat16, enabled=dtype == torch.bfloat16):
        ours = cpu_gru(gru, x.flatten(0, 1), order, h0, training=False)[0]
    error = (ours - gru(x.transpose(0, 1), h0)[0].flatten(0, 1)).abs().max()
    assert error < (1e-5 if dtype == torch.float32 else 0.03)


def test_autocast_changes_the_loss_little():
    "Training in bfloat16 must follow float32: gradients have nearly the same direction."
    torch.manual_seed(0)
    model = GRUDecoder(64, 256, 2, 41, n_layers=2, patch_size=14, patch_stride=4)
    x = torch.randn(6, 100, 64)
    day = torch.tensor([0, 0, 0, 1, 1, 1])
    grads = []
    for on in (False, True):
        model.zero_grad()
        with torch.autocast('cpu', torch.bfloat16, enabled=on): logits = model(x, day)
        logits.float().log_softmax(-1)[..., 3].sum().backward()
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert torch.cosine_similarity(*grads, dim=0) > 0.995


def official_folder(folder, cfg, model, **more):
    """A folder as the official trainer writes it: NumPy scalars and the optimiser's state next to the weights, file
    locations in args.yaml."""
    out = folder/'checkpoint'
    out.mkdir(parents=True)
    state = {f'_orig_mod.{k}': v for k, v in to_official_state(model.state_dict()).items()}
    opt = torch.optim.AdamW(model.parameters())
    model(torch.randn(1, 20, cfg.model.neural_dim), torch.tensor([0])).sum().backward(); opt.step()
    torch.save(
        dict(
            model_state_dict={k: v.clone() for k, v in state.items()},
            optimizer_state_dict=opt.state_dict(),
            scheduler_state_dict=dict(base_lrs=[0.005], last_epoch=3),
            val_PER=np.float64(0.1),
            val_loss=np.float32(20.5),
            **more,
        ),
        out / 'best_checkpoint',
    )
    args = to_official_args(cfg) | dict(
        mode='train', gpu_number='1', output_dir='trained_models/baseline_rnn', save_val_logits=True
    )
    args['model']['input_network'] |= dict(n_input_layers=1, input_layer_sizes=[cfg.model.neural_dim])
    (out/'args.yaml').write_text(yaml.safe_dump(args))
    return out


@pytest.fixture
def small():
    cfg = with_overrides(
        preset('official'),
        {'neural_dim': 8, 'n_units': 6, 'n_layers': 2, 'data.sessions': ['t15.2023.08.11', 't15.2023.08.13']},
    )
    torch.manual_seed(0)
    return cfg, build_model(cfg.model, 2).eval()


def test_official_folder_loads_and_is_written_back(small, tmp_path):
    cfg, model = small
    out = official_folder(tmp_path/'theirs', cfg, model)
    want = from_official_state(torch.load(out/'best_checkpoint', weights_only=False)['model_state_dict'])
    for path in (tmp_path/'theirs', out, out/'best_checkpoint'):
        loaded, c = load_model(path)
        assert c.data.sessions == cfg.data.sessions and not loaded.training
        for k, v in loaded.state_dict().items(): assert torch.equal(v, want[k])
    back = save_official(loaded, c, tmp_path/'back', val_per=0.1)
    plain = Plain(8, 6, 2, 41, 2, 14, 4)
    written = torch.load(back / 'best_checkpoint', weights_only=True)
    # The official names and shapes: the evaluation removes the prefix that the trainer's compiled model adds
    plain.load_state_dict({k.replace('_orig_mod.', ''): v for k, v in written['model_state_dict'].items()})
    x = torch.randn(2, 40, 8)
    day = torch.tensor([1, 0])
    assert (plain(x, day) - loaded(x, day)).abs().max() < 1e-5
    assert written['val_PER'] == 0.1
    assert from_official(yaml.safe_load((back/'args.yaml').read_text())) == load_config(out/'args.yaml')


class Touch:
    "A hostile pickle, which runs a command when it is loaded."
    def __init__(self, path): self.path = path
    def __reduce__(self): return os.system, (f'touch {self.path}',)


def test_a_hostile_file_does_not_run(small, tmp_path):
    cfg, model = small
    official_folder(tmp_path/'theirs', cfg, model, val_metrics=Touch(tmp_path/'pwned'))
    with pytest.raises(CheckpointError, match='more than weights'): load_model(tmp_path/'theirs')
    (tmp_path/'plain.pt').write_bytes(pickle.dumps(Touch(tmp_path/'pwned')))
    with pytest.raises(CheckpointError): load_file(tmp_path/'plain.pt')
    # An array of objects contains a pickle
    torch.save(dict(x=np.array([Touch(tmp_path/'pwned')], dtype=object)), tmp_path/'array.pt')
    with pytest.raises(CheckpointError): load_file(tmp_path/'array.pt')
    assert not (tmp_path/'pwned').exists()


@settings(max_examples=20, deadline=None)
@given(cut=st.floats(0, 1, exclude_max=True))
def test_damaged_files_give_one_kind_of_error(tmp_path_factory, cut):
    path = tmp_path_factory.mktemp('c')/'a.pt'
    save_atomic(dict(model_state_dict=dict(w=torch.arange(100.))), path)
    whole = path.read_bytes()
    path.write_bytes(whole[:int(len(whole) * cut)])
    with pytest.raises(CheckpointError, match='a.pt'): load_file(path)


def test_an_interrupted_write_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path/'a.pt'
    save_atomic(dict(x=1), path)
    def fails(value, f): f.write(b'half'); raise OSError('no space left on device')
    monkeypatch.setattr(torch, 'save', fails)
    with pytest.raises(OSError): save_atomic(dict(x=2), path)
    monkeypatch.undo()
    assert load_file(path) == dict(x=1)
    save_atomic(dict(x=3), path)
    assert load_file(path) == dict(x=3) and [p.name for p in tmp_path.iterdir()] == ['a.pt']


@pytest.mark.parametrize('prefix', ['', 'module.', '_orig_mod.', 'module._orig_mod.'])
def test_official_weights_load_into_a_part_of_another_model(prefix):
    plain = random_plain(8, 6, 11, 41, 2, 14, 4)
    whole = nn.ModuleDict(
        dict(head=nn.Linear(2, 2), decoder=GRUDecoder(8, 6, 11, 41, n_layers=2, patch_size=14, patch_stride=4))
    )
    state = {f'head.{k}': v for k, v in whole['head'].state_dict().items()} | {
        f'decoder.{prefix}{k}': v for k, v in plain.state_dict().items()
    }
    keys = list(state)
    whole.load_state_dict(state)
    assert list(state) == keys                                              # The caller's dictionary is not changed
    for k, v in from_official_state(plain.state_dict()).items(): assert torch.equal(whole['decoder'].state_dict()[k], v)


def test_official_weights_that_do_not_fit_are_refused(tmp_path, small):
    cfg, model = small
    official = to_official_state(model.state_dict())
    with pytest.raises(RuntimeError, match='size mismatch for day_weights'):
        build_model(cfg.model, 3).load_state_dict(official)
    with pytest.raises(RuntimeError, match='Unexpected key.*day_weights.x'):
        model.load_state_dict(official | {'day_weights.x': torch.zeros(1)})
    with pytest.raises(ValueError, match=r'day_biases: found days \[1\]'):
        model.load_state_dict({k: v for k, v in official.items() if k != 'day_biases.0'})
    odd = official | {'day_weights.1': torch.zeros(3, 3)}
    with pytest.raises(ValueError, match=r'day_weights: found the shapes'): model.load_state_dict(odd)
    save_atomic(dict(model_state_dict=odd, config=cfg.dump()), tmp_path/'a.pt')
    with pytest.raises(CheckpointError, match='a.pt: day_weights: found the shapes'): load_model(tmp_path/'a.pt')


def test_days_in_any_form(small):
    _, model = small
    x = torch.randn(2, 20, 8)
    want = model(x, torch.tensor([1, 0]))
    for day in ([1, 0], (1, 0), np.array([1, 0]), np.array([1, 0], np.uint8), torch.tensor([1, 0], dtype=torch.int32)):
        assert torch.equal(model(x, day), want)
    for day in ([1], [1, 0, 0], 1, [0.5, 0.], [[1, 0]]):
        with pytest.raises(ValueError, match='day_idx: found .* expected whole numbers of shape'): model(x, day)


@pytest.mark.parametrize(
    'change, found',
    [(dict(model=dict(n_units=-1)), 'model.n_units'), (dict(surprise=1), 'surprise'), (dict(train=7), 'train')],
)
def test_a_configuration_that_cannot_be_used_names_its_fields(small, tmp_path, change, found):
    cfg, model = small
    save_atomic(dict(model_state_dict=model.state_dict(), config=cfg.dump() | change), tmp_path/'a.pt')
    with pytest.raises(CheckpointError, match=rf'a\.pt: its configuration cannot be used \({found}: '):
        load_model(tmp_path / 'a.pt')
    save_atomic(dict(model_state_dict=model.state_dict(), config='none'), tmp_path/'a.pt')
    with pytest.raises(CheckpointError, match=r'a\.pt: its configuration'): load_model(tmp_path/'a.pt')


def test_temporary_files_belong_to_one_process(tmp_path, monkeypatch):
    "Files of a living process are kept, those of a dead process are removed, and each process has its own name."
    dead = subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE)
    stale, others = (tmp_path/f'.a.pt.{_owner(pid)}.tmp.pt' for pid in (dead.pid, os.getppid()))
    dead.communicate()
    stale.write_bytes(b'half'); others.write_bytes(b'half')
    names = []
    real = torch.save
    monkeypatch.setattr(torch, 'save', lambda value, f: (names.append(os.path.basename(f.name)), real(value, f)))
    save_atomic(dict(x=1), tmp_path/'a.pt')
    assert names == [f'.a.pt.{_owner()}.tmp.pt'] and sorted(p.name for p in tmp_path.iterdir()) == sorted(
        ['a.pt', others.name]
    )


def test_the_gru_is_the_only_graph_break():
    with torch.device('meta'):
        model = GRUDecoder(8, 6, 3, 41, n_layers=2, patch_size=4, patch_stride=2).eval()
        found = torch._dynamo.explain(model.forward)(torch.empty(2, 20, 8), torch.empty(2, dtype=torch.long))
    assert found.graph_count <= 2  # Before and after the GRU, which is not PyTorch's to trace
