"""The operator's view: a terminal application over the control API, live or from a journal.

``views`` turn documents into lines of text and are pure; ``widgets`` and ``screens`` draw them.
Imports nothing else of hisparsed: what it knows of a node, the API told it.
"""
