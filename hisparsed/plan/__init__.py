"""Sizes a node by arithmetic: what fits, which limit binds, what memory a session costs.

Imports neither vLLM nor torch; the layout that it counts is checked against vLLM's in tests.
"""
