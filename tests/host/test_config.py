"""Config, its size hints and the default tables, against the numbers of DeepEP."""

from dataclasses import dataclass

import internode
import numpy as np
import pytest
from parts import both_parts

import nbep
from nbep.device.layout.intranode import num_nvl_bytes_needed
from nbep.host.config import COMBINE_TABLE, DISPATCH_TABLE, combine_rings, dispatch_rings, fit_config

# csrc/config.hpp evaluated term by term: cells, rows, source metadata, top-k indices, top-k weights, scales.
CHANNELS = 10
NVL_TERMS = [2 * 1 + 3, 256 * 14336, 256 * 8, 256 * 128 * 8, 256 * 128 * 4, 256 * 128 * 4]
NVL_TERMS_OF_TWO_NODES = [2 * 2 + 3, *NVL_TERMS[1:]]
RDMA_TERMS = [(8 * 2 + 2) * 4, 128 * 14336, 128 * 8, 128 * 128 * 8, 128 * 128 * 4, 128 * 128 * 4, 128 * 16]


def round_up(value, multiple):
    return -(-value // multiple) * multiple


def test_defaults_are_deepeps():
    assert nbep.Config() == nbep.Config(20, 6, 256, 6, 256)
    assert nbep.Config().num_threads is None


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_nvl_hint_inside_a_node(num_ranks):
    terms = [4 * NVL_TERMS[0], *NVL_TERMS[1:]]
    assert nbep.Config().get_nvl_buffer_size_hint(14336, num_ranks) == round_up(CHANNELS * num_ranks * sum(terms), 128)


def test_nvl_hint_between_nodes():
    terms = [4 * NVL_TERMS_OF_TWO_NODES[0], *NVL_TERMS_OF_TWO_NODES[1:]]
    assert nbep.Config().get_nvl_buffer_size_hint(14336, 16) == round_up(CHANNELS * 8 * sum(terms), 128)


@pytest.mark.parametrize("config", [nbep.Config(2, 1, 2), nbep.Config(0), nbep.Config(20)])
@pytest.mark.parametrize("hidden_bytes", [16, 14336])
def test_nvl_hint_holds_the_largest_rings(config, hidden_bytes):
    hint = config.get_nvl_buffer_size_hint(hidden_bytes, 4)
    assert hint % 128 == 0
    assert hint >= num_nvl_bytes_needed(config.ring_shape(4, hidden_bytes, 32, 128, 1))


@pytest.mark.parametrize("num_ranks", [1, 2, 8])
def test_rdma_hint_inside_a_node_is_zero(num_ranks):
    assert nbep.Config().get_rdma_buffer_size_hint(14336, num_ranks) == 0


def test_rdma_hint_between_nodes():
    config = nbep.Config(20, 6, 256, 6, 128)
    recv = 132  # 128 rounded up to a multiple of 6
    terms = [RDMA_TERMS[0], *(term // 128 * recv for term in RDMA_TERMS[1:])]
    assert config.num_max_rdma_chunked_recv_tokens == recv
    assert config.get_rdma_buffer_size_hint(14336, 32) == round_up(2 * CHANNELS * 4 * sum(terms), 128)


@pytest.mark.parametrize("hint", ["get_nvl_buffer_size_hint", "get_rdma_buffer_size_hint"])
def test_hints_refuse_rank_counts_that_fill_no_nodes(hint):
    with pytest.raises(ValueError, match="num_ranks: got 12; must be at most 8, or a multiple of it"):
        getattr(nbep.Config(), hint)(14336, 12)
    with pytest.raises(ValueError, match="num_sms: got 3; must be even between nodes"):
        getattr(nbep.Config(3), hint)(14336, 16)


def test_hints_for_smaller_nodes():
    """The numbers of NVL ranks and of nodes change places with those of DeepEP's eight ranks a node."""
    config = nbep.Config(20, 6, 256, 6, 132)
    nvl_terms = [4 * (2 * 4 + 3), *NVL_TERMS[1:]]
    hint = config.get_nvl_buffer_size_hint(14336, 8, num_nvl_peers=2)
    assert hint == round_up(CHANNELS * 2 * sum(nvl_terms), 128)
    rdma_terms = [(2 * 2 + 2) * 4, *(term // 128 * 132 for term in RDMA_TERMS[1:])]
    hint = config.get_rdma_buffer_size_hint(14336, 8, num_nvl_peers=2)
    assert hint == round_up(2 * CHANNELS * 4 * sum(rdma_terms), 128)
    assert config.get_rdma_buffer_size_hint(14336, 4, num_nvl_peers=4) == 0


@pytest.mark.parametrize("hint", ["get_nvl_buffer_size_hint", "get_rdma_buffer_size_hint"])
def test_eight_ranks_a_node_are_the_default_of_hints(hint):
    for num_ranks in (4, 8, 32):
        of_default = getattr(nbep.Config(), hint)(14336, num_ranks)
        assert of_default == getattr(nbep.Config(), hint)(14336, num_ranks, num_nvl_peers=min(num_ranks, 8))


@pytest.mark.parametrize("hint", ["get_nvl_buffer_size_hint", "get_rdma_buffer_size_hint"])
@pytest.mark.parametrize(
    ("num_nvl_peers", "message"),
    [
        (0, "num_nvl_peers: got 0; must be an integer of at least 1"),
        (2.0, "num_nvl_peers: got 2.0; must be an integer"),
        (5, r"num_nvl_peers: got 5; must be 1 to 8, and divide num_ranks \(12\)"),
        (12, r"num_nvl_peers: got 12; must be 1 to 8, and divide num_ranks \(12\)"),
    ],
)
def test_hints_refuse_nodes_that_ranks_do_not_fill(hint, num_nvl_peers, message):
    with pytest.raises(ValueError, match=message):
        getattr(nbep.Config(), hint)(14336, 12, num_nvl_peers=num_nvl_peers)


@pytest.mark.parametrize(
    "config", [nbep.Config(2, 1, 2, 1, 2), nbep.Config(4, 2, 8, 2, 4), nbep.Config(160, 1, 2, 1, 2), nbep.Config(20)]
)
@pytest.mark.parametrize("hidden_bytes", [16, 14336])
@pytest.mark.parametrize(("num_nodes", "num_nvl_peers"), [(2, 2), (3, 2), (2, 4), (4, 1), (20, 8)])
def test_hints_between_nodes_hold_the_largest_rings(config, hidden_bytes, num_nodes, num_nvl_peers):
    """32 choices and 128 scales a token."""
    nodes, num_ranks = (num_nodes, num_nvl_peers), num_nodes * num_nvl_peers
    num_nvl_bytes = config.get_nvl_buffer_size_hint(hidden_bytes, num_ranks, num_nvl_peers=num_nvl_peers)
    num_rdma_bytes = config.get_rdma_buffer_size_hint(hidden_bytes, num_ranks, num_nvl_peers=num_nvl_peers)
    assert num_nvl_bytes % 128 == num_rdma_bytes % 128 == 0
    for rings in (
        dispatch_rings(config, *nodes, hidden_bytes, 32, 128),
        combine_rings(config, *nodes, hidden_bytes, 32),
    ):
        assert num_nvl_bytes >= rings.num_nvl_bytes
        assert num_rdma_bytes >= rings.num_rdma_bytes


@dataclass(frozen=True)
class Hinted(internode.Options):
    """Options of a buffer whose sizes are the hints of its config."""

    def buffer_arguments(self, case):
        arguments = 2 * case.hidden, case.num_ranks
        return {
            **super().buffer_arguments(case),
            "num_nvl_bytes": self.config.get_nvl_buffer_size_hint(*arguments, num_nvl_peers=case.num_nvl_peers),
            "num_rdma_bytes": self.config.get_rdma_buffer_size_hint(*arguments, num_nvl_peers=case.num_nvl_peers),
        }


@pytest.mark.parametrize(
    ("num_nodes", "num_nvl_peers", "fp8", "hidden"),
    both_parts(
        [(2, 2, None, 512)],
        thorough=[(2, 2, "row", 512), (3, 2, "row", 128)],
        long=[
            *((2, 2, fp8, 16384) for fp8 in ("row", None)),
            *((*nodes, fp8, hidden) for nodes in ((3, 2), (2, 4)) for fp8 in ("row", None) for hidden in (512, 16384)),
        ],
    ),
)
def test_a_buffer_of_the_hints_runs_their_config_between_nodes(num_nodes, num_nvl_peers, fp8, hidden):
    """With 32 choices a token, and in FP8 with scales: in 3 nodes the smallest rings take more than DeepEP's number."""
    case = internode.make_node_case(
        3,
        num_nodes=num_nodes,
        num_nvl_peers=num_nvl_peers,
        num_tokens=3,
        hidden=hidden,
        num_topk=32,
        experts_per_rank=32,
    )
    internode.run(case, Hinted(nbep.Config(2, 1, 2, 1, 2), fp8=fp8))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1,), "num_sms: got -1; must be an integer of at least 0"),
        ((4.0, 2, 8), r"num_sms: got 4\.0; must be an integer"),
        (("4", 2, 8), "num_sms: got '4'; must be an integer"),
        ((4, True, 8), "num_max_nvl_chunked_send_tokens: got True; must be an integer"),
        ((20, 0), "num_max_nvl_chunked_send_tokens: got 0; must be an integer of at least 1"),
        ((20, 6, 0), "num_max_nvl_chunked_recv_tokens: got 0; must be an integer of at least 1"),
        ((20, 6, 6), "num_max_nvl_chunked_send_tokens: got 6; must be less than .* \\(6\\)"),
        ((20, 6, 256, 0), "num_max_rdma_chunked_send_tokens: got 0; must be an integer of at least 1"),
        ((20, 6, 256, 6, -6), "num_max_rdma_chunked_recv_tokens: got -6; must be an integer of at least 1"),
        ((20, 6, 256, 6, 5), "num_max_rdma_chunked_send_tokens: got 6; must be at most half of .* \\(6\\)"),
    ],
)
def test_settings_out_of_range_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        nbep.Config(*arguments)


@pytest.mark.parametrize("integer", [np.int64, np.uint8, np.int32])
def test_numpys_integers_are_integers(integer):
    config = nbep.Config(integer(4), integer(2), integer(8), num_threads=integer(64))
    assert config == nbep.Config(4, 2, 8, num_threads=64)
    assert {type(value) for value in vars(config).values()} == {int, type(None)}
    hint = nbep.Config(80).get_nvl_buffer_size_hint(integer(128), integer(8))
    assert (hint, type(hint)) == (nbep.Config(80).get_nvl_buffer_size_hint(128, 8), int)
    sizes = [integer(size) for size in (128, 100, 8, 64)]
    assert nbep.Buffer.get_low_latency_rdma_size_hint(*sizes) == nbep.Buffer.get_low_latency_rdma_size_hint(
        128, 100, 8, 64
    )


@pytest.mark.parametrize("num_threads", [0, 48, -32])
def test_threads_that_fill_no_warps_are_refused(num_threads):
    with pytest.raises(ValueError, match=f"num_threads: got {num_threads}; must be a positive multiple of 32"):
        nbep.Config(num_threads=num_threads)


def test_config_cannot_change():
    with pytest.raises(AttributeError):
        nbep.Config().num_sms = 4


@pytest.fixture
def default_num_sms():
    yield
    nbep.Buffer.set_num_sms(20)


@pytest.mark.usefixtures("default_num_sms")
def test_default_tables_follow_num_sms():
    assert nbep.Buffer.get_dispatch_config(8) == nbep.Config(20, 12, 256, 6, 128)
    assert nbep.Buffer.get_combine_config(2) == nbep.Config(20, 12, 256, 6, 128)
    nbep.Buffer.set_num_sms(24)
    assert nbep.Buffer.get_dispatch_config(160) == nbep.Config(24, 28, 720, 12, 128)
    assert nbep.Buffer.get_combine_config(64) == nbep.Config(24, 1, 288, 20, 128)
    for table in (DISPATCH_TABLE, COMBINE_TABLE):
        assert [*table.in_node, *table.over_nodes] == [2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160]


@pytest.mark.usefixtures("default_num_sms")
def test_fewer_sms_have_larger_chunks_by_default():
    for get, chunks in (
        (nbep.Buffer.get_dispatch_config, (32, 24, 12)),
        (nbep.Buffer.get_combine_config, (24, 12, 12)),
    ):
        for num_sms, chunk in zip((2, 16, 18, 20, 22), chunks[:1] + chunks[:2] + chunks[1:], strict=True):
            nbep.Buffer.set_num_sms(num_sms)
            assert get(4) == nbep.Config(num_sms, chunk, 256, 6, 128)


@pytest.mark.parametrize("get", [nbep.Buffer.get_dispatch_config, nbep.Buffer.get_combine_config])
def test_rank_counts_without_a_default_are_refused(get):
    with pytest.raises(ValueError, match="num_ranks: got 3; must be one of 2, 4, 8, 16"):
        get(3)


@pytest.mark.parametrize("num_sms", [0, 7, 2.0])
def test_num_sms_must_be_even_and_positive(num_sms):
    with pytest.raises(ValueError, match="new_num_sms: got"):
        nbep.Buffer.set_num_sms(num_sms)
    assert nbep.Buffer.num_sms == 20


def test_low_latency_hint_is_deepeps():
    # 128 tokens, hidden 7168, 256 experts. Both messages: 4 bytes for each of 56 scales, and two bytes a column; the
    # dispatch message has 16 bytes in front of 14336 and no scales.
    dispatch_msg, combine_msg = 16 + 14336, 56 * 4 + 14336
    send = recv = 256 * 128 * combine_msg
    assert dispatch_msg < combine_msg
    total = 2 * (send + recv) + 2 * 1024
    assert nbep.Buffer.get_low_latency_rdma_size_hint(128, 7168, 8, 256) == (total + 128) // 128 * 128


def test_a_default_config_is_fitted_to_the_buffer():
    config = nbep.Config(4, 6, 256)
    bytes_of_10_slots = num_nvl_bytes_needed(nbep.Config(4, 6, 10).ring_shape(4, 1024, 8, 0, 1))
    assert fit_config(config, bytes_of_10_slots, 4, 1024, 8, 0, 1) == nbep.Config(4, 6, 10)
    assert fit_config(config, bytes_of_10_slots - 1, 4, 1024, 8, 0, 1) == nbep.Config(4, 6, 9)
    assert fit_config(config, 1 << 30, 4, 1024, 8, 0, 1) == config
    bytes_of_5_slots = num_nvl_bytes_needed(nbep.Config(4, 4, 5).ring_shape(4, 1024, 8, 0, 1))
    assert fit_config(config, bytes_of_5_slots, 4, 1024, 8, 0, 1) == nbep.Config(4, 2, 5)
    assert fit_config(config, 4096, 4, 1024, 8, 0, 1) == nbep.Config(
        4, 1, 2
    )  # the caller says how many bytes are needed
