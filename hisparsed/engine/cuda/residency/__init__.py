"""Our residency resolver behind vLLM's HiSparse runtime in the GPU worker.

``group``, ``figures`` and ``worker`` know tensors only; ``runtime`` and ``vllm_hooks`` know
vLLM. Nothing here reads back from the GPU in a step.
"""
