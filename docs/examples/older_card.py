"""The same cast to FP8 on the paths of four cards: the bits are the same.

python docs/examples/older_card.py
"""

import ml_dtypes
import numpy as np

import nbep

CARDS = ((7, 5), (8, 0), (8, 9), (9, 0))
X = np.random.default_rng(1).normal(size=(4, 256)).astype(ml_dtypes.bfloat16)


def main(comm, card):
    comm.runtime.world.compute_capability = card  # before the first kernel
    return nbep.per_token_cast_to_fp8(X)


if __name__ == "__main__":
    results = [nbep.spawn(main, num_ranks=1, args=(card,), target="emulator")[0] for card in CARDS]
    for (major, minor), (x, scales) in zip(CARDS, results, strict=True):
        assert x.tobytes() == results[0][0].tobytes()
        assert scales.tobytes() == results[0][1].tobytes()
        print(f"sm_{major}{minor}: x[0, :4] = {[float(value) for value in x[0, :4]]}")
