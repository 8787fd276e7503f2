"""Where DeepEP's main has its buffers: deep_ep.buffers.legacy that of v1.2.1, deep_ep.buffers.elastic ElasticBuffer."""
