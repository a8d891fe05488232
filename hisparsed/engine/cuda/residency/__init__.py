"""Our residency resolver behind vLLM's HiSparse runtime in the GPU worker.

``leases``, ``positions``, ``group``, ``node`` and ``figures`` know tensors only; ``runtime`` and
``install`` know vLLM. Nothing here reads back from the GPU in a step.
"""
