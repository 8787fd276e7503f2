"""Kernels of `ElasticBuffer`: one dispatch and one combine for training, prefill and decoding."""
