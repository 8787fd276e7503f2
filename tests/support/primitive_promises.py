"""What the name of a primitive promises: the PTX instruction, and the emulator's call.

The names of memory primitives are read as a grammar, so that a name, its PTX and its Python body cannot disagree.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

KIND = "u8|s32|u32|s64|f32|v2|v4"
ACCESS = re.compile(
    rf"(ld|st)_(?:(acquire|release|relaxed|volatile|nc_keep|nc|na|weak)_)?(?:(sys|gpu|cta)_)?(shared_)?({KIND})"
)
ATOMIC = re.compile(r"atom_(add|exch|cas)_(relaxed|release|acq_rel)_(sys|gpu|cta)_(shared_)?(s32|s64)")


@dataclass(frozen=True)
class Promise:
    """`ptx`: parts of instructions, in order; `method` and `args`: the emulator's call, without address and value."""

    ptx: tuple[str, ...]
    method: str = ""
    args: tuple = ()


def promise_of(name: str) -> Promise:
    access, atomic = ACCESS.fullmatch(name), ATOMIC.fullmatch(name)
    if access:
        return _access_promise(*access.groups())
    if atomic:
        return _atomic_promise(*atomic.groups())
    return OTHERS[name]


def _access_promise(op: str, order: str | None, scope: str | None, shared: str | None, kind: str) -> Promise:
    order = order or "weak"
    space = "shared" if shared else "global"
    ptx_kind = {"v2": "v2.u32", "v4": "v4.u32"}.get(kind, kind)
    if scope is not None:
        ptx = f"{op}.{order}.{scope}.{space}.{ptx_kind}"
    elif order == "nc":
        ptx = f"{op}.{space}.nc.L1::no_allocate.{ptx_kind}"
    elif order == "nc_keep":
        ptx = f"{op}.{space}.nc.{ptx_kind}"
    elif order == "na":
        ptx = f"{op}.{space}.L1::no_allocate.{ptx_kind}"
    elif order == "volatile":
        ptx = f"{op}.volatile.{space}.{ptx_kind}"
    else:
        ptx = f"{op}.{space}.{ptx_kind}"
    method = {"ld": "load", "st": "store"}[op]
    emulated_order = {"na": "weak", "nc_keep": "nc"}.get(order, order)
    if shared:
        return Promise((ptx,), f"{method}_shared", (kind, emulated_order))
    emulated_scope = scope or ("sys" if order == "volatile" else "cta")
    return Promise((ptx,), method, (kind, emulated_order, emulated_scope))


def _atomic_promise(op: str, order: str, scope: str, shared: str | None, kind: str) -> Promise:
    # PTX spells two's-complement 64-bit addition u64, and swaps b32.
    ptx_kind = {"add": {"s32": "s32", "s64": "u64"}[kind], "exch": "b32", "cas": "b32"}[op]
    if shared:
        return Promise((f"atom.{order}.{scope}.shared.{op}.{ptx_kind}",), "atomic_shared", (op, kind, order))
    return Promise((f"atom.{order}.{scope}.global.{op}.{ptx_kind}",), "atomic", (op, kind, order, scope))


