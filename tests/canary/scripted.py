"""A canary's engine that answers from a script; nothing is computed."""

from __future__ import annotations

from collections.abc import Callable

from hisparsed.canary.question import Answer, Question
from hisparsed.engine.messages import CanaryReport

RIGHT = (5, 6, 7, 8)
Reply = Callable[[Question], "tuple[int, ...] | Exception"]


class Scripted:
    """Answers what ``reply`` says; an exception is raised instead."""

    def __init__(self) -> None:
        self.asked: list[Question] = []
        self.reply: Reply = lambda question: RIGHT

    def tokens_of(self, text: str) -> list[int]:
        return list(text.encode())

    async def ask(self, question: Question) -> Answer:
        self.asked.append(question)
        tokens = self.reply(question)
        if isinstance(tokens, Exception):
            raise tokens
        steps = {"full": 0, "mixed": 0, "none": 0, question.residency: 3}
        seen = CanaryReport(**steps, scheduled_tokens=20, step_s=0.5)
        return Answer(tokens, 0 if question.recompute else 96, seen)
