"""Every kernel compiles for every architecture, fits its registers, and does with memory what its ledger says."""

import importlib
import json
import re
import subprocess
import sys
from types import ModuleType

import pytest
from parts import both_parts
from processes import LIMIT_S, once_per_run

from nbep.device.cards import CARDS, SM90, has_bulk_copies
from nbep.device.compile import arch_name, load_kernels, loads_in_flight, parse_arch, with_variants
from nbep.device.jit import FUNCTIONS_BY_TYPE, PRIMITIVES
from nbep.device.kernels.intranode.combine import MAX_RANKS
from nbep.device.kernels.intranode.dispatch import dispatch_smem_bytes
from nbep.device.kernels.low_latency import combine as low_latency_combine
from nbep.device.kernels.low_latency import dispatch as low_latency_dispatch
from nbep.device.layout.low_latency import shape_of
from nbep.device.protocols.copies import UNROLL

KERNELS = with_variants(load_kernels().values())
MODULES = {name: spec.function.__module__ for name, spec in KERNELS.items()}
KINDS = ("_u8", "_u16", "_s32", "_u32", "_s64", "_u64", "_f32", "_v2", "_v4")
IBGDA = "-IbgdaNetwork"
LEDGER_MODULES = ("nbep.device.kernels", "nbep.device.protocols", "nbep.device.network")
LEDGER_WORD = re.compile(r"\b(?:ld|st|atom|fence)_[a-z_]+[a-z]\b")


# Bytes that are spilled in stores and in loads, and of the stack frame, where no GPU was at hand to make it better.
# They are ceilings: from one run of the compiler to the next they differ by a word or two.
SPILLED = {
    ("internode_dispatch-IbgdaNetwork", "sm_90"): (8, 8, 8),
    ("internode_dispatch", "sm_75"): (8, 8, 8),
    ("internode_dispatch-IbgdaNetwork", "sm_75"): (72, 80, 64),
    ("internode_combine-IbgdaNetwork", "sm_75"): (56, 36, 40),
    ("internode_combine-704-IbgdaNetwork", "sm_75"): (56, 36, 40),
    ("internode_dispatch", "sm_80"): (24, 24, 16),
    ("internode_dispatch-IbgdaNetwork", "sm_80"): (112, 128, 80),
    ("internode_combine-IbgdaNetwork", "sm_80"): (80, 64, 64),
    ("internode_combine-704-IbgdaNetwork", "sm_80"): (80, 64, 64),
    # Between 19 or 20 nodes a block of combine has 22 warps, and so 80 registers a thread.
    ("internode_combine-704", "sm_90"): (56, 48, 40),
    ("internode_combine-704-IbgdaNetwork", "sm_90"): (56, 32, 40),
    ("internode_combine-704", "sm_100"): (8, 8, 8),
    ("internode_combine-704-IbgdaNetwork", "sm_100"): (8, 8, 8),
}


LIKE_ANOTHER = ("sm_86", "sm_89")  # sm_80 in all but size and FP8: the kernels with queue pairs are left out
# The short part compiles the smallest one with waits for peers and payload.
INSIDE_A_NODE = "sm_90, inside a node"
SHORT = ["push"]
# Of the oldest card the thorough part in CI compiles what converts to FP8 and to BF16, which the card cannot.
STAND_INS = "sm_75, conversions"
CONVERSIONS = ["per_token_cast_back", "per_token_cast_to_fp8"]


def room_of(name: str) -> str:
    """What is compiled together for sm_90: each quarter of the thorough part (`--quarter`) has one room."""
    if IBGDA in name or name == "software_nic" or name.endswith("mask_buffer"):
        return "sm_90, queue pairs"
    modes = {"internode": "sm_90, between nodes", "low_latency": "sm_90, low latency"}
    return next((room for mode, room in modes.items() if name.startswith(mode)), "sm_90, all others")


ROOMS = sorted({room_of(name) for name in KERNELS})
OTHER_ARCHES = [arch_name(cc) for cc in CARDS if cc != SM90]


