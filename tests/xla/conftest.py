"PyTorch counts devices at its first backward pass, so XLA's must be there by then, also where that pass is the CPU's."
from importlib.util import find_spec


def pytest_collectstart():
    "Where tests run, before the first is read: the process that only hands them out does not wait for the import."
    if find_spec('torch_xla'): # Without it each file is skipped
        import torch_xla
        torch_xla.device()
