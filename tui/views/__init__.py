"""The content of the pages, as lines of styled text. Pure: no terminal, no clock, no network."""
