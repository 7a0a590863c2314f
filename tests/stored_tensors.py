"Memory that autograd keeps for the backward pass."
import torch


def stored_bytes(f, *args, without=()):
    "Bytes that the graph of `f(*args)` stores for the backward pass, excluding some tensors; each storage counts once."
    sizes = {}

    def count(t):
        sizes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(count, lambda t: t):
        out = f(*args)
    del out
    for t in without: sizes.pop(t.untyped_storage().data_ptr(), None)
    return sum(sizes.values())
