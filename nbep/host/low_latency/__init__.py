"""The low-latency mode: dispatch and combine of few tokens, as decoding needs them."""
