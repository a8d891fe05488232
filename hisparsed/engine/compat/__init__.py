"""The vLLM versions that hisparsed runs on, their differences, and the refusal of others.

The table of vLLM names that hisparsed touches, and its checks, are in ``tests/contract``.
"""
