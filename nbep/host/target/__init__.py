"""Where a rank runs: `base` says what the host layer needs, one module per target provides it."""

from pathlib import Path

from nbep.emulator.machine.source import no_kernel_in

no_kernel_in(str(Path(__file__).parent))
