"""The page of a trace: one HTML file that needs nothing else, neither a network nor a server.

data.py    the run as JSON: events in columns           slots.py   rings, halves and queues, slot by slot
page.html  the parts of the page                        page.css   how they look
run.js     what can be asked of the data                rows.js    ranks, roles and warps
timeline.js, slots.js, now.js    draw, on canvases, what is there at a step        main.js   keys, pointer, slider
story.js   one token, step by step: what the page opens on; ../story.py has made it from the events
"""

from __future__ import annotations

import html
import json
from importlib.resources import files
from os import PathLike
from pathlib import Path

from nbep.trace.page.data import page_data
from nbep.trace.recorder import Recorder

SCRIPTS = ("run.js", "rows.js", "timeline.js", "slots.js", "now.js", "story.js", "main.js")


class Page:
    """A page of a run. A notebook shows it when it is the last value of a cell; `save` writes it to a file.

    Attributes: html: the whole page
    """

    def __init__(self, trace: Recorder, height: int = 760):
        self.html = page_html(trace)
        self._height = height

    def __repr__(self) -> str:
        return "<the page of a trace: a notebook shows it, save(path) writes it>"

    def save(self, path: str | PathLike[str]) -> Path:
        """Write the page; the path of the file."""
        path = Path(path)
        path.write_text(self.html, encoding="utf-8")
        return path

    def _repr_html_(self) -> str:
        style = f"width:100%;height:{self._height}px;border:0"
        return f'<iframe srcdoc="{html.escape(self.html)}" style="{style}"></iframe>'


def page_html(trace: Recorder) -> str:
    """The page as text: its parts put together, and the run in it."""
    # "<" would end the script; in JSON it stands in strings alone.
    data = json.dumps(page_data(trace), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    text = _part("page.html").replace("/* STYLE */", _part("page.css"))
    text = text.replace("/* SCRIPT */", "".join(map(_part, SCRIPTS)))
    return text.replace("/* DATA */", data)


def _part(name: str) -> str:
    return files(__name__).joinpath(name).read_text(encoding="utf-8")
