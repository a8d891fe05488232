"""Compares hisparsed's device code with vLLM's before it is used.

``python -m hisparsed.engine.cuda.proof`` is one short process for one GPU: the question comes in
as JSON, the answer goes out as JSON. ``question`` has both, ``verdict`` decides, ``kept`` keeps
the answers, ``ranks`` runs a process for each GPU. The rest runs inside that process, on scratch
memory and a small pinned region, without a model.
"""
