"""What the canary finds: ``python -m tests.bench.canary [--json] [--save FILE | --load FILE]``.

Answers of the reference model under other summation orders and precisions are recorded, then the
verdict judges rounds that are drawn from them: how many of clean ones raise an alarm, and which
share of harmed prompts is found within two rounds. The table is in ``docs/canary.md``.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch

from hisparsed.canary.asker import LOGPROBS
from hisparsed.canary.round import make_prompt
from hisparsed.canary.verdict import (
    LEAST_ROUNDS,
    Baseline,
    Finding,
    Position,
    RecordedAnswer,
    judge,
    learn,
)
from tests.bench.canary_noise import Recorder, Recording, record

PROMPT = 128
ANSWER = 24
"""As the shipped policy asks on the reference node: twice the top-k, and 24 tokens."""
_ROUNDS_A_NODE = 100


@dataclass(frozen=True)
class Figures:
    """``alarms`` and ``suspects`` of ``rounds`` clean rounds; ``found``: share of the trials with
    each harm that ends in an alarm within two rounds."""

    rounds: int
    alarms: int
    suspects: int
    found: dict[str, float]
    trials: int
    noise: float


class _Bytes:
    def tokens_of(self, text: str) -> list[int]:
        return list(text.encode())


def canary_prompt() -> tuple[int, ...]:
    engine: Any = _Bytes()
    return make_prompt(engine, PROMPT)


class Draw:
    """Rounds from recorded answers. A prefix that one round computes is held in the next one."""

    def __init__(self, clean: Sequence[Sequence[RecordedAnswer]], rng: random.Random) -> None:
        self._clean = clean
        self._rng = rng
        self._held = rng.choice(clean)

    def round(self) -> tuple[RecordedAnswer, ...]:
        none, mixed = self._rng.sample(self._held, 2)
        self._held = self._rng.choice(self._clean)
        return none, mixed, self._rng.choice(self._held)

    def baseline(self) -> Baseline:
        return learn([answer for _ in range(LEAST_ROUNDS) for answer in self.round()])


def count_alarms(recording: Recording, rounds: int, seed: int) -> tuple[int, int]:
    """Alarms and suspicions of clean rounds, by nodes that each learn their baseline and then stop
    learning."""
    rng = random.Random(seed)
    alarms = suspects = 0
    for number in range(rounds):
        if number % _ROUNDS_A_NODE == 0:
            draw = Draw(recording.clean, rng)
            baseline = draw.baseline()
            before: list[tuple[RecordedAnswer, ...]] = []
        asked = draw.round()
        finding = judge(baseline, *before, asked)
        alarms += finding is Finding.CORRUPT
        suspects += finding is Finding.SUSPECT
        before = [] if finding is Finding.CLEAN else [asked]
    return alarms, suspects


def share_found(
    recording: Recording, trials: Sequence[Sequence[RecordedAnswer]], seed: int
) -> float:
    """Of ``trials``, answers of two rounds each."""
    rng = random.Random(seed)
    baselines = [Draw(recording.clean, rng).baseline() for _ in range(10)]
    found = sum(_is_found(rng.choice(baselines), trial) for trial in trials)
    return found / len(trials)


def _is_found(baseline: Baseline, trial: Sequence[RecordedAnswer]) -> bool:
    first, second = trial[:2], trial[2:]
    finding = judge(baseline, first)
    before = [] if finding is Finding.CLEAN else [first]
    return Finding.CORRUPT in (finding, judge(baseline, *before, second))


def measure(recording: Recording, *, rounds: int, seed: int = 0) -> Figures:
    alarms, suspects = count_alarms(recording, rounds, seed)
    return Figures(
        rounds=rounds,
        alarms=alarms,
        suspects=suspects,
        found={
            name: share_found(recording, trials, seed) for name, trials in recording.harmed.items()
        },
        trials=min(len(trials) for trials in recording.harmed.values()),
        noise=Draw(recording.clean, random.Random(seed)).baseline().noise,
    )


def table(figures: Figures) -> str:
    """Markdown."""
    lines = ["| wrong rows of the prompt | one layer | all layers |", "|---|--:|--:|"]
    names = list(dict.fromkeys(name.partition(",")[0] for name in figures.found))
    lines += [
        f"| {name} | {figures.found[f'{name}, one layer']:.0%} | "
        f"{figures.found[f'{name}, all layers']:.0%} |"
        for name in names
    ]
    return "\n".join(lines)


def to_json(recording: Recording) -> str:
    def plain(answer: RecordedAnswer) -> list[Any]:
        return [
            [at.token, [[token, value] for token, value in at.logprobs.items()]] for at in answer
        ]

    return json.dumps(
        {
            "clean": [[plain(one) for one in some] for some in recording.clean],
            "harmed": {
                name: [[plain(one) for one in some] for some in trials]
                for name, trials in recording.harmed.items()
            },
        }
    )


def from_json(text: str) -> Recording:
    def answer(plain: list[Any]) -> RecordedAnswer:
        return tuple(Position(token, dict(map(tuple, listed))) for token, listed in plain)

    read = json.loads(text)
    return Recording(
        [[answer(one) for one in some] for some in read["clean"]],
        {
            name: [[answer(one) for one in some] for some in trials]
            for name, trials in read["harmed"].items()
        },
    )


def _say(text: str, stream: TextIO = sys.stdout) -> None:
    stream.write(f"{text}\n")
    stream.flush()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.canary")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--save", type=Path, help="keep the recorded answers")
    parser.add_argument("--load", type=Path, help="judge answers that were kept")
    parser.add_argument("--rounds", type=int, default=10_000)
    parser.add_argument("--prefills", type=int, default=96, help="prompts that are computed")
    parser.add_argument("--answers", type=int, default=8, help="clean answers from each")
    parser.add_argument("--trials", type=int, default=192, help="of each harm")
    asked = parser.parse_args()
    if asked.load is not None:
        recording = from_json(asked.load.read_text("utf-8"))
    else:
        torch.set_num_threads(1)
        recording = record(
            Recorder(canary_prompt(), ANSWER, LOGPROBS, seed=1),
            prefills=asked.prefills,
            answers=asked.answers,
            trials=asked.trials,
            tell=lambda what: _say(what, sys.stderr),
        )
    if asked.save is not None:
        asked.save.write_text(to_json(recording), "utf-8")
    figures = measure(recording, rounds=asked.rounds)
    if asked.json:
        _say(json.dumps(figures.__dict__))
        return
    clean = sum(len(some) for some in recording.clean)
    _say(f"{clean} clean answers, noise {figures.noise:.3f} nats in the mean")
    _say(f"{figures.rounds} clean rounds: {figures.alarms} alarms, {figures.suspects} suspect")
    _say(f"found within two rounds, {figures.trials} trials each:\n{table(figures)}")


if __name__ == "__main__":
    main()
