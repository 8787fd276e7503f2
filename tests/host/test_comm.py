"""The communicator of the ranks of one process."""

import operator
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from target import spawn

import nbep
from nbep.host.ranks.comm import CommGroup, InProcessComm, gather_results, is_mpi_comm
from nbep.host.target.process import connect


def test_every_rank_has_its_number_and_the_size():
    assert spawn(lambda comm: (comm.rank, comm.Get_rank(), comm.size, comm.Get_size()), 3) == [
        (rank, rank, 3, 3) for rank in range(3)
    ]


def test_allgather_returns_what_every_rank_sent_by_rank():
    assert spawn(lambda comm: comm.allgather(10 * comm.rank), 3) == [[0, 10, 20]] * 3


def test_gather_returns_it_at_root_only():
    assert spawn(lambda comm: comm.gather(comm.rank, root=1), 3) == [None, [0, 1, 2], None]


@pytest.mark.parametrize("root", [0, 2])
def test_bcast_returns_what_root_sent(root):
    assert spawn(lambda comm: comm.bcast(f"from {comm.rank}", root=root), 3) == [f"from {root}"] * 3


def test_allreduce_adds_or_folds_in_the_order_of_ranks():
    assert spawn(lambda comm: comm.allreduce(comm.rank + 1), 4) == [10] * 4
    assert spawn(lambda comm: comm.allreduce([comm.rank], operator.add), 3) == [[0, 1, 2]] * 3


def test_no_rank_leaves_a_barrier_before_all_have_come():
    came = []

    def main(comm):
        came.append(comm.rank)
        comm.barrier()
        return len(came)

    for seed in range(5):
        came.clear()
        assert spawn(main, 4, seed=seed) == [4] * 4


def test_consecutive_calls_do_not_mix():
    def main(comm):
        return [comm.allgather((comm.rank, i)) for i in range(5)]

    for seed in range(5):
        for result in spawn(main, 3, seed=seed):
            assert result == [[(rank, i) for rank in range(3)] for i in range(5)]


def test_split_groups_by_color_and_orders_by_key():
    def main(comm):
        part = comm.Split(color=comm.rank % 2, key=-comm.rank)
        return part.rank, part.size, part.allgather(comm.rank)

    assert spawn(main, 4) == [(1, 2, [2, 0]), (1, 2, [3, 1]), (0, 2, [2, 0]), (0, 2, [3, 1])]


def test_split_with_a_negative_color_returns_none():
    def main(comm):
        part = comm.Split(-1 if comm.rank == 0 else 0)
        return None if part is None else part.size

    assert spawn(main, 3) == [None, 2, 2]


def test_a_buffer_on_half_of_the_ranks_works():
    def main(comm):
        buffer = nbep.Buffer(comm.Split(comm.rank // 2), num_nvl_bytes=1024)
        buffer.destroy()
        return buffer.rank, buffer.group_size

    assert spawn(main, 4) == [(0, 2), (1, 2)] * 2


def test_ranks_that_call_different_methods_raise():
    def main(comm):
        return comm.barrier() if comm.rank == 0 else comm.bcast(1)

    with pytest.raises(RuntimeError, match=r"rank \d calls (barrier|bcast from 0) while rank \d called"):
        spawn(main, 2)


@pytest.mark.parametrize(
    ("errors", "kind", "text"),
    [
        ({1: ValueError("odd")}, ValueError, "rank 1: odd"),
        ({0: ValueError("odd"), 2: ValueError("odd")}, ValueError, "ranks 0, 2: odd"),
        ({0: NotImplementedError("low"), 2: ValueError("odd")}, RuntimeError, "rank 0: low; rank 2: odd"),
        ({2: UnicodeDecodeError("utf8", b"x", 0, 1, "bad")}, ValueError, "rank 2: 'utf8' codec can't decode"),
        ({1: KeyError()}, RuntimeError, r"rank 1: KeyError\(\)"),
    ],
    ids=str,
)
def test_what_fails_on_one_rank_fails_on_all_and_names_it(errors, kind, text):
    def main(comm):
        def make():
            if comm.rank in errors:
                raise errors[comm.rank]

        with pytest.raises(kind, match=f"^{text}") as failure:
            gather_results(comm, make)
        assert failure.type is kind
        assert failure.value.__cause__ is errors.get(comm.rank)

    spawn(main, 3)


def test_what_fails_on_no_rank_comes_by_rank():
    assert spawn(lambda comm: gather_results(comm, lambda: comm.rank**2), 3) == [[0, 1, 4]] * 3


def test_a_rank_that_does_not_come_is_named():
    def main(comm):
        if comm.rank != 1:
            comm.barrier()

    with pytest.raises(RuntimeError, match="barrier: rank 1 did not come"):
        spawn(main, 3)


class PollingRuntime:
    """Waits as the hosts of virtual ranks on a GPU do."""

    def check_caller(self, verb):
        """Any thread may: a rank is one."""

    def tell_hosts(self):
        return None

    def wait_until(self, predicate, describe, told=None):
        deadline = time.monotonic() + 600
        while not predicate():
            assert time.monotonic() < deadline, describe()
            time.sleep(0)


def test_no_rank_waits_for_one_whose_function_has_returned():
    """Ranks 2 and 1 meet in a subgroup, in that order; then 1 returns."""
    group = CommGroup(range(3))
    comms = [InProcessComm(group, rank, PollingRuntime()) for rank in range(3)]
    with ThreadPoolExecutor(3) as threads:
        halves = list(threads.map(lambda comm: comm.Split(min(comm.rank, 1), -comm.rank), comms))
        assert list(threads.map(lambda half: half.allgather(half.rank), halves)) == [[0], [0, 1], [0, 1]]
    group.returned.add(1)
    halves[0].barrier()
    for comm in (comms[0], halves[2]):
        with pytest.raises(RuntimeError, match="barrier: rank 1 did not come, and has returned"):
            comm.barrier()


@pytest.mark.parametrize("method", ["bcast", "gather"])
def test_a_root_outside_of_the_group_is_refused(method):
    with pytest.raises(ValueError, match="root: got 2; must be a rank below 2"):
        spawn(lambda comm: getattr(comm, method)(0, root=2), 2)


def test_connect_takes_either_name_but_not_two_communicators():
    def main(comm):
        assert connect(comm, None) == connect(None, comm) == (comm, comm.runtime)
        with pytest.raises(ValueError, match="group: got None"):
            connect(None, None)
        with pytest.raises(ValueError, match="comm: got a communicator besides group"):
            connect(comm, comm.Split())
        with pytest.raises(ValueError, match="group: got int; must be the communicator"):
            connect(4, None)

    spawn(main, 2)


def test_only_mpi4pys_communicators_count_as_mpi():
    class Comm:
        pass

    assert not is_mpi_comm(Comm())
    assert is_mpi_comm(type("Intracomm", (type("Comm", (), {"__module__": "mpi4py.MPI"}),), {})())
