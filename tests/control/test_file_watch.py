"""Documents that change on disk: editors, links swapped by Kubernetes, files that go and return."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from hisparsed.config.node import NodeConfig
from hisparsed.control.file_watch import NodeFile, Watched, folders_of, watch_files
from hisparsed.control.operator import FILE_WATCH
from hisparsed.policy.document import Loaded, load_document
from hisparsed.policy.keys import PendingRestart
from hisparsed.policy.problems import ConfigError

OTHER = "version: 1\ntick: 2s\n"


class Changes:
    """Hands out a batch for each change that a test says there was."""

    def __init__(self) -> None:
        self.folders: list[tuple[Path, ...]] = []
        self._batches: asyncio.Queue[bool] = asyncio.Queue()
        self._looked = asyncio.Event()

    async def watch(self, *folders: Path) -> AsyncIterator[Any]:
        self.folders.append(folders)
        while True:
            self._looked.set()
            if not await self._batches.get():
                raise OSError(28, "inotify watch limit reached")
            yield set()

    async def tell(self, *, works: bool = True) -> None:
        """Return when the watch has looked and waits again."""
        self._looked.clear()
        self._batches.put_nowait(works)
        await asyncio.wait_for(self._looked.wait(), 5)


@pytest.fixture
async def changes(node: Any) -> AsyncIterator[Changes]:
    told = Changes()
    file = Watched(node.policy_path, node.operator.reload_if_changed)
    task = asyncio.create_task(
        watch_files([file], changes=told.watch, sleep=lambda _s: asyncio.sleep(0))
    )
    await asyncio.wait_for(told._looked.wait(), 5)
    yield told
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def kinds(node: Any) -> list[str]:
    return [event.kind.value for event in reversed(node.journal.recent_events(100))]


async def test_an_edit_in_place_is_loaded(node: Any, changes: Changes) -> None:
    node.policy_path.write_text(OTHER)
    await changes.tell()
    assert node.source.active.value.tick == 2.0
    (event,) = node.journal.recent_events(10)
    assert (event.kind.value, event.actor) == ("policy-loaded", FILE_WATCH)


async def test_a_file_that_is_replaced_is_loaded(node: Any, changes: Changes) -> None:
    new = node.folder / ".policy.yaml.swp"
    new.write_text(OTHER)
    new.replace(node.policy_path)
    await changes.tell()
    assert node.source.active.value.tick == 2.0


async def test_other_files_of_the_folder_change_nothing(node: Any, changes: Changes) -> None:
    (node.folder / "notes.txt").write_text("hello")
    await changes.tell()
    node.policy_path.touch()
    await changes.tell()
    assert kinds(node) == []


async def test_a_bad_edit_is_rejected_once_and_mended(node: Any, changes: Changes) -> None:
    good = node.policy_path.read_text()
    node.policy_path.write_text("version: 1\ntick: soon\n")
    for _ in range(3):
        await changes.tell()
    assert (node.source.reload_failures, node.source.rejection.actor) == (1, FILE_WATCH)
    assert node.source.active.generation == 1
    node.policy_path.write_text(good)
    await changes.tell()
    assert node.source.rejection is None
    assert kinds(node) == ["policy-rejected", "policy-loaded"]
    (event, *_) = node.journal.recent_events(1)
    assert "generation 1 again" in event.sentence


async def test_what_somebody_reloaded_is_not_reloaded_again(node: Any, changes: Changes) -> None:
    node.policy_path.write_text("version: 1\ntick: soon\n")
    node.operator.reload(actor="ann")
    await changes.tell()
    assert node.source.reload_failures == 1


async def test_a_file_that_is_removed_and_comes_back(node: Any, changes: Changes) -> None:
    node.policy_path.unlink()
    await changes.tell()
    assert "no such file" in node.source.rejection.error
    assert node.source.active.value.tick == 1.0
    node.policy_path.write_text(OTHER)
    await changes.tell()
    assert (node.source.rejection, node.source.active.value.tick) == (None, 2.0)


async def test_a_swapped_link_is_followed(make_node: Callable[[str], Any], tmp_path: Path) -> None:
    """A mounted ConfigMap: policy.yaml -> ..data/policy.yaml, ..data -> a folder with a date."""
    node = make_node(OTHER)
    for name, text in (("..one", OTHER), ("..two", "version: 1\ntick: 3s\nstale_after: 9s\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "policy.yaml").write_text(text)
    (tmp_path / "..data").symlink_to("..one")
    node.policy_path.unlink()
    node.policy_path.symlink_to("..data/policy.yaml")
    told = Changes()
    file = Watched(node.policy_path, node.operator.reload_if_changed)
    task = asyncio.create_task(watch_files([file], changes=told.watch))
    await asyncio.wait_for(told._looked.wait(), 5)
    assert set(told.folders[-1]) == {tmp_path, tmp_path / "..one"}
    (tmp_path / "..new").symlink_to("..two")
    (tmp_path / "..new").replace(tmp_path / "..data")
    await told.tell()
    assert node.source.active.value.tick == 3.0
    assert set(told.folders[-1]) == {tmp_path, tmp_path / "..two"}
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_where_nothing_can_be_watched_it_still_looks(
    node: Any, changes: Changes, caplog: pytest.LogCaptureFixture
) -> None:
    node.policy_path.write_text(OTHER)
    await changes.tell(works=False)
    assert node.source.active.value.tick == 2.0
    await changes.tell(works=False)
    assert caplog.text.count("cannot be watched") == 1
    assert "inotify watch limit reached" in caplog.text


def test_folders_that_are_gone_are_left_out(tmp_path: Path) -> None:
    gone = Watched(tmp_path / "none" / "policy.yaml", lambda: None)
    here = Watched(tmp_path / "policy.yaml", lambda: None)
    assert set(folders_of([gone, here])) == {tmp_path}


async def test_the_real_watch_notices_a_replaced_file(tmp_path: Path) -> None:
    path, other = tmp_path / "policy.yaml", tmp_path / "new"
    path.write_text("1")
    seen: asyncio.Queue[str] = asyncio.Queue()
    task = asyncio.create_task(
        watch_files([Watched(path, lambda: seen.put_nowait(path.read_text()))])
    )
    try:
        assert await asyncio.wait_for(seen.get(), 5) == "1"
        for _ in range(200):
            # Repeatedly, since the watch is set up in a thread without a sign that it is ready.
            other.write_text("2")
            other.replace(path)
            try:
                assert await asyncio.wait_for(seen.get(), 0.2) == "2"
                break
            except TimeoutError:
                continue
        else:
            pytest.fail("the replaced file was never looked at")
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


NODE = "host_budget: 1GiB\ndrain_timeout: 2m\nlog: {level: info}\n"


@pytest.fixture
def node_file(node: Any, tmp_path: Path) -> tuple[NodeFile, Path]:
    path = tmp_path / "hisparsed.yaml"
    path.write_text(NODE)

    def load(document: Path) -> NodeConfig:
        loaded: Loaded[NodeConfig] = load_document(document, NodeConfig)
        return loaded.value

    return NodeFile(path, load(path), node.recorder, load=load), path


def test_what_runs_needs_no_restart(node: Any, node_file: Any) -> None:
    watch, path = node_file
    watch.look()
    path.write_text(NODE + "# a comment\n")
    watch.look()
    assert watch.pending == ()
    assert kinds(node) == []


def test_a_changed_node_document_is_pending_until_a_restart(node: Any, node_file: Any) -> None:
    watch, path = node_file
    path.write_text("host_budget: 2GiB\ndrain_timeout: 90s\nlog: {level: info}\n")
    watch.look()
    watch.look()
    assert watch.pending == (
        PendingRestart("host_budget", "1GiB", "2GiB"),
        PendingRestart("drain_timeout", "2m", "1m30s"),
    )
    assert kinds(node) == ["pending-restart"]
    path.write_text(NODE)
    watch.look()
    assert watch.pending == ()
    (event, *_) = node.journal.recent_events(1)
    assert "No restart is pending" in event.sentence


def test_a_node_document_with_which_a_restart_would_fail_is_told(node: Any, node_file: Any) -> None:
    watch, path = node_file
    path.write_text("host_budget: lots\n")
    watch.look()
    watch.look()
    assert watch.pending == ()
    (event,) = node.journal.recent_events(10)
    assert "a restart would fail" in event.sentence
    assert "hisparsed.yaml:1: host_budget" in event.sentence
    with pytest.raises(ConfigError):
        load_document(path, NodeConfig)
