"""Tests of plain Numba kernels: `cuda` is what `from numba import cuda` is for them."""

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("numba")

import nbep.numba_cuda

from nbep.lab.numba_cuda import session


@pytest.fixture(scope="module")
def cuda() -> Any:
    """`numba.cuda`, the emulator's."""
    nbep.numba_cuda.install()
    from numba import cuda

    return cuda


@pytest.fixture(params=["sc", "checked", "delayed", "sc auto", "checked auto"])
def memory_model(request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A memory model; "auto": kernels are compiled where they can be, at once."""
    model, _, engine = request.param.partition(" ")
    for name in ("LONG", "FEW_CALLS", "FIRST_CALLS"):
        monkeypatch.setattr(session, name, -1)
    with nbep.numba_cuda.options(memory_model=model, engine=engine or "python"):
        yield model


@pytest.fixture
def checked() -> Iterator[None]:
    with nbep.numba_cuda.options(memory_model="checked"):
        yield
