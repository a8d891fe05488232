"""The operator's view: a terminal application over the control API, live or from a journal.

``views`` turn documents into lines of text and are pure; ``widgets`` and ``screens`` draw them.
Imports no other part of hisparsed: all that it shows of a node comes from the API.
"""
