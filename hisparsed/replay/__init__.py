"""Replays recorded traffic against any OpenAI completions endpoint and measures what came back.

`trace` reads, `scale` and `prompt` turn block ids into token ids, `runner` keeps the recorded order
and pauses, `client` talks HTTP, `results` and `summary` say what happened. Not a load generator of
invented traffic, and it knows nothing about the node that answers.
"""
