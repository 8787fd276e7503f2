"""`nbep info` says what is here, what runs on it, and why the rest does not."""

import json

import pytest

from nbep import info
from nbep.cli import main

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
EVERYTHING = {"torch": "2", "nvshmem4py-cu13": "0.4", "nvidia-nvshmem-cu13": "3.8"}


def two_gpus(*how):
    """Two GPUs; how[i] is how GPU i reaches the other, None if it does not."""
    return [{**GPU, "reaches": {} if link is None else {1 - i: link}} for i, link in enumerate(how)]


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


def test_the_settings_of_nbep_are_shown(monkeypatch):
    monkeypatch.setenv("NBEP_TRANSPORT", "ibgda")
    monkeypatch.setenv("OTHER", "secret")
    assert info.look()["environment"]["NBEP_TRANSPORT"] == "ibgda"
    assert "secret" not in "\n".join(info.lines_of(info.look()))


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
            [{**GPU, "compute_capability": [7, 5]}],
            MPI,
            [],
            EVERYTHING,
            "one GPU, virtual ranks",
            "GPU 0 is older than sm_80",
        ),
        ([GPU], {**MPI, "missing": "none here"}, [], EVERYTHING, "emulator, a process for each rank", "none here"),
        ([GPU], MPI, ["rxe0"], EVERYTHING, "transport ibgda, a real NIC", "there is no mlx5 NIC"),
        ([GPU], MPI, [], {}, "transport nvshmem", "pip install 'nbep[nvshmem]'"),
        ([], MPI, [], {}, "emulator, under torchrun", "torch is not installed"),
        (
            two_gpus("PCIe", "PCIe"),
            MPI,
            [],
            {},
            "a GPU for each rank, under torchrun",
            "torch is not installed",
        ),
    ],
)
def test_what_is_missing_is_named(gpus, mpi, nics, packages, what, why):
    assert why in info.what_runs(gpus, None, mpi, nics, packages)[what]


def test_gpus_and_how_they_reach_each_other_are_listed():
    found = {**info.look(), "gpus": two_gpus("NVLink", None), "no_gpu": None, "driver": "13.0"}
    text = "\n".join(info.lines_of(found))
    assert "GPU 0: a GPU, sm_90, 132 SMs, 80.0 GiB, 0000:01:00.0; handle types ipc, posix_fd" in text
    assert "reaches GPU 1 over NVLink" in text
    assert "reaches no other GPU" in text
