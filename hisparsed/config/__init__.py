"""The node's configuration: what to run, with how much memory, and where it listens.

Reads and checks; starts nothing. The policy has its own document, in `hisparsed.policy`.
"""
