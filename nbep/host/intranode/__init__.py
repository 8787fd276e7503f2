"""The mode inside a node: dispatch and combine over rings, as tokens for training and prefill need them."""