@pytest.fixture(scope="module", params=both_parts([INSIDE_A_NODE], thorough=[*ROOMS, STAND_INS], long=OTHER_ARCHES))
def reports(request, tmp_path_factory):
    """Kernel name -> the compiler's report for one architecture, with the PTX. One process compiles for one of them."""
    arch = request.param.partition(",")[0]
    names = {INSIDE_A_NODE: SHORT, STAND_INS: CONVERSIONS}.get(request.param, sorted(KERNELS))
    if request.param in ROOMS:
        names = [name for name in names if room_of(name) == request.param]
    elif arch in LIKE_ANOTHER:
        names = [name for name in names if not name.endswith(IBGDA)]

    def compile_all():
        folder = tmp_path_factory.mktemp(arch)
        command = [sys.executable, "-m", "nbep.device.compile", "--arch", arch, "--json", "--ptx", str(folder)]
        command += [word for name in names for word in ("--kernel", name)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
        assert done.returncode == 0, done.stderr
        rows = {row["kernel"]: row for row in json.loads(done.stdout)}
        for name, row in rows.items():
            row["ptx"] = (folder / f"{name}.{arch}.ptx").read_text()
        return json.dumps(rows)

    rows = json.loads(once_per_run(tmp_path_factory, f"kernels for {request.param}", compile_all))
    assert sorted(rows) == names
    return rows


def family(primitive: str) -> str:
    """A primitive's name without the kind that it moves: st_release_sys_s32 -> st_release_sys."""
    return next((primitive.removesuffix(kind) for kind in KINDS if primitive.endswith(kind)), primitive)


def mnemonic(primitive: str) -> str:
    """The instruction that a primitive compiles to, without operands."""
    return PRIMITIVES[primitive].ptx.split()[0].rstrip(";")


def ledgers(name: str) -> str:
    """The docstrings of a kernel's module, and of the protocols and the network that it uses, also through others."""
    spec = KERNELS[name]
    pending = [MODULES[name]]
    for kind in (spec.hints.get("network"), spec.hints.get("peers")):  # who has the versions for them
        pending += {each.versions[kind].__module__ for each in FUNCTIONS_BY_TYPE if kind in each.versions}
    if "DeduplicatedShape" in name:
        pending.append(f"nbep.device.kernels.low_latency.deduplicated_{spec.name.removeprefix('low_latency_')}")
    if "ComparedCall" in name:
        pending.append("nbep.device.kernels.low_latency.calls")
    seen: dict[str, str] = {}
    while pending:
        module = importlib.import_module(pending.pop())
        if module.__name__ not in seen:
            seen[module.__name__] = module.__doc__ or ""
            owners = {getattr(value, "__module__", None) for value in vars(module).values()}
            owners |= {value.__name__ for value in vars(module).values() if isinstance(value, ModuleType)}
            pending += [o for o in owners if o and o.startswith(LEDGER_MODULES)]
    return "\n".join(seen.values())


def test_kernels_compile(reports):
    assert all(row["cubin_bytes"] > 0 for row in reports.values())


def test_no_kernel_spills_or_has_a_stack_frame(reports):
    for name, row in reports.items():
        spilled = SPILLED.get((name, row["arch"]), (0, 0, 0))
        seen = (row["spill_stores"], row["spill_loads"], row["stack_frame"])
        assert all(here <= most for here, most in zip(seen, spilled, strict=True)), (name, seen)
        assert (row["local_bytes"], row["calls"]) == (0, 0), name


def test_payload_moves_in_bulk_copies_or_16_byte_accesses(reports):
    """dispatch leaves its rows to the copy engine where there is one; combine adds rows up, so it loads them itself."""
    if "dispatch" not in reports:
        pytest.skip("no dispatch in this part")
    has_engine = has_bulk_copies(parse_arch(reports["dispatch"]["arch"]))
    assert has_engine == any(each.startswith("cp.async.bulk.") for each in reports["dispatch"]["ordered"])
    for name in ("combine",) if has_engine else ("combine", "dispatch"):
        assert reports[name]["loads_16_bytes"] >= 8, name
        assert reports[name]["stores_16_bytes"] >= 7, name


def test_warps_have_as_many_loads_in_flight_as_their_code_says(reports):
    """Senders copy UNROLL vectors at once; receivers of combine load MAX_RANKS rows, or HALF as many at two places."""
    if "combine" not in reports:
        pytest.skip("no combine in this part")
    runs = {name: row["loads_in_flight"] for name, row in reports.items()}
    if runs["combine"] is None:
        pytest.skip("no nvdisasm here")
    assert max(runs["push"]) == UNROLL
    if reports["combine"]["arch"] in ("sm_75", "sm_100", "sm_120"):  # ptxas has other ideas there
        assert runs["combine"].count(MAX_RANKS) >= 2, runs
        return
    assert sorted(runs["combine"])[-3:] == [UNROLL, MAX_RANKS, MAX_RANKS], runs
    if not has_bulk_copies(parse_arch(reports["combine"]["arch"])):
        assert max(runs["dispatch"]) == UNROLL, runs


def test_ptx_holds_what_the_ledger_names(reports):
    """Each access that a kernel's own ledger names is in its PTX or in that of another kernel of the file."""
    for name, row in reports.items():
        nic = reports["software_nic"]["ptx"] if name.endswith(IBGDA) or name == "software_nic" else ""
        has_engine = has_bulk_copies(parse_arch(row["arch"]))
        ledger = "\n".join(line for line in own_ledger(name).splitlines() if is_of_card(line, has_engine))
        others = [o for o in reports if MODULES[o] == MODULES[name] and KERNELS[o].name != KERNELS[name].name]
        ptx = row["ptx"] + nic + "".join(reports[other]["ptx"] for other in others)
        check_words(name, set(LEDGER_WORD.findall(ledger)), ptx)


def is_of_card(line, has_engine):
    """Whether a line of a ledger holds on a card with a copy engine, or without: some cells are only for one."""
    return "no copy engine" not in line if has_engine else "no copy engine" in line or "copy engine" not in line


def own_ledger(name):
    """That of the kernel's module or, if it names no access, of the files that it names instead, or of its roles."""
    module = importlib.import_module(MODULES[name])
    if LEDGER_WORD.search(module.__doc__):
        return module.__doc__
    modules = {each.__module__ for each in vars(module).values() if callable(each)}
    named = {each for each in modules if f"see {each.rpartition('.')[2]}.py" in module.__doc__}
    roles = {each for each in modules if each.startswith(f"{module.__package__}.")}
    return "".join(map(doc_of, sorted(named or roles)))


def doc_of(module):
    return importlib.import_module(module).__doc__


def check_words(name: str, words: set[str], ptx: str) -> None:
    """Each primitive that a ledger names is in the PTX of a kernel."""
    assert words
    for word in words:
        members = [p for p in PRIMITIVES if p == word or family(p) == word or family(p) == f"{word}_shared"]
        assert members, f"{name}: the ledger names {word}, which is no primitive"
        found = any(re.search(rf"{re.escape(mnemonic(p))}\b", ptx) for p in members if PRIMITIVES[p].ptx)
        assert found, f"{name}: the ledger names {word}, the PTX has none of {members}"


@pytest.mark.parametrize("module", ["entry", "queue_pair", "completion", "transport"])
def test_ptx_holds_what_the_ledgers_of_the_queue_pairs_name(reports, module):
    names = [name for name in reports if name.startswith("low_latency_") and name.endswith(IBGDA)]
    if not names:
        pytest.skip("no kernels of the low-latency mode in this part")
    for name in names:
        words = set(LEDGER_WORD.findall(doc_of(f"nbep.device.network.ibgda.{module}")))
        check_words(name, words, reports[name]["ptx"] + reports["software_nic"]["ptx"])


def test_ledger_names_every_ordered_access_of_the_ptx(reports):
    by_mnemonic: dict[str, set[str]] = {}
    for primitive, spec in PRIMITIVES.items():
        if spec.ptx:
            by_mnemonic.setdefault(mnemonic(primitive), set()).add(family(primitive).replace("_shared", ""))
    for name, row in reports.items():
        for instruction in row["ordered"]:
            if instruction.startswith(("ld.", "st.", "atom.")):
                families = by_mnemonic[instruction]
                assert any(word in ledgers(name) for word in families), (name, instruction, families)


def test_dispatch_without_bulk_copies_asks_for_little_shared_memory():
    """An A100 gives a block at most 163 KiB, and stages of 24 warps take 192."""
    assert dispatch_smem_bytes(768, has_tma=False) <= 48 << 10
    assert dispatch_smem_bytes(768, has_tma=True) <= 227 << 10


def test_low_latency_blocks_fit_into_the_shared_memory_of_an_a100():
    shape = shape_of(8, 288, 128, 7168, 8, 0, 1, 0)
    assert low_latency_dispatch.dispatch_smem_bytes(shape, 768, has_tma=False) <= 163 << 10
    assert low_latency_combine.combine_smem_bytes(shape, 512) <= 163 << 10


def test_a_run_of_loads_ends_where_one_of_them_is_used():
    lines = (
        "@P0 LDG.E.NA.128.CONSTANT R0, desc[UR4][R28.64+0x200]",
        "LDG.E.NA.128 R36, desc[UR4][R28.64]",
        "IADD3 R3, P0, R7, R54, RZ",
        "R2UR UR8, R7",  # whose name is that of no register
        "STG.E.NA.128 desc[UR4][R52.64], R36",  # waits for the second load
        "@P3 LDG.E.NA.128 R4, desc[UR4][R28.64]",
        "LDG.E R12, desc[UR4][R28.64]",  # 4 bytes
        "FADD R1, RZ, R7",  # the last of the third load's registers
        "LDG.E.128 R12, desc[UR4][R28.64]",
    )
    text = "\n".join(f"        /*{16 * i:04x}*/    {line} ;" for i, line in enumerate(lines))
    assert loads_in_flight(text) == [2, 1, 1]
