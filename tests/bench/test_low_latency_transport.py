"""`nbep bench low-latency` over each transport: what its buffer is made with. A stand-in is there for the buffer."""

from types import SimpleNamespace

import pytest

from nbep.bench import low_latency


class FakeBuffer:
    """Attributes: made_with: the keywords of the latest one"""

    made_with: dict

    def __init__(self, comm, **keywords):
        FakeBuffer.made_with = keywords

    @staticmethod
    def get_low_latency_rdma_size_hint(*_):
        return 128


@pytest.mark.parametrize(("transport", "num_nvl_peers"), [("direct", None), ("ibgda", 1), ("nvshmem", 1)])
def test_each_rank_is_a_node_without_memory_for_push_unless_all_is_mapped(transport, num_nvl_peers, monkeypatch):
    monkeypatch.setattr(low_latency.nbep, "Buffer", FakeBuffer)
    monkeypatch.setattr(low_latency, "Gap", lambda: lambda: None)
    low_latency.prepare(SimpleNamespace(size=2), low_latency.parse(["--transport", transport]))
    made_with = FakeBuffer.made_with
    assert (made_with["transport"], made_with["num_nvl_peers"]) == (transport, num_nvl_peers)
    assert (made_with["num_nvl_bytes"] > 0) == (transport == "direct")
