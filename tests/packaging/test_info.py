"""`nbep info` says what is here, what runs on it, and why the rest does not."""

import json

import pytest
from fake_driver import FakeGpus

from nbep import info
from nbep.cli import main
from nbep.device.extras import install_line

FP8, COPIES = "FP8 conversion in integers", "16-byte copies in place of bulk copies"
GPU = {
    "name": "a GPU",
    "compute_capability": [9, 0],
    "sms": 132,
    "memory_gib": 80.0,
    "bus_id": "0000:01:00.0",
    "handle_types": ["ipc", "posix_fd", "host"],
    "reaches": {},
}
MPI = {"library": "an MPI", "mpiexec": "/usr/bin/mpiexec", "missing": None}
COMPILER = {"numba": "0.68", "numba-cuda": "0.30", "cuda-bindings": "13"}
EVERYTHING = {**COMPILER, "torch": "2", "nvshmem4py-cu13": "0.4", "nvidia-nvshmem-cu13": "3.8"}


def two_gpus(*how):
    """Two GPUs; how[i] is how GPU i reaches the other, None if it does not."""
    return [{**GPU, "reaches": {} if link is None else {str(1 - i): link}} for i, link in enumerate(how)]


@pytest.fixture
def quick_mpi(monkeypatch):
    """As if MPI had been looked at: that takes a process."""
    monkeypatch.setattr(info, "look_at_mpi", lambda: MPI)


