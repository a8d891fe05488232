"""Supervision of the engine: its life, its restarts, its values and its processes."""
