"""What a GPU is made of: memory, threads, warps, blocks, copies that happen later, streams, and what can go wrong."""
