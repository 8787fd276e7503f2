"""The network over a NIC whose queues the GPU fills itself (InfiniBand GPUDirect Async).

 entry         what is written into a send queue
 queue_pair    whose slot is which, and in which order they go
 doorbell      how the NIC hears of it
 completion    how the GPU hears that it is done
 transport     the seam's functions, made of these

The same code fills the queues of a real NIC and those that `nic` serves, a kernel: a description in memory says where
queues, registers and keys are.
"""
