"""Which places a rank can run in, and which of them work here."""

from __future__ import annotations

from nbep.device.extras import what_is_missing

TARGETS = ("auto", "emulator", "cuda")


def resolve_target(target: str) -> str:
    """ "cuda" or "emulator"; "auto" is cuda where a GPU can be used.

    Raises: ValueError for another target; RuntimeError if target is "cuda" and no GPU can be used
    """
    if not isinstance(target, str) or target not in TARGETS:
        raise ValueError(f"target: got {target!r}; must be one of {', '.join(TARGETS)}")
    if target == "emulator":
        return target
    reason = why_no_gpu()
    if reason is None:
        return "cuda"
    if target == "cuda":
        raise RuntimeError(f"target: got cuda; no GPU can be used here: {reason}")
    return "emulator"


def why_no_gpu() -> str | None:
    """Why no GPU can be used here, in one line; None if one can."""
    try:
        from nbep.host.target.cuda.driver import unusable_reason
    except ImportError as error:  # macOS has no cuda-python
        return what_is_missing(error) or str(error)
    reason = unusable_reason()
    return None if reason is None else reason.partition("\n")[0]
