"""What is here, what of nbep would run on it, and what not and why.

    nbep info [--json [FILE.json]]
    mpiexec -n 4 nbep info --hosts

Without --hosts nothing is started: no kernel runs, and neither MPI nor NVSHMEM is set up. With it, the ranks that
mpiexec or torchrun has started exchange a token each with each other: see nbep.info_hosts.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nbep.device.cards import LOWEST_CC, ComputeCapability, max_smem_bytes, stand_ins
from nbep.device.compile import arch_name
from nbep.device.extras import install_line
from nbep.device.network.nvshmem_library import PACKAGE, why_too_old
from nbep.device.terminal import STDOUT, add_json, write_json
from nbep.host.target.resolve import why_no_gpu
from nbep.version import __version__

PACKAGES = (
    "numpy", "numba", "numba-cuda", "cuda-bindings", "mpi4py", "mpich", "nvshmem4py-cu13", "nvidia-nvshmem-cu13",
    "torch", "cupy-cuda12x", "cupy-cuda13x",
)  # fmt: skip
NICS = Path("/sys/class/infiniband")
COMPILERS = ("numba-cuda", "cuda-bindings")
NVSHMEM = ("nvshmem4py-cu13", PACKAGE)
NVLINK, PCIE = "NVLink", "PCIe"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="nbep info", description=__doc__.partition("\n")[0])
    add_json(parser)
    parser.add_argument(
        "--hosts",
        action="store_true",
        help="under mpiexec or torchrun: which rank is where",
    )
    options = parser.parse_args(argv)
    if options.hosts:
        from nbep import info_hosts

        return info_hosts.main(options.json)
    found = look()
    write_json(options.json, found)
    if options.json != STDOUT:
        print("\n".join(lines_of(found)))
    return 0


def look() -> dict[str, Any]:
    """All that the command prints."""
    no_gpu = why_no_gpu()
    gpus = [] if no_gpu is not None else look_at_gpus()
    mpi = look_at_mpi()
    nics = sorted(path.name for path in NICS.iterdir()) if NICS.is_dir() else []
    packages = {name: found for name in PACKAGES if (found := installed(name)) is not None}
    return {
        "nbep": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": packages,
        "driver": None if no_gpu is not None else driver_version(),
        "gpus": gpus,
        "no_gpu": no_gpu,
        "mpi": mpi,
        "nics": nics,
        "cache": look_at_cache(),
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith("NBEP_")},
        "runs": what_runs(gpus, no_gpu, mpi, nics, packages),
    }


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def driver_version() -> str:
    """The newest CUDA that the driver knows: 13.0."""
    from cuda.bindings import driver as cu

    from nbep.host.target.cuda.driver import check

    number = int(check("cuDriverGetVersion", cu.cuDriverGetVersion()))
    return f"{number // 1000}.{number % 1000 // 10}"


def look_at_gpus() -> list[dict[str, Any]]:
    """The GPUs, without a context on any, and for each how it reaches the memory of others, by their numbers."""
    from cuda.bindings import driver as cu

    from nbep.host.target.cuda.driver import check, num_devices

    names = cu.CUdevice_attribute
    handle_types = {
        "posix_fd": names.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
        "fabric": names.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED,
        "host": names.CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED,
    }
    gpus = []
    for ordinal in range(num_devices()):
        device = check("cuDeviceGet", cu.cuDeviceGet(ordinal))

        def attribute(name: Any, device: Any = device) -> int:
            return int(check("cuDeviceGetAttribute", cu.cuDeviceGetAttribute(name, device)))

        reaches = {}
        for other in range(num_devices()):
            peer = check("cuDeviceGet", cu.cuDeviceGet(other))
            if other != ordinal and check("cuDeviceCanAccessPeer", cu.cuDeviceCanAccessPeer(device, peer)):
                atomics = cu.CUdevice_P2PAttribute.CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
                has_atomics = check("cuDeviceGetP2PAttribute", cu.cuDeviceGetP2PAttribute(atomics, device, peer))
                reaches[str(other)] = NVLINK if has_atomics else PCIE  # only NVLink carries atomics
        major = attribute(names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)
        minor = attribute(names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)
        gpus.append(
            {
                "name": check("cuDeviceGetName", cu.cuDeviceGetName(80, device)).partition(b"\0")[0].decode(),
                "compute_capability": [major, minor],
                "sms": attribute(names.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT),
                "memory_gib": round(int(check("cuDeviceTotalMem", cu.cuDeviceTotalMem(device))) / 2**30, 1),
                "bus_id": check("cuDeviceGetPCIBusId", cu.cuDeviceGetPCIBusId(20, device)).partition(b"\0")[0].decode(),
                "handle_types": ["ipc", *(name for name, flag in handle_types.items() if attribute(flag))],
                "reaches": reaches,
            }
        )
    return gpus


def look_at_mpi() -> dict[str, Any]:
    """MPI's library, which another process loads, and the command that starts processes."""
    mpiexec = shutil.which("mpiexec") or shutil.which("mpirun")
    if find_spec("mpi4py") is None:
        return {"library": None, "mpiexec": mpiexec, "missing": f"mpi4py is not installed: {install_line('mpi')}"}
    program = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    if done.returncode != 0:
        why = done.stderr.strip().rpartition("\n")[2]
        return {"library": None, "mpiexec": mpiexec, "missing": f"mpi4py finds no MPI: {why}"}
    library = " ".join(done.stdout.partition("\n")[0].replace("\0", "").split())
    missing = None if mpiexec else f"neither mpiexec nor mpirun is on the PATH: {install_line('mpi')} brings MPICH's"
    return {"library": library, "mpiexec": mpiexec, "missing": missing}


