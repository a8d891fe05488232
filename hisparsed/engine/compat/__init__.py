"""Which vLLM hisparsed runs on, how versions differ, and what is refused.

The table of vLLM names that hisparsed touches, and its checks, are in ``tests/contract``.
"""
