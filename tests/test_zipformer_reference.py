"Tiny Zipformers give the numbers that they gave when they were compared with icefall's."
import numpy as np
import pytest
import torch
import zipformer_reference as reference


@pytest.mark.parametrize('name', reference.MODELS)
def test_outputs_and_gradients(name):
    make, shape = reference.MODELS[name]
    with np.load(reference.PATH) as file: arrays = {k: torch.from_numpy(file[k]) for k in file.files}
    model = make().eval()
    torch.nn.utils.vector_to_parameters(arrays[f'{name}/weights'], model.parameters())
    found = reference.results(model, arrays[f'{name}/input'])
    assert found['output'].abs().max() > 0.1
    for k, v in found.items():
        want = arrays[f'{name}/result/{k}']
        torch.testing.assert_close(v, want, rtol=1e-3, atol=1e-4*float(want.abs().max() + 1), msg=k)
