"""The ring of the documentation, so small that all of its schedules can be run."""

from pathlib import Path

import pytest

RING = str(Path(__file__).resolve().parents[2] / "docs/examples/ring.py")
ONE_LANE = (
    ("LANES = 4, 32", "LANES = 2, 1"),
    ("FULL_MASK)", "1)"),
    ("vote_all(FULL_MASK", "vote_all(1"),
    ("NUM_BYTES = SLOTS + NUM_SLOTS * ROW_BYTES", "NUM_BYTES = 256"),
)


@pytest.fixture
def ring(tmp_path, monkeypatch):
    """The ring of the documentation with two slots and one lane."""
    monkeypatch.chdir(tmp_path)
    text = Path(RING).read_text()
    for old, new in ONE_LANE:
        assert old in text
        text = text.replace(old, new)
    Path("small_ring.py").write_text(text)
    return "small_ring.py"
