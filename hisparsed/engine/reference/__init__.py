"""The reference node: vLLM's engine over a small sparse-MLA model that computes on the CPU."""
