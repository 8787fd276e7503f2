"""Read the tables that `nbep demo` prints."""

import re


def checks_of(output: str) -> dict[str, str]:
    """Name -> pass or FAIL, from the table of checks."""
    return dict(re.findall(r"^ ?(\w[\w ,]*?) {2,}.*?\b(pass|FAIL)\b", output, re.MULTILINE))
