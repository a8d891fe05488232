"""vLLM inside hisparsed: how it starts, what runs inside it, what it reports.

``host/`` is the host memory and its ledger, ``compat/`` the differences between vLLM versions.
``cuda/``, ``reference/`` and ``simulated/`` are the kinds of node. Takes nothing from ``control``.
"""
