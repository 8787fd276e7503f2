"""The low-latency mode: dispatch and combine of few tokens, in one kernel each; and in others with deduplicate."""
