"""Where DeepEP's main has the Buffer of v1.2.1: deep_ep.buffers.legacy."""
