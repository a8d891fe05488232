"""The CUDA node: vLLM's own GPU workers under our control."""
