"""Kernels broken on purpose are caught: the tests of this folder, the emulator's checks and its schedules have teeth.

Each test breaks one step by its name, and looks for the damage over a few schedules: wrong results, a wrong report.
That the memory model "checked" finds each step in turn, tests/check/test_table.py asks.
"""

import ast
import importlib
from contextlib import nullcontext

import numpy as np
import pytest
from cases import make_case
from intranode import Options, round_trip, run
from parts import both_parts, crossed, dear
from primitives_of import replace_primitives
from target import MEMORY_MODELS

import nbep
from nbep.device import primitives
from nbep.device.cards import SM80
from nbep.device.kernels.intranode import dispatch, notify_dispatch
from nbep.device.kernels.parts import header
from nbep.device.primitives import st_relaxed_sys_s32
from nbep.device.protocols import waits
from nbep.lab.check import broken
from nbep.lab.check.faults import edited

pytestmark = pytest.mark.emulator_only("the kernels are broken in Python")

DISPATCH_TAIL = "teams.publish_tail: release of dispatch-tail"
COMBINE_TAIL = "intranode.combine.send_tokens: release of combine-tail"
BARRIER = "barrier.meet_by_adding: release of barrier-signal"


def without_bulk_copies(comm, case, options):
    """Rows travel by loads and stores of the lanes, as on cards before sm_90."""
    comm.runtime.world.compute_capability = SM80
    return round_trip(comm, case, options)


def is_caught(memory_model: str, options: Options, seeds=range(40), fn=round_trip) -> bool:
    """Whether one of the schedules ends in wrong results or in an error of the emulator."""
    case = make_case(1, num_tokens=16, num_topk=2, routing="everywhere")
    for seed in seeds:
        try:
            run(case, options, fn=fn, seed=seed, memory_model=memory_model)
        except (AssertionError, nbep.EmulatorError):
            return True
    return False


@dear
@pytest.mark.parametrize("memory_model", MEMORY_MODELS)
@pytest.mark.parametrize("warps_per_rank", both_parts([2], thorough=[1]))
@pytest.mark.parametrize("seeds", both_parts([range(1)], thorough=[range(1, 4)]))
@pytest.mark.parametrize("fn", [round_trip, without_bulk_copies])
def test_unbroken_kernels_are_not_caught(memory_model, warps_per_rank, fn, seeds):
    options = Options(nbep.Config(2, 2, 5, num_threads=64 * warps_per_rank))
    assert not is_caught(memory_model, options, seeds, fn)


@pytest.mark.parametrize("fn", [round_trip, without_bulk_copies])
@pytest.mark.parametrize("fault", [DISPATCH_TAIL, COMBINE_TAIL, pytest.param(BARRIER, marks=pytest.mark.thorough)])
def test_relaxed_tail_is_caught_if_stores_may_be_late(fault, fn):
    with broken(fault):
        assert is_caught("delayed", Options(nbep.Config(2, 2, 5)), fn=fn)


@dear
@pytest.mark.parametrize(
    "fault",
    [
        pytest.param("barrier.wait_call: acquire of barrier-signal", marks=pytest.mark.thorough),
        "teams.wait_tail_past: acquire of dispatch-tail",
        "intranode.combine.coordinate: acquire of combine-tail",
        "intranode.combine.coordinate: release of combine-shared-tail",
        "intranode.combine.wait_shared_tail_past: acquire of combine-shared-tail",
    ],
)
def test_a_missing_acquire_goes_wrong_if_loads_may_be_early(fault):
    with broken(fault):
        assert is_caught("delayed", Options(nbep.Config(2, 4, 9, num_threads=128)), range(20))


@pytest.mark.parametrize("weaker", ["st_weak_s32", "st_relaxed_gpu_s32"])
def test_a_count_that_the_cpu_polls_and_that_need_not_reach_it_is_a_data_race(weaker, monkeypatch):
    replace_primitives(monkeypatch, notify_dispatch, st_relaxed_sys_s32=getattr(primitives, weaker))
    case = make_case(1, num_tokens=16, num_topk=2, routing="everywhere")
    with pytest.raises(nbep.DataRace, match=r"the CPU polls (4 bytes(.|\n)*)?`fault report and counters` of rank"):
        run(case, memory_model="checked")


