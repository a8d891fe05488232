"""The journal: what every tick decided, and events beside the ticks; in memory and in SQLite."""
