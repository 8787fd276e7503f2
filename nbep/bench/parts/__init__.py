"""Parts of benchmarks. A package in nbep.bench is no benchmark: the command line lists modules only."""
