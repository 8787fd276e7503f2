"""Faults that nothing finds, and why: the step is not needed there, or the emulator does not show that it is missing.

`nbep check --faults` prints the reason where others have a finding. A fault that is neither found nor listed here is a
hole: in the emulator, in the scenarios, or in the kernel, which may not need the step.
"""

REASONS: dict[str, str] = {}
