"""A policy document that goes away or turns into something else: the last good one stays."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from control_node import POLICY, Node
from state_node import not_permitted

from hisparsed.control import live_policy
from hisparsed.control.file_watch import Watched, fingerprint, watch_files
from hisparsed.policy.document import read_document
from hisparsed.policy.yaml_tree import MAX_BYTES

OTHER = POLICY.replace("tick: 1s", "tick: 2s")
LOOKS = 5
pytestmark = pytest.mark.timeout(60)  # a reader of a pipe would wait forever


class Looks:
    """Lets the watch look when the test asks for it; ``folders`` has what it watches."""

    def __init__(self, *files: Watched) -> None:
        self.folders: list[set[Path]] = []
        self._batches: asyncio.Queue[None] = asyncio.Queue()
        self._looked = asyncio.Event()
        self.task = asyncio.create_task(
            watch_files(files, changes=self._changes, sleep=lambda _s: asyncio.sleep(0))
        )

    async def _changes(self, *folders: Path) -> AsyncIterator[Any]:
        self.folders.append(set(folders))
        while True:
            self._looked.set()
            await self._batches.get()
            yield set()

    async def first(self) -> None:
        await asyncio.wait_for(self._looked.wait(), 20)

    async def look(self, times: int = 1) -> None:
        for _ in range(times):
            self._looked.clear()
            self._batches.put_nowait(None)
            await self.first()


@pytest.fixture
def node(tmp_path: Path) -> Node:
    """Its policy has its own folder."""
    (tmp_path / "etc").mkdir()
    return Node(tmp_path / "etc")


@pytest.fixture
async def looks(node: Node) -> AsyncIterator[Looks]:
    looks = Looks(Watched(node.policy_path, node.operator.reload_if_changed))
    await looks.first()
    yield looks
    assert not looks.task.done(), "the watch goes on whatever it met"
    looks.task.cancel()
    await asyncio.gather(looks.task, return_exceptions=True)


def kinds(node: Node) -> list[str]:
    return [event.kind.value for event in reversed(node.journal.recent_events(100))]


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        path.rmdir()
    else:
        path.unlink(missing_ok=True)


# --- what a document can turn into --------------------------------------------------


def gone(_: Path) -> None:
    pass


def a_folder(path: Path) -> None:
    path.mkdir()


def pipe(path: Path) -> None:
    os.mkfifo(path)


def device_without_end(path: Path) -> None:
    path.symlink_to("/dev/zero")


def circle_of_links(path: Path) -> None:
    path.symlink_to(path.name)


def link_to_nothing(path: Path) -> None:
    path.symlink_to("nothing")


def empty(path: Path) -> None:
    path.touch()


def gibibyte(path: Path) -> None:
    path.touch()
    os.truncate(path, 2**30)


def no_text(path: Path) -> None:
    path.write_bytes(b"\x00\xff" * 500)


BECOMES = {
    gone: "there is no such file",
    a_folder: "is a folder",
    pipe: "is a pipe or a device",
    device_without_end: "is a pipe or a device",
    circle_of_links: "cannot be read: Too many levels of symbolic links",
    link_to_nothing: "there is no such file",
    empty: "is empty",
    gibibyte: "larger than 1MiB",
    no_text: "is not UTF-8",
}


@pytest.mark.parametrize(("become", "says"), BECOMES.items())
async def test_the_last_good_policy_stays_and_it_is_told_once(
    node: Node, looks: Looks, become: Callable[[Path], None], says: str
) -> None:
    await node.loop.start()
    good = node.source.in_force
    remove(node.policy_path)
    become(node.policy_path)
    for _ in range(LOOKS):
        await looks.look()
        await node.ticks(1)
    assert node.source.in_force.policy == good.policy
    assert node.source.active.generation == 1
    assert kinds(node).count("policy-rejected") == 1
    assert says in (node.source.last_error or "")
    assert str(node.policy_path) in (node.source.last_error or "")
    remove(node.policy_path)
    node.policy_path.write_text(OTHER)
    await looks.look(2)
    await node.ticks(1)
    assert node.source.active.value.tick == 2.0
    assert node.source.last_error is None
    assert kinds(node)[-2:] == ["policy-rejected", "policy-loaded"]


@pytest.mark.parametrize("become", BECOMES)
def test_a_reload_that_somebody_asks_for_answers_too(
    node: Node, become: Callable[[Path], None]
) -> None:
    remove(node.policy_path)
    become(node.policy_path)
    reload = node.operator.reload(actor="ann")
    assert reload.outcome.value == "rejected"
    assert reload.active.generation == 1


async def test_a_document_that_may_not_be_read_is_told_once(node: Node, looks: Looks) -> None:
    with not_permitted(node.folder):
        await looks.look(LOOKS)
        assert "cannot be read: Permission denied" in (node.source.last_error or "")
    await looks.look()
    assert kinds(node) == ["policy-rejected", "policy-loaded"]
    assert node.source.last_error is None


def test_of_a_file_without_end_only_the_beginning_is_read(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    gibibyte(path)
    assert len(read_document(path)) == MAX_BYTES + 1
    before = fingerprint(path)
    os.truncate(path, 2**31)
    assert fingerprint(path) == before, "it is refused for the same reason"
    os.truncate(path, MAX_BYTES)
    assert fingerprint(path) != before


SURROGATE = r'"a\ud800"'
BAD_VALUES = {
    "tick: 1e300": "tick: 1e+300 is out of range; times are 0, or from 1ms to 3650d",
    f"mode: {SURROGATE}": "has half of a character",
    f"rebalance: {{strategy: {SURROGATE}}}": "has half of a character",
    f"{SURROGATE}: 1": "has half of a character",
    f"schedules: [{SURROGATE}]": "has half of a character",
}


@pytest.mark.parametrize(("line", "says"), BAD_VALUES.items())
async def test_one_bad_value_costs_one_document(
    node: Node, looks: Looks, line: str, says: str
) -> None:
    """Every view of it can be sent, the journal is written, and the next document counts."""
    await node.open()
    await node.loop.start()
    node.policy_path.write_text(f"version: 1\n{line}\n")
    await looks.look(LOOKS)
    await node.ticks(1)
    assert kinds(node).count("policy-rejected") == 1
    assert says in (node.source.last_error or "")
    transport = httpx.ASGITransport(app=node.api.application())
    async with httpx.AsyncClient(transport=transport, base_url="http://node") as http:
        for path in ("/v1/status", "/v1/policy", "/v1/journal/events"):
            answer = await http.get(path)
            assert (answer.status_code, says in answer.text) == (200, True), path
    node.policy_path.write_text(OTHER)
    await looks.look()
    assert node.source.active.value.tick == 2.0
    await node.close()
    assert (node.journal.health.error, node.journal.health.dropped) == (None, 0)


async def test_a_document_on_which_the_daemon_fails_is_rejected_like_any_other(
    node: Node, looks: Looks, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise ArithmeticError("half of \ud800")

    monkeypatch.setattr(live_policy, "check_policy", fails)
    node.policy_path.write_text(OTHER)
    await looks.look(LOOKS)
    monkeypatch.undo()
    assert (node.source.active.generation, node.source.reload_failures) == (1, 1)
    assert kinds(node) == ["policy-rejected"]
    assert "cannot be judged (ArithmeticError: half of \\ud800)" in (node.source.last_error or "")
    node.policy_path.write_text(OTHER + "# again\n")
    await looks.look()
    assert node.source.active.value.tick == 2.0


@pytest.fixture
def odd_folder(tmp_path: Path) -> Path:
    """A folder whose name is not UTF-8."""
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/no\xfftext"))
    folder.mkdir()
    return folder


async def test_a_policy_in_a_folder_whose_name_is_no_text_is_shown_like_any_other(
    tmp_path: Path, odd_folder: Path
) -> None:
    node = Node(odd_folder, state=tmp_path / "state")
    await node.loop.start()
    node.policy_path.write_text("version: 1\ntick: 1e300\n")
    node.operator.reload_if_changed()
    await node.ticks(1)
    transport = httpx.ASGITransport(app=node.api.application())
    async with httpx.AsyncClient(transport=transport, base_url="http://node") as http:
        for path in ("/v1/status", "/v1/policy", "/v1/journal/events"):
            answer = await http.get(path)
            assert answer.status_code == 200, path
            assert "no\\udcfftext" in answer.text.replace("\\\\", "\\"), path


# --- its folder ---------------------------------------------------------------------


@contextmanager
def moved(folder: Path) -> Iterator[None]:
    elsewhere = folder.with_name("elsewhere")
    folder.rename(elsewhere)
    yield
    folder.mkdir()


@contextmanager
def removed(folder: Path) -> Iterator[None]:
    shutil.rmtree(folder)
    yield
    folder.mkdir()


@contextmanager
def a_file_now(folder: Path) -> Iterator[None]:
    shutil.rmtree(folder)
    folder.write_text("a file")
    yield
    folder.unlink()
    folder.mkdir()


@pytest.mark.parametrize("lost", [moved, removed, a_file_now])
async def test_a_folder_that_goes_and_comes_back_is_watched_again(
    node: Node, looks: Looks, lost: Any
) -> None:
    with lost(node.folder):
        await looks.look(LOOKS)
        assert looks.folders[-1] == set()
        assert node.source.active.generation == 1
    node.policy_path.write_text(OTHER)
    await looks.look()
    assert looks.folders[-1] == {node.folder}
    assert node.source.active.value.tick == 2.0
    assert kinds(node) == ["policy-rejected", "policy-loaded"]


async def test_a_folder_that_was_made_anew_between_two_looks_is_watched_anew(
    node: Node, looks: Looks
) -> None:
    with moved(node.folder):
        pass
    node.policy_path.write_text(OTHER)
    await looks.look()
    assert looks.folders == [{node.folder}, {node.folder}]
    assert node.source.active.value.tick == 2.0


async def test_a_folder_replaced_by_a_link_is_followed(node: Node, looks: Looks) -> None:
    """As a mounted ConfigMap does, and tools that keep versions of a folder."""
    release = node.folder.with_name("release-2")
    with removed(node.folder):
        release.mkdir()
        (release / "policy.yaml").write_text(OTHER)
    node.folder.rmdir()
    node.folder.symlink_to(release)
    await looks.look()
    assert node.source.active.value.tick == 2.0
    assert looks.folders[-1] == {node.folder, release}
    third = node.folder.with_name("release-3")
    third.mkdir()
    (third / "policy.yaml").write_text(POLICY)
    node.folder.unlink()
    node.folder.symlink_to(third)
    await looks.look()
    assert node.source.active.value.tick == 1.0
    assert looks.folders[-1] == {node.folder, third}
    assert kinds(node) == ["policy-loaded", "policy-loaded"]