OTHERS = {
    "fence_acq_rel_cta": Promise(("fence.acq_rel.cta;",), "fence", ("acq_rel", "cta")),
    "fence_acq_rel_gpu": Promise(("fence.acq_rel.gpu;",), "fence", ("acq_rel", "gpu")),
    "fence_acq_rel_sys": Promise(("fence.acq_rel.sys;",), "fence", ("acq_rel", "sys")),
    "syncthreads": Promise(("bar.sync 0;",)),
    "bar_sync": Promise(("bar.sync %r",)),
    "bar_red_and": Promise(("setp.ne.s32 q", "bar.red.and.pred p, %r", "selp")),
    "bar_arrive": Promise(("bar.arrive %r",)),
    "syncwarp": Promise(("bar.warp.sync %r",)),
    "shfl_idx_s32": Promise(("shfl.sync.idx.b32 %r", ", 31, %r")),
    "shfl_idx_s64": Promise(("shfl.sync.idx.b32 lo, lo", "shfl.sync.idx.b32 hi, hi")),
    "shfl_idx_f32": Promise(("shfl.sync.idx.b32 %", ", 31, %r")),
    "shfl_xor_s32": Promise(("shfl.sync.bfly.b32 %r", ", 31, %r")),
    "shfl_xor_f32": Promise(("shfl.sync.bfly.b32 %", ", 31, %r")),
    "shfl_up_s32": Promise(("shfl.sync.up.b32 %r", ", 0, %r")),
    "shfl_down_s32": Promise(("shfl.sync.down.b32 %r", ", 31, %r")),
    "vote_any": Promise(("vote.sync.any.pred",)),
    "vote_all": Promise(("vote.sync.all.pred",)),
    "vote_ballot": Promise(("vote.sync.ballot.b32",)),
    "match_any_s32": Promise(("match.any.sync.b32",)),
    "thread_idx": Promise(("%tid.x",)),
    "block_idx": Promise(("%ctaid.x",)),
    "grid_dim": Promise(("%nctaid.x",)),
    "block_dim": Promise(("%ntid.x",)),
    "prefetch_l2": Promise(("prefetch.global.L2",)),
    "lane_id": Promise(("%laneid",)),
    "globaltimer": Promise(("mov.u64", "%globaltimer")),
    "clock64": Promise(("mov.u64", "%clock64")),
    "wait_expired": Promise(("%globaltimer", "setp.gt.s64")),
    "trap": Promise(("trap;",)),
    "fault_due": Promise(()),
    "fault_reported": Promise(()),
    "serving": Promise(()),
    "smem_base": Promise(("nbep_dynamic_shared",)),
    "s32": Promise(()),
    "u32": Promise(()),
    "s64": Promise(()),
    "f32": Promise(("cvt.rn.f32.s64",)),
    "u32_div": Promise(("div.u32",)),
    "u32_mod": Promise(("rem.u32",)),
    "byteswap_u32": Promise(("prmt.b32",)),
    "popc_u32": Promise(("popc.b32",)),
    "bfind_u32": Promise(("bfind.u32",)),
    "ffs_u32": Promise(("brev.b32", "bfind.shiftamt.u32")),
    "f32_add_rn": Promise(("add.rn.f32",)),
    "f32_mul_rn": Promise(("mul.rn.f32",)),
    "f32_div_rn": Promise(("div.rn.f32",)),
    "f32_max": Promise(("max.f32",)),
    "f32_abs": Promise(("abs.f32",)),
    "f32_bits_u32": Promise(("mov.b32 %",)),
    "u32_bits_f32": Promise(("mov.b32 %",)),
    "f32_log2_approx": Promise(("lg2.approx.f32",)),
    "f32_exp2_approx": Promise(("ex2.approx.f32",)),
    "f32_floor_u32": Promise(("cvt.rmi.u32.f32",)),
    "bf16x2_to_f32x2": Promise(("shl.b32", "and.b32", "0xffff0000")),
    "f32x2_to_bf16x2": Promise(("cvt.rn.bf16x2.f32",)),
    "f32x4_to_e4m3x4": Promise(("cvt.rn.satfinite.e4m3x2.f32 lo", "cvt.rn.satfinite.e4m3x2.f32 hi")),
    "e4m3x4_to_f32x4": Promise(("cvt.rn.f16x2.e4m3x2", "cvt.f32.f16", "cvt.rn.f16x2.e4m3x2", "cvt.f32.f16")),
    "has_tma": Promise(()),
    "mbarrier_init": Promise(("mbarrier.init.shared::cta.b64",)),
    "mbarrier_arrive": Promise(("mbarrier.arrive.shared::cta.b64",)),
    "mbarrier_arrive_expect_tx": Promise(("mbarrier.arrive.expect_tx.shared::cta.b64",)),
    "mbarrier_try_wait_parity": Promise(("mbarrier.try_wait.parity.shared::cta.b64",)),
    "mbarrier_inval": Promise(("mbarrier.inval.shared::cta.b64",)),
    "fence_mbarrier_init": Promise(("fence.mbarrier_init.release.cluster;",)),
    "fence_proxy_async_shared": Promise(("fence.proxy.async.shared::cta;",)),
    "fence_proxy_async_global": Promise(("fence.proxy.async.global;",)),
    "tma_load_1d": Promise(("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes",)),
    "tma_store_1d": Promise(("cp.async.bulk.global.shared::cta.bulk_group",)),
    "tma_store_commit": Promise(("cp.async.bulk.commit_group;",)),
    "tma_store_wait_read_all": Promise(("cp.async.bulk.wait_group.read 0;",)),
    "tma_store_wait_read_1": Promise(("cp.async.bulk.wait_group.read 1;",)),
    "tma_store_wait_read_3": Promise(("cp.async.bulk.wait_group.read 3;",)),
    "tma_store_wait_read_7": Promise(("cp.async.bulk.wait_group.read 7;",)),
    "tma_store_wait_all": Promise(("cp.async.bulk.wait_group 0;",)),
}
