"""GPUs as a target: one rank per process, or several virtual ranks with a stream each on one card.

driver    the CUDA driver's calls, with errors as exceptions
launcher  compiled kernels, loaded once and launched with packed parameters
memory    device and host-visible memory, and symmetric memory: a class for each handle type
mailbox   file descriptors from process to process
streams   streams and events, and how long the arrays of launches live
nic       what the software NIC runs on
runtime   all of it behind nbep.host.target.base.Runtime; virtual ranks: one thread each
"""
