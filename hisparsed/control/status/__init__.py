"""The status document of a node, what fills it, and its last two hours as numbers."""
