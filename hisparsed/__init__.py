"""hisparsed: runs one LLM-serving GPU node and moves its KV memory while requests run.

Embeds vLLM with HiSparse. Importing this package imports neither vLLM nor torch.
"""

__version__ = "0.2.0"
