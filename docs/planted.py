"""Write the table of docs/planted.md: in which of all schedules of a small run each broken step shows.

python docs/planted.py              takes some twenty minutes of CPU
python docs/planted.py --missing    only the steps that have no line yet; the others stay
"""

import sys
from pathlib import Path

PAGE = Path(__file__).resolve().with_name("planted.md")
sys.path.insert(0, str(PAGE.parent.parent))

from nbep.check.options import default_jobs  # noqa: E402
from nbep.check.planted import HEAD, look, reached_by, rows_in, text_of  # noqa: E402
from nbep.check.rows import lines_in  # noqa: E402
from nbep.check.search import workers  # noqa: E402


def main() -> None:
    lines = lines_in(PAGE.with_name("faults.md").read_text())
    reached = reached_by(lines)
    page = PAGE.read_text()
    begin = page[: page.index(HEAD)]
    rows = {row.fault: row for row in rows_in(page)} if "--missing" in sys.argv[1:] else {}
    tasks = [(line, tuple(reached[line.fault])) for line in lines if line.fault in reached and line.fault not in rows]
    with workers(default_jobs()) as each:
        for row in each(look, tasks):
            print(f"{row.fault}: {row.kind or 'nothing'} {row.schedule}", flush=True)
            rows[row.fault] = row
            PAGE.write_text(begin + text_of(rows[line.fault] for line in lines if line.fault in rows))
    print(f"{sum(row.run is not None for row in rows.values())} of {len(rows)} show")


if __name__ == "__main__":
    main()
