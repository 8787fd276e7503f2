"""What DeepEP's ElasticBuffer has besides dispatch and combine, all marked experimental there, and no framework calls:
the names, and what to use instead.
"""

from __future__ import annotations

from typing import Any, NoReturn

REFUSED = {
    ("Engram (a remote key-value store)", "torch.distributed, or nbep.SharedMemory with kernels of your own"): (
        "get_engram_storage_size_hint engram_write engram_fetch"
    ),
    ("pipeline-parallel send and recv", "torch.distributed.batch_isend_irecv"): (
        "get_pp_buffer_size_hint pp_set_config pp_send pp_recv"
    ),
    ("all-gather and reduce-scatter (AGRS)", "torch.distributed.all_gather_into_tensor and reduce_scatter_tensor"): (
        "get_agrs_num_max_session_bytes get_agrs_buffer_size_hint create_agrs_session destroy_agrs_session "
        "agrs_new_session agrs_set_config agrs_get_inplace_tensor all_gather"
    ),
}


class Experimental:
    """Each raises NotImplementedError."""


def _refuse(name: str, what: str, instead: str) -> Any:
    def refuse(*args: Any, **options: Any) -> NoReturn:
        raise NotImplementedError(f"ElasticBuffer.{name}: {what} is not in nbep; use {instead}")

    refuse.__name__ = name
    return staticmethod(refuse)


for (what, instead), names in REFUSED.items():
    for name in names.split():
        setattr(Experimental, name, _refuse(name, what, instead))
