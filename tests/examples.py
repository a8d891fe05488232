"""How many examples a test tries: few in `make test`, all in `make test-long` and with `-m ""`.

A test that asks for `examples` has the marker `examples`, which makes it one of the long ones too.
"""

ALL = [False]
"""Set by tests/conftest.py before any test is read."""


def examples(quick: int, full: int) -> int:
    return full if ALL[0] else quick
