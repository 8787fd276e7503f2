"""The low-latency mode: dispatch and combine of few tokens, to experts and back, in one kernel each; `_once`: deduplicated."""
