"""What all benchmarks are made of.

command   the options, what a benchmark needs, and the ranks that it runs on
clocks    CUDA events, the profiler, CUDA graphs, and the CPU's clock
report    a case and a time make a row; tables, lines, JSON and plots of rows; the kernel that only copies, with
          which calls are compared
normal_calls, low_latency_calls   what is called in these modes
"""
