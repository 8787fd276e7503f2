"""Round trips of virtual ranks with the arrays of one library: NBEP_TEST_ARRAYS=torch|cupy|numba python kinds_main.py

Every output must be of the library whose arrays went in; see assert_kind. No other library may have been imported.
"""

import os
import sys
from pathlib import Path

sys.path[:0] = [str(folder) for folder in (Path(__file__).parents[2], Path(__file__).parents[1] / "support")]
os.environ["NBEP_TEST_TARGET"] = "cuda"

import target

target.set_environment()

import arrays
from cases import make_case
from intranode import Options, cached_round_trip, run

import nbep


def main() -> None:
    arrays.warm_up()
    run(make_case(1, num_tokens=(9, 4), num_topk=3), Options(num_biases=2))
    fp8 = None if arrays.LIBRARY == "cupy" else "column"  # CuPy has no float8 dtype
    run(make_case(2, num_tokens=(0, 7), hidden=256), Options(fp8=fp8), fn=cached_round_trip)
    run(make_case(3, num_ranks=4, num_tokens=5), Options(num_worst_tokens=25, config=nbep.Config(2, 3, 5)))
    others = {"torch", "cupy"} & set(sys.modules) - {arrays.LIBRARY}
    assert not others, f"{others} were imported"
    print(f"{arrays.array_name()} in, {arrays.array_name()} out")


if __name__ == "__main__":
    main()
