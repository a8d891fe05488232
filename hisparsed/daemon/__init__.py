"""The daemon's life: start in order, serve, drain, stop. What runs inside is elsewhere."""
