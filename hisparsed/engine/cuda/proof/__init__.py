"""What runs on a device and is ours, compared with vLLM's own before it is trusted.

``python -m hisparsed.engine.cuda.proof`` is one short process for one GPU: the question comes in
as JSON, the answer goes out as JSON. ``question`` has both, ``verdict`` decides, ``kept`` keeps
the answers, ``ranks`` runs a process for each GPU. The rest runs inside that process, on scratch
memory and a small pinned region, without a model.
"""
