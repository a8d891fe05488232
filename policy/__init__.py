"""The policy engine: what an operator wants, what the node shows, and what should change.

Pure: no clock, no socket, no engine, and it imports neither vLLM nor torch.
"""
