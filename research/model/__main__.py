"""`python -m research.model`: how long dispatch and combine take on real links, beside DeepEP's own figures.

    python -m research.model                every published row with the model's error, then 16 to 1,024 ranks
    python -m research.model --links FILE   other links: their times alone
    python -m research.model --plot DIR     the same as pictures
    python -m research.model --fit          find the fitted parameters of the links again

Bytes, messages and flags come from runs on the emulator. Read in this order: work, traffic, runs; features, counts,
times; published, fit; predictions, plots. records/scaling.md explains it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from nbep.device.terminal import STDOUT, add_json, write_json

MOST_RANKS = 8192


def main(argv: Sequence[str] | None = None) -> int:
    """Print the model's tables and return the exit status.

    Args:     argv without the program's name; None takes sys.argv
    Raises:   SystemExit as argparse does, for bad options and for --help
    """
    from research.model.predictions import RANKS, as_json, compare, predict
    from research.model.times import H800_FILE, Links

    parser = argparse.ArgumentParser(prog="python -m research.model", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--links", type=Path, metavar="FILE", help=f"what carries the bytes; as {H800_FILE.name}")
    parser.add_argument("--ranks", type=_ranks, default=RANKS, metavar="N,N", help="multiples of 8, from 16 on")
    add_json(parser)
    parser.add_argument("--plot", type=Path, metavar="DIR", help="write pictures there, as SVG")
    parser.add_argument("--fit", action="store_true", help="fit the parameters of the links again, and print them")
    options = parser.parse_args(argv)
    try:
        links = Links.read(options.links or H800_FILE)
    except (OSError, ValueError, KeyError) as error:
        parser.error(f"--links: {error}")
    if options.fit:
        from research.model.fit import PARAMETERS, fit
        from research.model.predictions import parameter_lines

        fitted = fit(links)
        write_json(options.json, {name: value_of(fitted) for name, (value_of, _) in PARAMETERS.items()})
        if options.json != STDOUT:
            print(parameter_lines(fitted))
        return 0

    # The published rows are of one kind of machine, so other links have no error.
    compared = compare(links) if options.links is None else []
    predicted = predict(links, options.ranks)
    write_json(options.json, as_json(links, compared, predicted))
    if options.json != STDOUT:
        from research.model.predictions import compared_table, predicted_table

        print(links.name)
        if compared:
            print(f"\n{compared_table(compared)}")
        print(f"\n{predicted_table(predicted)}")
    if options.plot is not None:
        from research.model.plots import save_all

        for path in save_all(options.plot, links, compared, predicted):
            if options.json != STDOUT:
                print(f"written: {path}")
    return 0


def _ranks(text: str) -> tuple[int, ...]:
    """ "16,32" for argparse."""
    ranks = tuple(int(part) for part in text.split(","))
    for count in ranks:
        if not 16 <= count <= MOST_RANKS or count % 8:
            raise argparse.ArgumentTypeError(f"{count} is not a multiple of 8 from 16 to {MOST_RANKS}")
    return ranks


if __name__ == "__main__":
    sys.exit(main())
