"""A prefix computed on one reference node and decoded on another: prefill/decode disaggregation.

vLLM's KV-connector interface on both nodes, rows over a TCP connection between them. Rows are
addressed by token position, so the nodes may differ in block size and pools, not in the model.
"""
