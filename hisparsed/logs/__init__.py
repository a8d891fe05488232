"""The log of every process of a node: form, stable ids, privacy, and the latest lines in memory.

Needs no engine and no control side, so both use it. Imports nothing of hisparsed.
"""
