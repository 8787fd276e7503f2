"""What compute-sanitizer looks at: every kernel, on two virtual ranks and small shapes; see sanitize.sh."""

import os
import sys
from pathlib import Path

sys.path[:0] = [str(folder) for folder in (Path(__file__).parents[2], Path(__file__).parents[1] / "support")]
os.environ["NBEP_TEST_TARGET"] = "cuda"

import target

target.set_environment()

import arrays
import numpy as np
from cases import make_case
from intranode import Options, cached_round_trip, run

import nbep
from nbep import reference


def cast(comm) -> None:
    x = (np.arange(3 * 256, dtype=np.float32).reshape(3, 256) / 7).astype(reference.BF16)
    x_fp8, scales = nbep.per_token_cast_to_fp8(arrays.to_target(x))
    back = arrays.to_numpy(nbep.per_token_cast_back(x_fp8, scales))
    assert back.tobytes() == reference.per_token_cast_back(*reference.per_token_cast_to_fp8(x)).tobytes()


def main() -> None:
    arrays.warm_up()
    small = nbep.Config(2, 2, 4, num_threads=128)
    run(make_case(1, num_tokens=(7, 3), hidden=264), Options(small, num_biases=2))
    run(make_case(2, num_tokens=5, hidden=256), Options(small, fp8="column"), fn=cached_round_trip)
    run(make_case(3, num_tokens=4), Options(num_worst_tokens=9))
    run(make_case(4, num_tokens=12, hidden=4608, routing="everywhere"), Options(nbep.Config(2, 3, 7)))
    run(make_case(5, num_tokens=(7, 3), hidden=264), Options(small, num_biases=2, zero_copy=True))
    run(make_case(6, num_tokens=5, hidden=512), Options(small, fp8="column", zero_copy=True), fn=cached_round_trip)
    run(make_case(7, num_tokens=12, hidden=4608), Options(nbep.Config(2, 3, 7), zero_copy=True))
    target.spawn(cast, 1)
    print("all results are right")


if __name__ == "__main__":
    main()
