"""nbep's compiled kernels are kept on disk: the next process does without Numba. A user's are not."""

import os
import re
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest
from processes import run_python

import nbep.device.compile
from nbep import info
from nbep.device.cache import cache_folder
from nbep.device.compile import load_kernels
from nbep.device.jit import KERNELS, device_function, kernel, spec_of
from nbep.device.primitives import st_weak_s32
from nbep.device.types import Out
from nbep.host.target.cuda.launcher import load_cubin, source_key

PROGRAM = Path(__file__).parent / "cache_main.py"
SPEC = SimpleNamespace(name="dispatch", label="dispatch", is_own=True)
USERS_SPEC = SimpleNamespace(name="dispatch", label="dispatch", is_own=False)


@pytest.fixture
def compiled(monkeypatch):
    """Stands in for the compiler: the names of what it was asked for."""
    names = []

    def compile_kernel(spec, cc):
        names.append((spec.name, cc))
        return SimpleNamespace(cubin=f"{spec.name} for {cc}".encode())

    monkeypatch.setattr(nbep.device.compile, "compile_kernel", compile_kernel)
    return names


def test_a_kernel_is_compiled_once_for_each_source_and_architecture(compiled, monkeypatch, tmp_path):
    monkeypatch.setenv("NBEP_CACHE_DIR", str(tmp_path / "new" / "folder"))
    for _ in range(2):
        assert load_cubin(SPEC, (9, 0), "key") == b"dispatch for (9, 0)"
    assert compiled == [("dispatch", (9, 0))]
    load_cubin(SPEC, (8, 0), "key")
    load_cubin(SPEC, (9, 0), "other key")
    assert compiled[1:] == [("dispatch", (8, 0)), ("dispatch", (9, 0))]
    assert len(list(cache_folder().iterdir())) == 3, "and no temporary file is left"


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: data[:5], lambda data: b""])
def test_a_damaged_entry_is_named_and_compiled_anew(damage, compiled, monkeypatch, tmp_path):
    monkeypatch.setenv("NBEP_CACHE_DIR", str(tmp_path))
    load_cubin(SPEC, (9, 0), "key")
    (entry,) = tmp_path.iterdir()
    entry.write_bytes(damage(entry.read_bytes()))
    with pytest.warns(RuntimeWarning, match=f"^{re.escape(str(entry))} is damaged"):
        assert load_cubin(SPEC, (9, 0), "key") == b"dispatch for (9, 0)"
    assert load_cubin(SPEC, (9, 0), "key") == b"dispatch for (9, 0)"
    assert len(compiled) == 2


def others_may_write(entry, _):
    entry.chmod(0o664)


def is_a_link(entry, elsewhere):
    elsewhere.write_bytes(entry.read_bytes())
    entry.unlink()
    entry.symlink_to(elsewhere)


def is_a_fifo(entry, _):
    entry.unlink()
    os.mkfifo(entry)


def is_of_another_user(entry, _):
    if os.geteuid() != 0:
        pytest.skip("it takes root to give a file away")
    os.chown(entry, 4321, -1)


UNSAFE = {
    others_may_write: "others may write it: mode 664",
    is_a_link: "it is a symbolic link",
    is_a_fifo: "it is no regular file",
    is_of_another_user: "it belongs to user 4321",
}


@pytest.mark.parametrize("change", UNSAFE)
def test_an_entry_that_others_could_have_made_is_named_and_compiled_anew(change, compiled, monkeypatch, tmp_path):
    monkeypatch.setenv("NBEP_CACHE_DIR", str(tmp_path / "kept"))
    load_cubin(SPEC, (9, 0), "key")
    (entry,) = (tmp_path / "kept").iterdir()
    change(entry, tmp_path / "elsewhere")
    with pytest.warns(RuntimeWarning, match=f"^{re.escape(str(entry))} is not used: {UNSAFE[change]}; its kernel is"):
        assert load_cubin(SPEC, (9, 0), "key") == b"dispatch for (9, 0)"
    assert load_cubin(SPEC, (9, 0), "key") == b"dispatch for (9, 0)", "and the new one is used"
    assert len(compiled) == 2


