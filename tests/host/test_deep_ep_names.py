"""Programs that import deep_ep, and what they find under its names."""

import inspect
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from arrays import to_numpy, to_target
from processes import LIMIT_S
from target import spawn

import nbep
import nbep.deep_ep as deep_ep
from nbep.deep_ep.calls import widened
from nbep.deep_ep.utils import EventOverlap
from nbep.host import events

MAIN = Path(__file__).with_name("deep_ep_main.py")
RUN = Path(__file__).parents[2] / "docs" / "examples" / "run.py"


def test_installed_names_are_nbeps_modules_in_spawned_processes_too():
    path = os.pathsep.join([str(Path(nbep.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, RUN, MAIN],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["nbep.deep_ep nbep.deep_ep.cpp 2.1.0"] * 2 + ["True nbep.deep_ep"]


def test_names_are_not_installed_over_another_deep_ep(monkeypatch):
    monkeypatch.setitem(sys.modules, "deep_ep", ModuleType("deep_ep"))
    with pytest.raises(RuntimeError, match=r"deep_ep: got .* imported before"):
        deep_ep.install()


def test_an_event_calls_its_hook_once_and_lets_go_of_its_handle():
    called = []

    def main(comm):
        event = deep_ep.Buffer.capture()
        event.register_hook_after_wait(lambda: called.append(comm.rank))
        with pytest.raises(ValueError, match="hook_after_wait: got a second one"):
            event.register_hook_after_wait(print)
        event.current_stream_wait()
        with event:
            pass
        assert event.event is not None
        with event(release_handle=True) as same:
            assert same is event
        assert event.event is None
        event = deep_ep.Buffer.capture()
        event.current_stream_wait(release_handle=True)
        assert event.event is None

    spawn(main, 2)
    assert sorted(called) == [0, 1]


def test_a_number_of_queue_pairs_that_was_divided_is_taken():
    def main(comm):
        deep_ep.Buffer(comm, 256, num_qps_per_rank=8 / 2).destroy()
        with pytest.raises(ValueError, match=r"num_qps_per_rank: got 4\.5; must be an integer"):
            deep_ep.Buffer(comm, 256, num_qps_per_rank=9 / 2)

    spawn(main, 2)


def test_num_sms_counts_where_it_is_set(monkeypatch):
    monkeypatch.setattr(deep_ep.Buffer, "num_sms", 8)
    assert deep_ep.Buffer.get_dispatch_config(96) == deep_ep.Config(8, 20, 480, 12, 128)
    assert deep_ep.Buffer.get_combine_config(48) == deep_ep.Config(8, 1, 288, 8, 128)
    deep_ep.Buffer.set_num_sms(4)
    assert deep_ep.Buffer.get_dispatch_config(2).num_sms == 4
    assert nbep.Buffer.get_dispatch_config(2).num_sms == 20


@pytest.mark.parametrize(
    "verb", ["get_dispatch_layout", "dispatch", "combine", "low_latency_dispatch", "low_latency_combine"]
)
def test_signatures_are_those_of_the_verbs(verb):
    assert inspect.signature(getattr(deep_ep.Buffer, verb)) == inspect.signature(getattr(nbep.Buffer, verb))


def test_use_fabric_is_a_handle_type(monkeypatch):
    taken = []

    def refuse(self, *args, **options):
        taken.append((*args[7:], options.get("handle_type")))
        raise ValueError("stopped here")

    monkeypatch.setattr(nbep.Buffer, "__init__", refuse)
    for use_fabric in (False, True):
        before = (None, 0, 0, False, 24, True, False)
        for args, options in (
            ((*before, use_fabric, True, False), {}),
            ((*before, use_fabric, True, False, "comm"), {}),
            (before, {"use_fabric": use_fabric}),
        ):
            with pytest.raises(ValueError, match="stopped here"):
                deep_ep.Buffer(*args, **options)
    wanted = [(True, False, None), (True, False, "comm"), (False, False, None)]
    assert taken == [(*each, handle_type) for handle_type in (None, "fabric") for each in wanted]


@pytest.mark.parametrize(
    ("verb", "name", "fork"),
    [
        ("low_latency_dispatch", "use_nvfp4", "DeepEP's branch hybrid-ep"),
        ("low_latency_dispatch", "pertoken_quant", "ACCL-EP, the DeepEP that rtp-llm is built with"),
        ("low_latency_combine", "src_signals", "DeepEP's branch hybrid-ep"),
        ("low_latency_combine", "comp_signal", "DeepEP's branch antgroup-opt"),
    ],
)
def test_arguments_of_forks_are_refused_with_the_forks_name(verb, name, fork):
    with pytest.raises(TypeError, match=f"{name}: not in DeepEP's main, and not in nbep; it is an argument of {fork}"):
        getattr(deep_ep.Buffer, verb)(*5 * (None,), **{name: None})


def test_handles_are_tuples():
    def main(comm):
        buffer = deep_ep.Buffer(comm, 0, 1 << 18, True)
        x = np.ones((2, 128), ml_dtypes.bfloat16)
        topk_idx, weights = np.array([[0], [1]]), np.ones((2, 1), np.float32)
        recv_x, _, handle, _, _ = buffer.low_latency_dispatch(x, topk_idx, 2, 2, use_fp8=False)
        assert isinstance(handle, tuple)
        assert len(handle) == 5
        assert handle[2:] == (2, 128, 2) == (*handle,)[2:]
        return buffer.low_latency_combine(recv_x, topk_idx, weights, handle)[0].tolist() == x.tolist()

    assert nbep.spawn(main, 2, "emulator") == [True, True]


def test_indices_may_be_of_32_bits(inputs):
    def main(comm):
        buffer = deep_ep.Buffer(comm, 1 << 17, 1 << 18, True)
        arguments = inputs(buffer)
        narrow = {**arguments, "topk_idx": to_target(to_numpy(arguments["topk_idx"]).astype(np.int32))}
        *layout, event = buffer.get_dispatch_layout(narrow["topk_idx"], 4, None, True)
        event.current_stream_wait()
        assert to_numpy(layout[3]).tolist() == to_numpy(arguments["is_token_in_rank"]).tolist()
        of_wide, of_narrow = (buffer.dispatch(**each, previous_event=buffer.capture()) for each in (arguments, narrow))
        for got, want in zip(of_narrow[:3], of_wide[:3], strict=True):
            assert to_numpy(got).tobytes() == to_numpy(want).tobytes()
        assert of_narrow[1].dtype == of_wide[1].dtype
        x, topk_idx, weights = (arguments[name] for name in ("x", "topk_idx", "topk_weights"))
        combined = []
        for each in (topk_idx, narrow["topk_idx"]):
            recv_x, _, handle, _, _ = buffer.low_latency_dispatch(x, each, 3, 4, use_fp8=False)
            rows, *_ = buffer.low_latency_combine(recv_x, topk_idx=each, topk_weights=weights, handle=handle)
            combined.append(to_numpy(rows).tobytes())
        assert combined[0] == combined[1]
        with pytest.raises(TypeError, match="num_expert"):
            buffer.get_dispatch_layout(narrow["topk_idx"], num_expert=4)
        buffer.destroy()

    spawn(main, 2)


def test_indices_are_widened_between_the_previous_event_and_the_call(monkeypatch):
    steps = []
    event = SimpleNamespace(current_stream_wait=lambda: steps.append("behind previous_event"))
    topk_idx = SimpleNamespace(dtype=np.dtype(np.int32), long=lambda: steps.append("widened"))
    monkeypatch.setattr(events, "_end_without_runtime", lambda: steps.append("captured"))
    checks = (print,)
    _, passed = widened(topk_idx, EventOverlap(nbep.EventHandle(event, checks)))
    assert steps == ["behind previous_event", "widened", "captured"]
    assert passed.event.checks == checks
