"""What the pages show, as lines of styled text. Pure: no terminal, no clock, no network."""
