"""Commands that operators run next to the daemon: install the service, check the machine before a
start.

Touches no running node and imports neither vLLM nor torch.
"""
