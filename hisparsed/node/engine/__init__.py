"""Supervision of the engine: its phases, its restarts, its values and its processes."""
