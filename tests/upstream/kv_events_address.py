"""Publishers of KV events cannot be bound to one address: all of them, or none.

``ZmqEventPublisher`` binds an endpoint that has ``*`` or ``::`` in it and connects to any other, so
``tcp://127.0.0.1:5557`` listens nowhere. Over TCP only every address of the machine is possible,
also by default (``KVEventsConfig.endpoint``). Events name the token ids of prompts, and no key is
asked for.
"""

from __future__ import annotations

import socket

from tests.upstream.outcome import run


def listens(port: int) -> bool:
    with socket.socket() as client:
        client.settimeout(1.0)
        return client.connect_ex(("127.0.0.1", port)) == 0


def reproduce() -> str | None:
    from vllm.config import KVEventsConfig
    from vllm.distributed.kv_events import ZmqEventPublisher

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    publisher = ZmqEventPublisher(0, endpoint=f"tcp://127.0.0.1:{port}")
    try:
        bound = listens(port)
    finally:
        publisher.shutdown()
    if bound:
        return None
    return (
        f"A publisher with the endpoint tcp://127.0.0.1:{port} listens nowhere. The default "
        f"endpoint is {KVEventsConfig().endpoint}, every address of the machine."
    )


if __name__ == "__main__":
    run(reproduce)
