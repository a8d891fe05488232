"""NIXL for tests: an agent that copies between processes of one machine."""
