"""Where every cell lives. Offsets are defined here once; host and device import the same functions."""
