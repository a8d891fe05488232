"""The errors an operator is meant to read: printed as one clean line, exit code 2."""


class UserError(Exception):
    """Something a person can put right: the message names place, value and what is right."""


class EngineStartError(UserError):
    """An engine whose settings were accepted did not start; the same may work another time.

    ``why`` is the reason alone, for those who say themselves that it did not start.
    """

    def __init__(self, why: str) -> None:
        super().__init__(f"the engine did not start: {why}")
        self.why = why
