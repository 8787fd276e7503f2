"""GPUs as a target: one rank per process, or several virtual ranks with a stream each on one card.

driver    the CUDA driver's calls, with errors as exceptions
launcher  compiled kernels, loaded once and launched with packed parameters
cache     compiled kernels on disk
memory    device and host-visible memory
peers     symmetric memory, a class for each handle type, and what of the driver each needs
mailbox   file descriptors from process to process
runtime   all of it behind nbep.host.target.base.Runtime
ranks     virtual ranks: one thread each
"""
