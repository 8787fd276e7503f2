"""Write the table of docs/faults.md: break each step of nbep's kernels in turn, and note what finds it.

    python docs/faults.py                      all kernels; takes about ten minutes on two idle cores
    python docs/faults.py intranode.combine    the steps of some kernels, or of a folder of them; the other lines stay

The tests say when it is out of date: a step that is new or has another name, and one that its line's run does not find.
"""

import argparse
import sys
from pathlib import Path

PAGE = Path(__file__).resolve().with_name("faults.md")
sys.path.insert(0, str(PAGE.parent.parent))

from nbep.check.catalogue import own_faults  # noqa: E402
from nbep.check.options import default_jobs, positive  # noqa: E402
from nbep.check.rows import HEAD, line_of, lines_in, text_of  # noqa: E402
from nbep.check.search import workers  # noqa: E402
from nbep.check.table import Row, Task, check_fault, tasks_of  # noqa: E402

NUM_SEEDS = 12


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("kernels", nargs="*", default=[""], metavar="KERNEL")
    parser.add_argument("--jobs", type=positive, default=default_jobs())
    parser.add_argument("--seeds", type=positive, default=NUM_SEEDS)
    parser.add_argument("--missing", action="store_true", help="only the steps that have no line yet")
    options = parser.parse_args()
    lines = lines_in(PAGE.read_text())
    bases = {line.fault: line.base for line in lines if line.base is not None}  # maybe runs of another kernel
    done = {line.fault for line in lines} if options.missing else set()
    tasks = {task.fault: task for kernel in options.kernels or [""] for task in tasks_of(kernel, options.seeds, done)}
    holes = []
    with workers(options.jobs) as each:
        for row in each(check_fault, tasks.values()):
            if row.is_hole and row.fault in bases:
                row = check_fault(Task(row.fault, (bases[row.fault],), options.seeds))
            print(f"{row.fault}: {row.found}", flush=True)
            if row.is_hole:
                holes.append(row.fault)
            else:
                write(row)
    return 1 if holes else 0


def write(row: Row) -> None:
    """Put a line in its place in the table, or a new one in place of it."""
    page = PAGE.read_text()
    lines = {line.fault: line for line in lines_in(page)} | {row.fault: line_of(row)}
    begin = page.index(HEAD)
    end = begin + len(text_of(lines_in(page)))
    in_order = [lines[name] for name in own_faults() if name in lines]
    PAGE.write_text(page[:begin] + text_of(in_order) + page[end:])


if __name__ == "__main__":
    sys.exit(main())
