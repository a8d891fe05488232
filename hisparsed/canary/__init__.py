"""A request of the node's own whose answer must never change, and what to do when it does."""
