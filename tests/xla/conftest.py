"PyTorch counts devices at its first backward pass, even on a CPU, so XLA's devices must exist by then."
from importlib.util import find_spec


def pytest_collectstart():
    """Start XLA before the first file is imported; pytest-xdist's controller runs no tests, and does not wait for the
    import."""
    if find_spec('torch_xla'): # Otherwise each file is skipped
        import torch_xla
        torch_xla.device()
