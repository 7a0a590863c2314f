"PyTorch counts devices at its first backward pass, so XLA's must be known by then, also where that pass is the CPU's."
import torch_xla  # noqa: F401
