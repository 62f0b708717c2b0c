"""vLLM as a sampler: in this process, or as a server elsewhere."""
