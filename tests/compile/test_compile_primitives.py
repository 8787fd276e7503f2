"""Every primitive compiles, for each architecture, to the instruction that its name promises."""

import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from parts import both_parts
from primitive_promises import promise_of
from processes import LIMIT_S, once_per_run

from nbep.device import primitives
from nbep.device.cards import CARDS, SM75, SM90
from nbep.device.compile import arch_name
from nbep.device.jit import PRIMITIVES

ROOT = Path(__file__).parents[2]
OTHERS = [arch_name(cc) for cc in CARDS if cc not in (SM75, SM90)]
ARCHES = both_parts(["sm_90"], thorough=[arch_name(SM75)], long=OTHERS)
COMPILED = [name for name in primitives.__all__ if name in PRIMITIVES and name != "has_tma"]

pytestmark = pytest.mark.compile


@pytest.fixture(scope="module")
def probe(tmp_path_factory):
    """Architecture -> what tests/support/primitive_probe.py prints for it."""
    pytest.importorskip("numba_cuda")

    def run_program(arch):
        command = [sys.executable, ROOT / "tests/support/primitive_probe.py", arch]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=LIMIT_S)
        assert done.returncode == 0, done.stderr
        return done.stdout

    @cache
    def probe_for(arch):
        return json.loads(once_per_run(tmp_path_factory, f"primitives for {arch}", lambda: run_program(arch)))

    return probe_for


@pytest.fixture(scope="module")
def instructions_of(probe):
    """Architecture -> primitive -> the PTX between its mark and the next."""

    @cache
    def instructions_for(arch):
        sections = re.split(r"// probe (\w+)\n", probe(arch)["everything"])
        return dict(zip(sections[1::2], sections[2::2], strict=True))

    return instructions_for


def is_in_order(parts: tuple[str, ...], text: str) -> bool:
    return re.search(".*".join(map(re.escape, parts)), text, re.DOTALL) is not None


def test_every_public_primitive_is_compiled(instructions_of):
    assert set(COMPILED) == set(instructions_of("sm_90"))


@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.parametrize("arch", both_parts(["sm_90"], thorough=[], long=["sm_100", "sm_120"]))
def test_primitive_is_the_instruction_its_name_promises(instructions_of, arch, name):
    promised = promise_of(name).ptx
    assert is_in_order(promised, instructions_of(arch)[name]), f"{promised} not in\n{instructions_of(arch)[name]}"


@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.parametrize("cc", both_parts([], thorough=[(SM75,)], long=[(cc,) for cc in CARDS if SM75 < cc < SM90]))
def test_primitive_on_an_older_card_is_the_same_instruction_or_a_stand_in(instructions_of, name, cc):
    spec, ptx = PRIMITIVES[name], instructions_of(arch_name(cc))[name]
    if spec.since <= cc:
        assert is_in_order(promise_of(name).ptx, ptx)
    elif spec.below is None:
        assert "trap;" in ptx
    else:
        assert not is_in_order(promise_of(name).ptx, ptx)
        assert "trap;" not in ptx


@pytest.mark.parametrize("arch", ARCHES)
def test_target_is_the_plain_architecture(probe, arch):
    assert re.search(rf"^\.target {arch}$", probe(arch)["everything"], re.MULTILINE)


@pytest.mark.parametrize("arch", ARCHES)
def test_primitives_are_inlined_without_stack_or_doubles(probe, arch):
    ptx, report = probe(arch)["everything"], probe(arch)["report"]
    assert ".local" not in ptx
    assert "call" not in ptx
    assert ".f64" not in ptx
    assert report["stack_frame"] == 0
    assert report["spill_stores"] == report["spill_loads"] == 0
    assert 0 < report["registers"] <= 255


@pytest.mark.parametrize(
    ("arch", "kept", "dropped"),
    both_parts(
        [("sm_90", 1111, 2222)], thorough=[("sm_75", 2222, 1111)], long=[("sm_80", 2222, 1111), ("sm_120", 2222, 1111)]
    ),
)
def test_has_tma_drops_the_other_branch(probe, arch, kept, dropped):
    ptx = probe(arch)["branch"]
    assert str(kept) in ptx
    assert str(dropped) not in ptx


@pytest.mark.parametrize("arch", ARCHES)
def test_arithmetic_on_words_stays_integer(probe, arch):
    assert not re.search(r"\.f(32|64)", probe(arch)["words"])


@pytest.mark.parametrize("what", ["float64 for float32", "float for an integer", "float for an address"])
def test_argument_of_another_kind_is_refused(probe, what):
    assert "needs" in probe("sm_90")["refused"][what]


@pytest.mark.parametrize("what", ["two words for four", "floats for words"])
def test_tuple_of_another_shape_is_refused(probe, what):
    assert "needs a tuple of" in probe("sm_90")["refused"][what]


def test_second_architecture_in_one_process_is_refused(probe):
    assert "in another process" in probe("sm_90")["other_arch"]


@pytest.mark.parametrize("arch", ARCHES)
def test_kernel_has_its_own_name_its_leaves_and_its_bounds(probe, arch):
    result = probe(arch)
    assert ".visible .entry grouped(" in result["grouped"]
    assert result["grouped_params"] == ["arrays.x", "arrays.y", "sizes.rows", "sizes.columns", "scale"]
    assert re.findall(r"\.param \.(\w+) grouped_param", result["grouped"]) == ["u64", "u64", "u32", "u32", "f32"]
    assert ".maxntid 128" in result["grouped"]
    assert ".minnctapersm 2" in result["grouped"]
    assert result["grouped_elf"] == b"\x7fELF".hex()
    assert result["grouped_report"]["registers"] > 0


def test_local_memory_and_spills_are_reported():
    from nbep.device.compile import assemble, count_instructions

    pytest.importorskip("cuda.bindings.nvjitlink")
    ptx = """.version 9.1
.target sm_90
.address_size 64
.visible .entry spill(.param .u64 p)
{
    .local .align 4 .b8 stack[4096];
    .reg .b64 %rd<4>;
    .reg .b32 %r<2>;
    ld.param.u64 %rd1, [p];
    mov.u64 %rd2, stack;
    add.s64 %rd2, %rd2, %rd1;
    st.volatile.local.u32 [%rd2], 7;
    ld.volatile.local.u32 %r1, [%rd2];
    st.release.sys.global.u32 [%rd1], %r1;
    ret;
}
"""
    _, report = assemble(ptx, (9, 0), "spill")
    assert report.stack_frame >= 4096
    counts = count_instructions(ptx)
    assert counts["local_bytes"] == 4096
    assert counts["ordered"] == {"ld.volatile.local.u32": 1, "st.release.sys.global.u32": 1, "st.volatile.local.u32": 1}


def test_refused_ptx_names_kernel_and_reason():
    from nbep.device.compile import CompileError, assemble

    pytest.importorskip("cuda.bindings.nvjitlink")
    with pytest.raises(CompileError, match="broken for sm_90"):
        assemble(".version 8.0\n.target sm_90\n.address_size 64\nnonsense", (9, 0), "broken")
