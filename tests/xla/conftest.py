"PyTorch counts devices at its first backward pass, so XLA's must be there by then, also where that pass is the CPU's."
import torch_xla

torch_xla.device()