def look_at_cache() -> dict[str, Any]:
    """Compiled kernels that are kept on disk."""
    try:
        from nbep.device.cache import cache_folder, why_not_used
    except ImportError:
        return {"folder": None, "kernels": 0, "bytes": 0, "not_used": None}
    folder = cache_folder()
    kept = list(folder.glob("*.cubin")) if folder.is_dir() else []
    num_bytes = sum(path.lstat().st_size for path in kept)
    return {"folder": str(folder), "kernels": len(kept), "bytes": num_bytes, "not_used": why_not_used(folder)}


def what_runs(
    gpus: list[dict[str, Any]], no_gpu: str | None, mpi: dict[str, Any], nics: list[str], packages: dict[str, str]
) -> dict[str, str]:
    """What nbep can do here: "yes", or why not."""
    compilers = [name for name in COMPILERS if name not in packages]
    compiling = f"{compilers[0]} is not installed: {install_line('cuda')}" if compilers else None
    old = [i for i, gpu in enumerate(gpus) if tuple(gpu["compute_capability"]) < LOWEST_CC]
    gpu = no_gpu_here(no_gpu) if no_gpu else f"GPU {old[0]} is older than {arch_name(LOWEST_CC)}" if old else compiling
    many = gpu or (None if len(gpus) > 1 else "there is one GPU")
    mapped = many or why_not_mapped(gpus)
    no_host = [i for i, given in enumerate(gpus) if "host" not in given["handle_types"]]
    on_host = many or (f"GPU {no_host[0]} cannot map memory of the host" if no_host else None)
    torch = None if "torch" in packages else f"torch is not installed: {install_line('torch')}"
    is_nvshmem = set(NVSHMEM) <= packages.keys()
    why = why_too_old(packages[PACKAGE]) if is_nvshmem else "NVSHMEM is not installed"
    nvshmem = gpu or (why and f"{why}: {install_line('nvshmem')}")
    nic = nvshmem or (None if any(name.startswith("mlx5") for name in nics) else f"there is no mlx5 NIC in {NICS}")
    reasons = {
        "emulator, nbep.spawn": None,
        "emulator, a process for each rank": mpi["missing"],
        "emulator, under torchrun": torch or (None if sys.platform == "linux" else "it takes Linux"),
        "compile kernels": compiling,
        "one GPU, virtual ranks": gpu,
        "a GPU for each rank, under mpiexec": mapped or mpi["missing"],
        "a GPU for each rank, under torchrun": mapped or torch,
        'a GPU for each rank, handle_type="host"': on_host or (mpi["missing"] and torch),
        "transport direct": None,
        "transport ibgda, software NIC": None,
        "transport ibgda, a real NIC": nic,
        "transport nvshmem": nvshmem,
    }
    return {what: reason or "yes" for what, reason in reasons.items()}


