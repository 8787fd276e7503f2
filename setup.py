"""What pyproject.toml cannot say: the README as the package's description, whose reader has no tree of files.

[Litmus tests](records/litmus.md)  ->  Litmus tests (records/litmus.md)
"""

import re
from pathlib import Path

FIRST = "Paths of files, as docs/start.md, are those of the source.\n"
PICTURE = re.compile(r"!\[[^\]]*\]\((?!https?:)[^)]*\)\n*")
LINK = re.compile(r"\[([^\]]+)\]\((?!https?:)([^)#]*)(?:#[^)]*)?\)")


def description(readme: str) -> str:
    """The text without links and pictures that lead nowhere outside the source, and without comments."""

    def in_words(link: re.Match[str]) -> str:
        text, path = link.groups()
        return text if path in ("", text) else f"{text} ({path})"

    title, _, rest = PICTURE.sub("", re.sub(r"<!--.*?-->\n?", "", readme)).partition("\n\n")
    return f"{title}\n\n{FIRST}\n{LINK.sub(in_words, rest)}"


if __name__ == "__main__":
    from setuptools import setup  # a virtual environment of Python 3.12 has none, and a test imports this file

    readme = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    setup(long_description=description(readme), long_description_content_type="text/markdown")
