"""What test_two_hosts.py runs on four ranks: those of hostb differ in one thing after the other."""

import os

import pytest
from world import group_of, world

import nbep
from nbep.host.ranks import hosts

NAMES = ("nbep", "Python", "NumPy", "byte order", "number of ranks")
comm = world()
group = group_of(comm)
own_facts = hosts.own_facts
for name in NAMES:
    own = own_facts(comm)[name]

    def facts(comm, name=name):
        return {**own_facts(comm), **({name: "another"} if comm.rank >= 2 else {})}

    hosts.own_facts = facts
    text = (
        rf"^{name}: got {own} on ranks 0, 1 \(hosta\), another on ranks 2, 3 \(hostb\); must be the same on all ranks$"
    )
    with pytest.raises(ValueError, match=text):
        nbep.Buffer(group, num_nvl_bytes=256)
hosts.own_facts = own_facts

os.environ["NBEP_TIMEOUT_MS"] = "5000" if comm.rank == 3 else "20000"
with pytest.raises(ValueError, match=r"got 20000 on ranks 0, 1, 2 \(hosta, hostb\), 5000 on rank 3 \(hostb\)"):
    nbep.Buffer(group, num_nvl_bytes=256)
os.environ["NBEP_TIMEOUT_MS"] = "20000"

with pytest.raises(
    ValueError, match=r"allow_mnnvl: got True with ranks on several hosts \(hosta, hostb\); must be False"
):
    nbep.Buffer(group, num_nvl_bytes=256, allow_mnnvl=True)
with pytest.raises(
    ValueError, match=r"^ranks 0, 1, 2, 3: group: got 4 ranks on several hosts; must be on one host, unless"
):
    nbep.Buffer(group, num_nvl_bytes=256)
nbep.SharedMemory.create(group, 256, transport="ibgda", num_nvl_peers=2).close()
print(f"rank {comm.rank} is done", flush=True)