@pytest.mark.parametrize(
    "change", [lambda folder: folder.chmod(0o775), lambda folder: is_of_another_user(folder, None)]
)
def test_a_folder_that_others_may_write_is_named_and_not_used(change, compiled, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("NBEP_CACHE_DIR", str(tmp_path / "kept"))
    load_cubin(SPEC, (9, 0), "key")
    change(tmp_path / "kept")
    (entry,) = (tmp_path / "kept").iterdir()
    before = entry.stat()
    why = f"{re.escape(str(tmp_path / 'kept'))} is not used: (others may write it: mode 775|it belongs to user 4321)"
    for _ in range(2):
        with pytest.warns(RuntimeWarning, match=f"^{why}; kernels are compiled anew"):
            load_cubin(SPEC, (9, 0), "key")
    assert len(compiled) == 3
    assert entry.stat() == before
    assert re.search(f"^cache: {why}", "\n".join(info.lines_of(info.look())), re.MULTILINE)


def test_new_folders_are_for_their_user_alone(compiled, monkeypatch, tmp_path):
    monkeypatch.setenv("NBEP_CACHE_DIR", str(tmp_path / "new" / "folder"))
    before = os.umask(0o002)
    try:
        load_cubin(SPEC, (9, 0), "key")
    finally:
        os.umask(before)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "new").rglob("")] == [0o700, 0o700]
    assert [stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "new" / "folder").iterdir()] == [0o600]


def test_a_cache_that_cannot_be_written_costs_only_time(compiled, monkeypatch, tmp_path):
    in_the_way = tmp_path / "file"
    in_the_way.write_text("not a folder")
    monkeypatch.setenv("NBEP_CACHE_DIR", str(in_the_way))
    for _ in range(2):
        assert load_cubin(SPEC, (9, 0), "key") == b"dispatch for (9, 0)"
    assert len(compiled) == 2


def test_a_kernel_from_elsewhere_is_compiled_by_every_process(compiled, monkeypatch, tmp_path):
    monkeypatch.setenv("NBEP_CACHE_DIR", str(tmp_path))
    (tmp_path / "dispatch-sm_90-key.cubin").write_bytes(b"nbep's kernel of the same name")
    for _ in range(2):
        assert load_cubin(USERS_SPEC, (9, 0), "key") == b"dispatch for (9, 0)"
    assert len(compiled) == 2
    assert len(list(tmp_path.iterdir())) == 1, "and it is not written"


@pytest.mark.compile
def test_a_kernel_that_is_defined_again_with_another_helper_is_compiled_again(monkeypatch, tmp_path):
    monkeypatch.setenv("NBEP_CACHE_DIR", str(tmp_path))

    def define(number):
        @device_function
        def helper():
            return number

        @kernel()
        def answer(out: Out):
            st_weak_s32(out, helper())

        return answer

    first, second, same = (load_cubin(spec_of(define(number)), (9, 0), "key") for number in (1111, 2222, 1111))
    assert first == same != second


def test_the_key_follows_the_sources(monkeypatch, tmp_path):
    (tmp_path / "kernels").mkdir()
    source = tmp_path / "kernels" / "one.py"
    monkeypatch.setattr(nbep.device, "__file__", str(tmp_path / "__init__.py"))
    keys = []
    for text in ("a = 1", "a = 2", "a = 1"):
        source.write_text(text)
        keys.append(source_key())
    assert keys[0] == keys[2] != keys[1]


@pytest.mark.cuda
def test_a_second_process_reads_all_kernels_from_the_cache_without_numba(tmp_path):
    load_kernels()
    assert "compiled" in run_python(PROGRAM, NBEP_CACHE_DIR=str(tmp_path))
    written = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert {path.suffix for path in written} == {".cubin"}
    assert {path.name.partition("-")[0] for path in written} == set(KERNELS)
    assert "read from the cache" in run_python(PROGRAM, NBEP_CACHE_DIR=str(tmp_path))
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == written
