"""Kernels broken on purpose where that is no step by its name are caught. For those see tests/check/test_table.py."""

import ast
import importlib
from contextlib import nullcontext

import numpy as np
import pytest
from cases import make_case
from intranode import Options, round_trip, run
from parts import crossed
from primitives_of import replace_primitives

import nbep
from nbep.device import primitives
from nbep.device.cards import SM80
from nbep.device.kernels.intranode import dispatch
from nbep.device.kernels.parts import header
from nbep.device.primitives import st_relaxed_sys_s32
from nbep.device.protocols import waits
from nbep.lab.check.faults import edited

pytestmark = pytest.mark.emulator_only("the kernels are broken in Python")


def without_bulk_copies(comm, case, options):
    """Rows travel by loads and stores of the lanes, as on cards before sm_90."""
    comm.runtime.world.compute_capability = SM80
    return round_trip(comm, case, options)


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
