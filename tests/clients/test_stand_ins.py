"""A client's file runs though what it imports is not there."""

import sys
from importlib import import_module

import pytest

pytest.importorskip("torch")
from nbep.conformance import stand_ins

SOURCE = """
import absent_client.kernels.all as mk
from absent_client.layers import Config, is_hip, limits
from absent_client.platforms import current_platform


class Layer(mk.Base):
    def __init__(self, size: mk.Size | None = None):
        super().__init__()
        self.size = limits.get("size") + 1

    def run(self, config: Config) -> "mk.Result":
        return "hip" if is_hip() or current_platform.is_rocm() else mk.Meta.make_from_list([1], device="cpu")
"""


def test_a_file_runs_with_what_is_given_and_classes_that_are_false_for_the_rest(tmp_path, monkeypatch):
    file = tmp_path / "absent_client" / "layers" / "moe.py"
    file.parent.mkdir(parents=True)
    file.write_text(SOURCE)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    name = "absent_client.layers.moe"
    stand_ins.StandIns(tmp_path, {name}, {"absent_client.layers.limits": {"size": 7}}).install()
    layer = import_module(name).Layer()
    assert layer.size == 8
    made = layer.run(None)
    assert made != "hip"
    assert not made
    assert not made.anything().at_all[0]
