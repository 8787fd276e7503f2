"""What is run again and again: inputs, trips through dispatch and combine, and what must come out of them.

`nbep check`, the benchmarks, the demo and the tests use the same ones.
"""
