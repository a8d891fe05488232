"""The HTTP side of the OpenAI API: access, admission, errors, and the engine's application."""
