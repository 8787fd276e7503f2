"""A call that was saved on any target runs again on the emulator, with its routing."""

import numpy as np
import pytest

import nbep
from nbep.host.ranks.timeouts import saved_calls
from nbep.lab.check import Run, perform
from nbep.lab.check.scenario import load_scenario
from nbep.reference import BF16

TOPK_IDX = [np.array([[0, 3], [2, -1], [1, 0]]), np.array([[3, 2]])]


@pytest.fixture
def saved(tmp_path):
    """Writes the files of some ranks; returns the program that runs them."""

    def save(choices, **options):
        commands = {
            nbep.debug.save_call(tmp_path, rank, len(choices), topk_idx, 4, **options)
            for rank, topk_idx in enumerate(choices)
        }
        (command,) = commands
        return command.removeprefix("nbep check ")

    yield save
    saved_calls.clear()


@pytest.mark.emulator_only("saved calls run on the emulator")
@pytest.mark.parametrize(
    "options", [{}, {"config": nbep.Config(4, 1, 2)}, {"low_latency": True}], ids=("normal", "config", "low latency")
)
def test_a_saved_call_runs_on_the_emulator(saved, options):
    program = saved(TOPK_IDX, **options)
    assert load_scenario(program).parameters == {"ranks": 2, "tokens": 3}
    for tokens in (3, 1):
        for model in ("checked", "delayed"):
            assert perform(Run(program, (("tokens", tokens),), 0, "uniform", model)) is None


@pytest.mark.emulator_only("saved calls run on the emulator")
def test_a_saved_call_finds_a_broken_kernel(saved):
    program = saved(TOPK_IDX)
    run = Run(program, (), 0, "uniform", "checked", ("teams.publish_tail: release of dispatch-tail",))
    assert perform(run) is not None


def test_an_array_of_torch_is_taken(saved, tmp_path):
    torch = pytest.importorskip("torch")
    saved([torch.from_numpy(topk_idx) for topk_idx in TOPK_IDX])
    assert (np.load(tmp_path / "rank_0.npz")["topk_idx"] == TOPK_IDX[0]).all()


@pytest.mark.emulator_only("its waits end at once")
def test_a_time_out_names_the_command_of_the_saved_call(saved):
    program = saved(TOPK_IDX)
    notes: list[str] = []

    def main(comm):
        buffer = nbep.Buffer(comm, 1 << 17)
        if comm.rank == 0:
            per_rank, _, per_expert, is_in_rank, _ = buffer.get_dispatch_layout(TOPK_IDX[0], 4)
            with pytest.raises(nbep.PeerTimeout) as error:
                buffer.dispatch(
                    np.zeros((3, 64), BF16),
                    num_tokens_per_rank=per_rank,
                    is_token_in_rank=is_in_rank,
                    num_tokens_per_expert=per_expert,
                    config=nbep.Config(2, 2, 4),
                )
            notes.extend(error.value.__notes__)
        buffer.destroy()

    nbep.spawn(main, 2, "emulator", on_deadlock="expire")
    assert notes[:2] == [
        "rank 0 has made 1 collective call, the last one dispatch",
        f"the call that was saved last, on the emulator: nbep check {program}",
    ]
