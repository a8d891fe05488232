"""What draws lines and tables, and takes keys and the mouse. Knows no node."""
