"""The process of one node: service manager, ports, OpenAI API, supervision of the engine."""
