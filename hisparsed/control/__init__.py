"""The control side of the daemon: observe, decide, apply, explain.

Talks to the engine through ``EnginePort`` only. Imports neither vLLM nor torch.
"""
