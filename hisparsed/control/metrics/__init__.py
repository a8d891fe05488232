"""Prometheus metrics of the control side."""
