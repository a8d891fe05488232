"""The journal: the decisions of every tick, and events; in memory and in SQLite."""
