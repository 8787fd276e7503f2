"""Arrays of torch, CuPy and Numba go in, the same kind comes out; symmetric memory as an array."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from arrays import LIBRARY, to_numpy
from processes import run_python
from target import spawn

import nbep

pytestmark = pytest.mark.cuda

HERE = Path(__file__).parent


@pytest.mark.parametrize("library", ["torch", "cupy", "numba"])
def test_outputs_are_of_the_library_whose_arrays_went_in(library):
    if find_spec(library) is None:
        pytest.skip(f"no {library} here")
    output = run_python(HERE / "kinds_main.py", NBEP_TEST_ARRAYS=library)
    name = {"torch": "Tensor", "cupy": "ndarray", "numba": "DeviceNDArray"}[library]
    assert f"{name} in, {name} out" in output


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_every_rank_sees_every_peers_memory(num_ranks):
    from cuda.bindings import driver as cu

    from nbep.host.target.cuda.driver import check

    def main(comm):
        buffer = nbep.Buffer(comm, num_nvl_bytes=1024)
        memory = buffer._memory
        memory.symmetric.write(0, np.array([100 + comm.rank], np.int32))
        comm.barrier()
        table = memory.symmetric.read(memory.peers.buffer_ptrs - memory.symmetric.address, comm.size, np.int64)
        seen = np.zeros(comm.size, np.int32)
        for peer, address in enumerate(table):
            check("cuMemcpyDtoH", cu.cuMemcpyDtoH(seen[peer:].ctypes.data, int(address), 4))
        comm.barrier()
        buffer.destroy()
        return seen.tolist()

    assert spawn(main, num_ranks) == [[100 + rank for rank in range(num_ranks)]] * num_ranks


@pytest.mark.skipif(LIBRARY != "torch", reason="the dtypes are torch's")
def test_local_buffer_tensor_is_torchs_view_of_the_buffer():
    import torch

    def main(comm):
        buffer = nbep.Buffer(comm, num_nvl_bytes=1024)
        memory = buffer._memory
        memory.symmetric.write(0, np.arange(256, dtype=np.int32))
        whole = buffer.get_local_buffer_tensor(torch.int32)
        assert (type(whole), tuple(whole.shape), whole.dtype) == (torch.Tensor, (256,), torch.int32)
        assert to_numpy(whole).tolist() == list(range(256))
        assert whole.data_ptr() == memory.symmetric.address
        part = buffer.get_local_buffer_tensor(torch.int32, (3, 2), offset=7)
        assert to_numpy(part).tolist() == [[7, 8], [9, 10], [11, 12]]
        assert tuple(buffer.get_local_buffer_tensor(torch.bfloat16).shape) == (512,)
        with pytest.raises(ValueError, match=r"size: got \(257,\) at offset 0; must be at most 256 elements"):
            buffer.get_local_buffer_tensor(torch.int32, (257,))
        buffer.destroy()

    spawn(main, 2)
