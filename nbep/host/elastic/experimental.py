"""What DeepEP's ElasticBuffer has besides dispatch and combine, all marked experimental there, and no framework calls:
the names, and what to use instead.
"""

from __future__ import annotations

from typing import Any, NoReturn

ENGRAM = "Engram (a remote key-value store)", "torch.distributed, or nbep.SharedMemory with kernels of your own"
PIPELINE = "pipeline-parallel send and recv", "torch.distributed.batch_isend_irecv"
GATHER = "all-gather and reduce-scatter (AGRS)", "torch.distributed.all_gather_into_tensor and reduce_scatter_tensor"


def refuse_verb(name: str, what: tuple[str, str]) -> NoReturn:
    raise NotImplementedError(f"ElasticBuffer.{name}: {what[0]} is not in nbep; use {what[1]}")


class Experimental:
    """Each raises NotImplementedError."""

    @staticmethod
    def get_engram_storage_size_hint(*args: Any, **options: Any) -> NoReturn:
        refuse_verb("get_engram_storage_size_hint", ENGRAM)

    def engram_write(self, *args: Any, **options: Any) -> NoReturn:
        refuse_verb("engram_write", ENGRAM)

    def engram_fetch(self, *args: Any, **options: Any) -> NoReturn:
        refuse_verb("engram_fetch", ENGRAM)

    @staticmethod
    def get_pp_buffer_size_hint(*args: Any, **options: Any) -> NoReturn:
        refuse_verb("get_pp_buffer_size_hint", PIPELINE)

    def pp_set_config(self, *args: Any, **options: Any) -> NoReturn:
        refuse_verb("pp_set_config", PIPELINE)

    def pp_send(self, *args: Any, **options: Any) -> NoReturn:
        refuse_verb("pp_send", PIPELINE)

    def pp_recv(self, *args: Any, **options: Any) -> NoReturn:
        refuse_verb("pp_recv", PIPELINE)

    @staticmethod
    def get_agrs_num_max_session_bytes(*args: Any, **options: Any) -> NoReturn:
        refuse_verb("get_agrs_num_max_session_bytes", GATHER)

    @staticmethod
    def get_agrs_buffer_size_hint(*args: Any, **options: Any) -> NoReturn:
        refuse_verb("get_agrs_buffer_size_hint", GATHER)

    def create_agrs_session(self, *args: Any, **options: Any) -> NoReturn:
        refuse_verb("create_agrs_session", GATHER)

    def destroy_agrs_session(self, *args: Any, **options: Any) -> NoReturn:
        refuse_verb("destroy_agrs_session", GATHER)

    def agrs_new_session(self, *args: Any, **options: Any) -> NoReturn:
        refuse_verb("agrs_new_session", GATHER)

    def agrs_set_config(self, *args: Any, **options: Any) -> NoReturn:
        refuse_verb("agrs_set_config", GATHER)

    def agrs_get_inplace_tensor(self, *args: Any, **options: Any) -> NoReturn:
        refuse_verb("agrs_get_inplace_tensor", GATHER)

    def all_gather(self, *args: Any, **options: Any) -> NoReturn:
        refuse_verb("all_gather", GATHER)
