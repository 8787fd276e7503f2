"""`nbep litmus`: what PTX says of each litmus test, beside what the emulator does with it.

nbep litmus                  all of them
nbep litmus MP SB --json     some shapes, for programs
nbep litmus IRIW --all       all outcomes, with every late store and early load, and not samples
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from nbep.device.terminal import STDOUT, add_json, progress, write_json
from nbep.lab.litmus import table
from nbep.lab.litmus.programs import PROGRAMS


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table. Raises: SystemExit as argparse does"""
    shapes = list(dict.fromkeys(program.shape for program in PROGRAMS))
    parser = argparse.ArgumentParser(prog="nbep litmus", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("shapes", nargs="*", metavar="SHAPE", help=f"some of: {', '.join(shapes)}")
    parser.add_argument("--all", action="store_true", help="all outcomes: late stores and early loads as choices")
    add_json(parser)
    options = parser.parse_args(argv)
    unknown = [shape for shape in options.shapes if shape not in shapes]
    if unknown:
        parser.error(f"SHAPE: got {', '.join(unknown)}; must be some of {', '.join(shapes)}")
    programs = [program for program in PROGRAMS if not options.shapes or program.shape in options.shapes]
    with progress("litmus tests", len(programs)) as advance:
        if options.all:
            sets = table.rows_of(programs, advance, table.set_row)
            as_json, printed = table.sets_as_json(programs, sets), table.lines_of_sets(programs, sets)
        else:
            rows = table.rows_of(programs, advance)
            as_json, printed = table.as_json(programs, rows), table.lines(programs, rows)
    write_json(options.json, as_json)
    if options.json != STDOUT:
        print("\n".join(printed))
    return 0