def no_gpu_here(reason: str) -> str:
    """What is said for each thing that needs a GPU; the driver's own words come once."""
    return reason if "pip install" in reason else "no GPU"


def why_not_mapped(gpus: list[dict[str, Any]]) -> str | None:
    """Why kernels cannot use the memory of all GPUs."""
    pairs = [(i, j, gpus[i]["reaches"].get(str(j))) for i in range(len(gpus)) for j in range(len(gpus)) if i != j]
    for i, j, how in pairs:
        if how is None:
            return f"GPU {i} cannot reach GPU {j}: no peer access"
    for i, j, how in pairs:
        if how != NVLINK:
            return f"untried: GPU {i} reaches GPU {j} over {how}, without the atomics that barriers use"
    return None


def words_of_card(cc: ComputeCapability) -> str:
    """What kernels of nbep have on a card, and what stands in for what they lack."""
    if cc < LOWEST_CC:
        return f"too old: the lowest is {arch_name(LOWEST_CC)}"
    lacks = stand_ins(cc)
    return f"{max_smem_bytes(cc) >> 10} KiB of shared memory a block; {', '.join(lacks) or 'bulk copies'}"


def table_of_links(gpus: list[dict[str, Any]]) -> list[str]:
    """How each GPU, a line, reaches each other, a column."""
    names = [f"GPU {number}" for number in range(len(gpus))]
    rows = [["reaches", *names]]
    for number, gpu in enumerate(gpus):
        cells = ["-" if number == other else gpu["reaches"].get(str(other), "not") for other in range(len(gpus))]
        rows.append([names[number], *cells])
    return ["  " + "".join(f"{cell:8}" for cell in row).rstrip() for row in rows]


def lines_of(found: dict[str, Any]) -> list[str]:
    """The same for people."""
    packages = ", ".join(f"{name} {number}" for name, number in found["packages"].items())
    lines = [f"nbep {found['nbep']}, Python {found['python']}, {found['platform']}", f"packages: {packages}"]
    if found["no_gpu"] is not None:
        lines.append(f"no GPU: {found['no_gpu']}")
    else:
        lines.append(f"driver: CUDA {found['driver']}")
    for number, gpu in enumerate(found["gpus"]):
        major, minor = gpu["compute_capability"]
        lines.append(
            f"GPU {number}: {gpu['name']}, sm_{major}{minor}, {gpu['sms']} SMs, {gpu['memory_gib']} GiB, "
            f"{gpu['bus_id']}; handle types {', '.join(gpu['handle_types'])}"
        )
        lines.append(f"  {words_of_card((major, minor))}")
    if len(found["gpus"]) > 1:
        lines += table_of_links(found["gpus"])
    mpi = found["mpi"]
    lines.append(f"MPI: {mpi['library'] or mpi['missing']}; {mpi['mpiexec'] or 'no mpiexec'}")
    nvshmem = ", ".join(f"{name} {found['packages'][name]}" for name in NVSHMEM if name in found["packages"])
    lines.append(f"NVSHMEM: {nvshmem or 'not installed: ' + install_line('nvshmem')}")
    lines.append(f"NICs: {', '.join(found['nics']) or 'none'}")
    cache = found["cache"]
    if cache["not_used"]:
        lines.append(f"cache: {cache['folder']} is not used: {cache['not_used']}; kernels are compiled anew")
    else:
        lines.append(f"cache: {cache['folder']}, {cache['kernels']} kernels, {cache['bytes'] / 2**20:.1f} MiB")
    lines += [f"{name}={value}" for name, value in found["environment"].items()]
    width = max(map(len, found["runs"]))
    lines += ["", "runs here:"]
    return lines + [f"  {what:{width}}  {answer}" for what, answer in found["runs"].items()]
