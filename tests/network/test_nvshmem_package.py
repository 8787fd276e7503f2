"""nvshmem4py has what nbep calls. Without a GPU nothing of it can be called but constructors."""

import inspect

import nvshmem_package
import pytest

from nbep.device.network.nvshmem_library import NvshmemMissing


@pytest.fixture
def package():
    """The modules nvshmem.core and nvshmem.bindings."""
    nvshmem_package.include_folder()
    from nbep.host.transport.nvshmem import load_library

    try:
        library = load_library()
    except NvshmemMissing as error:
        nvshmem_package.skip_or_fail(str(error))
    return library._core, library._bindings


def test_core_takes_what_nbep_gives(package):
    core, _ = package
    assert {"device", "uid", "rank", "nranks", "initializer_method"} <= set(inspect.signature(core.init).parameters)
    assert list(inspect.signature(core.get_unique_id).parameters) == ["empty"]
    assert not inspect.signature(core.finalize).parameters
    assert callable(core.get_version)


def test_a_unique_id_has_the_bytes_that_nbep_sends(package):
    from nbep.host.transport.nvshmem import UNIQUE_ID_BYTES

    core, bindings = package
    assert bindings.uniqueid_dtype.itemsize == UNIQUE_ID_BYTES
    assert core.UniqueID().ptr != 0


CALLS = {
    "align": "(alignment, size)",
    "free": "(ptr)",
    "ptr": "(dest, pe)",
    "cumodule_init": "(module)",
    "cumodule_finalize": "(module)",
    "team_split_strided": "(parent_team, pe_start, pe_stride, pe_size, config, config_mask, new_team)",
    "team_destroy": "(team)",
}


@pytest.mark.parametrize("name", CALLS)
def test_bindings_take_what_nbep_gives(package, name):
    _, bindings = package
    assert str(inspect.signature(getattr(bindings, name))) == CALLS[name]


def test_a_teams_configuration_is_set_by_field(package):
    _, bindings = package
    config = bindings.TeamConfig()
    config.version = config.num_contexts = config.uniqueid = 0
    assert (config.version, config.num_contexts, config.uniqueid) == (0, 0, 0)
    assert config.ptr != 0
