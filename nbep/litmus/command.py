"""`nbep litmus`: what PTX says of each litmus test, beside what the emulator does with it.

nbep litmus                  all of them
nbep litmus MP SB --json     some shapes, for programs
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from nbep.device.terminal import STDOUT, add_json, progress, write_json
from nbep.litmus.programs import PROGRAMS
from nbep.litmus.table import as_json, lines, rows_of


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table. Raises: SystemExit as argparse does"""
    shapes = list(dict.fromkeys(program.shape for program in PROGRAMS))
    parser = argparse.ArgumentParser(prog="nbep litmus", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("shapes", nargs="*", metavar="SHAPE", help=f"some of: {', '.join(shapes)}")
    add_json(parser)
    options = parser.parse_args(argv)
    unknown = [shape for shape in options.shapes if shape not in shapes]
    if unknown:
        parser.error(f"SHAPE: got {', '.join(unknown)}; must be some of {', '.join(shapes)}")
    programs = [program for program in PROGRAMS if not options.shapes or program.shape in options.shapes]
    with progress("litmus tests", len(programs)) as advance:
        rows = rows_of(programs, advance)
    write_json(options.json, as_json(programs, rows))
    if options.json != STDOUT:
        print("\n".join(lines(programs, rows)))
    return 0
