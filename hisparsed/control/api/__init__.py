"""The control API: JSON over HTTP on a Unix socket, its routes, its server and its client."""
