"""Benchmarks: `nbep bench <name>` runs `nbep.bench.<name>.main(argv)`."""
