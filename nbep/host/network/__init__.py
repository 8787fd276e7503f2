"""What a transport of nbep.device.network needs from the host."""
