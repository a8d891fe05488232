"""What operators run alongside the daemon: install the service, examine the machine before a start.

Touches no running node and imports neither vLLM nor torch.
"""
