"""The journal: what every tick decided, and events alongside the ticks; in memory and in SQLite."""