def reported_fault(memory_model, seed):
    """The report of a rank whose peer does not dispatch, as its CPU reads it while the kernel still runs."""

    def main(comm):
        buffer = nbep.Buffer(comm, num_nvl_bytes=1 << 16)
        layout = buffer.get_dispatch_layout(np.zeros((3, 1), np.int64), num_experts=4)[:4]
        report = None
        if comm.rank == 0:
            names = ("num_tokens_per_rank", None, "num_tokens_per_expert", "is_token_in_rank")
            counts = {name: count for name, count in zip(names, layout, strict=True) if name}
            with pytest.raises(nbep.PeerTimeout) as caught:
                buffer.dispatch(np.zeros((3, 64), nbep.reference.BF16), **counts)
            report = caught.value.report
        buffer.destroy()
        return report

    return nbep.spawn(main, 2, target="emulator", seed=seed, memory_model=memory_model, on_deadlock="expire")[0]


def status_before_words(function):
    """Let report_fault store the status first."""
    branch = function.body[-1]
    assert isinstance(branch, ast.If)
    assert "st_release" in ast.unparse(branch.body[-1])
    branch.body.insert(0, branch.body.pop())


@pytest.mark.parametrize(
    ("how", "memory_model"),
    crossed(
        [("relaxed status", "checked"), ("status first", "delayed")],
        ("unbroken", "relaxed status", "status first"),
        ("delayed", "checked"),
    ),
)
def test_a_fault_report_whose_status_does_not_come_behind_its_words_is_caught(how, memory_model, monkeypatch):
    right = reported_fault("sc", 0)
    if how == "relaxed status":
        replace_primitives(monkeypatch, waits, st_release_sys_s32=st_relaxed_sys_s32)

    def is_wrong(seed):
        try:
            return reported_fault(memory_model, seed) != right
        except nbep.DataRace:
            return True

    num_seeds = 10 if how == "unbroken" else 80
    with edited(waits.report_fault, status_before_words) if how == "status first" else nullcontext():
        assert any(is_wrong(seed) for seed in range(num_seeds)) == (how != "unbroken")


@pytest.mark.parametrize("memory_model", ["delayed", "checked"])
@pytest.mark.parametrize(
    ("module", "coherent", "constant"), [(dispatch, "ld_na_v4", "ld_nc_v4"), (header, "ld_na_s32", "ld_nc_s32")]
)
def test_a_slot_that_is_read_as_constant_is_found_although_the_tail_orders_it(
    module, coherent, constant, memory_model, monkeypatch
):
    replace_primitives(monkeypatch, module, **{coherent: getattr(primitives, constant)})
    case = make_case(1, num_tokens=16, num_topk=2, routing="everywhere")
    options = Options(nbep.Config(2, 20, 40))  # no slot is used twice: the stores all come before the loads
    with pytest.raises(nbep.EmulatorError, match=r"ld\.global\.nc of `nvl_buffer`.* since this kernel began"):
        run(case, options, fn=without_bulk_copies, memory_model=memory_model)


@pytest.mark.parametrize(
    ("fault", "config"),
    [
        pytest.param("teams.publish_tail: tma_store_wait_all", nbep.Config(2, 2, 5), marks=pytest.mark.thorough),
        ("intranode.dispatch.send_tokens: wait for head", nbep.Config(2, 2, 5)),
        ("intranode.combine.send_tokens: wait for head", nbep.Config(2, 2, 5)),
        ("teams.publish_tail: bar_red_and", nbep.Config(2, 4, 9, num_threads=128)),
        ("intranode.combine.send_tokens: bar_red_and", nbep.Config(2, 4, 9, num_threads=256)),
    ],
)
def test_slots_that_are_taken_or_given_too_early_make_results_wrong(fault, config):
    with broken(fault):
        assert is_caught("sc", Options(config))


def test_ranks_added_in_another_order_are_caught(monkeypatch):
    module = importlib.import_module("nbep.device.kernels.parts.sums")
    load_rows = module.load_rows

    def rotated(*arguments):
        first, *others = load_rows(*arguments)
        return *others, first

    monkeypatch.setattr(module, "load_rows", rotated)
    case = make_case(2, num_ranks=4, num_tokens=5, hidden=64, num_topk=4, routing="everywhere", unused=0)
    with pytest.raises(AssertionError, match="combined_x"):
        run(case)


def test_failure_names_seed_and_provenance(monkeypatch):
    module = importlib.import_module("nbep.device.kernels.parts.header")
    replace_primitives(monkeypatch, module, ld_na_f32=lambda address: primitives.ld_na_f32(address) + primitives.f32(1))
    case = make_case(3, num_tokens=2, num_topk=1, experts_per_rank=1, routing="everywhere")
    with pytest.raises(
        AssertionError, match=r"inputs 3, schedule 4, rank 0, recv_topk_weights(.|\n)*row 0 \(r0t0 -> r0e0\)"
    ):
        run(case, seed=4)
