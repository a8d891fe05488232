"""Documents of the control API as plain text for the command line. Pure."""
