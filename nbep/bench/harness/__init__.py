"""What all benchmarks are made of.

command   the options, what a benchmark needs, and the ranks that it runs on
case      what is called, the bytes it moves, and what it is compared with: a case and a time make a row
clocks    CUDA events, the profiler, CUDA graphs, and the CPU's clock
push      the kernel that only copies, with which calls are compared
report    tables, lines, JSON and plots of rows
"""