def test_json_and_text_tell_the_same(capsys):
    assert main(["info", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    assert found["runs"]["emulator, nbep.spawn"] == "yes"
    for name, number in found["packages"].items():
        assert f"{name} {number}" in text
    for what, answer in found["runs"].items():
        assert any(what in line and answer in line for line in text.splitlines())


def test_the_settings_of_nbep_are_shown(monkeypatch, quick_mpi):
    monkeypatch.setenv("NBEP_TRANSPORT", "ibgda")
    monkeypatch.setenv("OTHER", "secret")
    assert info.look()["environment"]["NBEP_TRANSPORT"] == "ibgda"
    assert "secret" not in "\n".join(info.lines_of(info.look()))


def test_what_the_driver_says_of_gpus_and_pairs_of_them_is_shown(monkeypatch, quick_mpi, capsys):
    """GPU 0 and 1 have NVLink, GPU 2 reaches GPU 0 over PCIe, and nothing else is reached."""
    FakeGpus(3, {(0, 1): True, (1, 0): True, (2, 0): False}).install(monkeypatch)
    assert main(["info", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["driver"] == "13.2"
    assert [gpu["reaches"] for gpu in found["gpus"]] == [{"1": "NVLink"}, {"0": "NVLink"}, {"0": "PCIe"}]
    assert found["runs"]["one GPU, virtual ranks"] == "yes"
    assert found["runs"]["a GPU for each rank, under mpiexec"] == "GPU 0 cannot reach GPU 2: no peer access"
    assert main(["info"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "driver: CUDA 13.2" in lines
    assert "GPU 2: Fake 2, sm_90, 132 SMs, 80.0 GiB, 0000:02:00.0; handle types ipc, posix_fd, host" in lines
    table = lines.index("  reaches GPU 0   GPU 1   GPU 2")
    assert [line.split()[2:] for line in lines[table + 1 : table + 4]] == [
        ["-", "NVLink", "not"],
        ["NVLink", "-", "not"],
        ["PCIe", "not", "-"],
    ]


def test_without_a_gpu_what_needs_one_says_why():
    runs = info.what_runs([], "no driver library", MPI, ["mlx5_0"], EVERYTHING)
    needs_gpu = {what for what, answer in runs.items() if answer == "no GPU"}
    assert needs_gpu == {
        "one GPU, virtual ranks",
        "a GPU for each rank, under mpiexec",
        "a GPU for each rank, under torchrun",
        'a GPU for each rank, handle_type="host"',
        "transport ibgda, a real NIC",
        "transport nvshmem",
    }


def test_with_everything_there_all_runs():
    runs = info.what_runs(two_gpus("NVLink", "NVLink"), None, MPI, ["mlx5_0"], EVERYTHING)
    assert set(runs.values()) == {"yes"}


def test_without_the_extras_each_line_of_what_does_not_run_says_what_installs_it():
    mpi = {"library": None, "mpiexec": None, "missing": f"mpi4py is not installed: {install_line('mpi')}"}
    runs = info.what_runs([], f"cuda is not installed: {install_line('cuda')}", mpi, [], {})
    not_here = {what: answer for what, answer in runs.items() if answer != "yes"}
    assert {"compile kernels", "one GPU, virtual ranks", "emulator, a process for each rank"} < not_here.keys()
    assert all("pip install '.[" in answer for answer in not_here.values())


@pytest.mark.parametrize(
    ("gpus", "mpi", "nics", "packages", "what", "why"),
    [
        ([GPU], MPI, [], EVERYTHING, "a GPU for each rank, under mpiexec", "there is one GPU"),
        (
            two_gpus("NVLink", None),
            MPI,
            [],
            EVERYTHING,
            "a GPU for each rank, under torchrun",
            "GPU 1 cannot reach GPU 0: no peer access",
        ),
        (two_gpus(None, None), MPI, [], EVERYTHING, 'a GPU for each rank, handle_type="host"', "yes"),
        (
            [GPU, {**GPU, "handle_types": ["ipc"]}],
            MPI,
            [],
            EVERYTHING,
            'a GPU for each rank, handle_type="host"',
            "GPU 1 cannot map memory of the host",
        ),
        (
            [{**GPU, "compute_capability": [7, 0]}],
            MPI,
            [],
            EVERYTHING,
            "one GPU, virtual ranks",
            "GPU 0 is older than sm_75",
        ),
        ([GPU], {**MPI, "missing": "none here"}, [], EVERYTHING, "emulator, a process for each rank", "none here"),
        ([GPU], MPI, ["rxe0"], EVERYTHING, "transport ibgda, a real NIC", "there is no mlx5 NIC"),
        ([], MPI, [], {}, "emulator, under torchrun", "torch is not installed"),
        ([GPU], MPI, [], COMPILER, "transport nvshmem", install_line("nvshmem")),
        (
            [GPU],
            MPI,
            [],
            {**EVERYTHING, "nvidia-nvshmem-cu13": "3.4.5"},
            "transport nvshmem",
            f"it needs nvidia-nvshmem-cu13 3.8 or later; here is 3.4.5: {install_line('nvshmem')}",
        ),
        ([GPU], MPI, [], {}, "one GPU, virtual ranks", f"numba-cuda is not installed: {install_line('cuda')}"),
        (
            two_gpus("PCIe", "PCIe"),
            MPI,
            [],
            EVERYTHING,
            "a GPU for each rank, under mpiexec",
            "untried: GPU 0 reaches GPU 1 over PCIe, without the atomics that barriers use",
        ),
        (
            two_gpus("NVLink", "NVLink"),
            MPI,
            [],
            COMPILER,
            "a GPU for each rank, under torchrun",
            f"torch is not installed: {install_line('torch')}",
        ),
    ],
)
def test_what_is_missing_is_named(gpus, mpi, nics, packages, what, why):
    assert why in info.what_runs(gpus, None, mpi, nics, packages)[what]


def test_an_mpi_without_its_launcher_says_what_brings_one(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert "nor mpirun is on the PATH: pip install '.[mpi]'" in info.look_at_mpi()["missing"]


@pytest.mark.parametrize(
    ("cc", "words"),
    [
        ((7, 0), "too old: the lowest is sm_75"),
        ((7, 5), f"64 KiB of shared memory a block; BF16 conversion in integers, {FP8}, {COPIES}"),
        ((8, 6), f"99 KiB of shared memory a block; {FP8}, {COPIES}"),
        ((9, 0), "227 KiB of shared memory a block; bulk copies"),
        ((12, 0), f"99 KiB of shared memory a block; {COPIES}"),
    ],
)
def test_a_card_says_what_stands_in_for_what_it_lacks(cc, words):
    assert info.words_of_card(cc) == words
