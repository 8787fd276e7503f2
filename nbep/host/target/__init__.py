"""Where a rank runs: `base` says what the host layer needs, one module per target provides it."""
