"""Names that both sides of the engine use; imports nothing."""

SERVED_MODEL_NAME = "hisparsed-reference"
"""What clients ask the reference node for."""
