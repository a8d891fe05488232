"""The doctor of a serving node: it checks again from time to time and on request.

Each check runs in its own thread, because a driver may take minutes to answer. Events report new
findings and findings that are gone. The checks are passed in; nothing is repaired here and no
request waits. ``DoctorApi`` has the routes.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from hisparsed.control.api.endpoint import ActorBody, Endpoint, parse_body
from hisparsed.control.api.errors import ApiError
from hisparsed.control.api.socket import recorded_actor
from hisparsed.control.events import DAEMON, EventRecorder
from hisparsed.control.journal.records import jsonable
from hisparsed.control.status.current import TickOutcome
from hisparsed.control.status.document import DoctorFinding, DoctorStatus, Severity
from hisparsed.policy.events import EventKind

log = logging.getLogger("hisparsed.doctor")

LOOK_EVERY_S = 300.0
LOOK_LIMIT_S = 30.0
_WORST_FIRST = tuple(reversed(Severity))
_REPORTED = (Severity.WARNING, Severity.FATAL)


class Doctor(Protocol):
    """Findings of each check, also those without a fault."""

    @property
    def findings(self) -> Sequence[DoctorFinding]:
        """Unix seconds of the latest run; the first is before the node takes anything."""

    def look(self) -> Sequence[DoctorFinding]:
        """Check again what can change while a node runs; may block, and may raise."""


class DoctorBusyError(RuntimeError):
    """A run of the doctor does not end."""


class DoctorWatch:
    """``clock`` is monotonic seconds, ``wall_clock`` Unix seconds. Call ``watch`` after ticks."""

    def __init__(
        self,
        doctor: Doctor,
        recorder: EventRecorder,
        *,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        every_s: float = LOOK_EVERY_S,
        limit_s: float = LOOK_LIMIT_S,
    ) -> None:
        self._doctor = doctor
        self._recorder = recorder
        self._clock = clock
        self._wall_clock = wall_clock
        self._every_s = every_s
        self._limit_s = limit_s
        self._looked_s = clock()
        self._findings = list(doctor.findings)
        self._at_unix_s = max((one.seen_unix_s for one in self._findings), default=wall_clock())
        self._error: str | None = None
        self._thread: threading.Thread | None = None
        self._look: asyncio.Task[None] | None = None
        self._report_changes([], DAEMON)

    def status(self) -> DoctorStatus:
        found = [one for one in self._findings if one.severity is not Severity.OK]
        return DoctorStatus(
            at_unix_s=self._at_unix_s,
            looking=self._look is not None,
            error=self._error,
            checks=len(self._findings),
            fatal=sum(one.severity is Severity.FATAL for one in found),
            warnings=sum(one.severity is Severity.WARNING for one in found),
            findings=sorted(found, key=lambda one: _WORST_FIRST.index(one.severity)),
        )

    def watch(self, _outcome: TickOutcome) -> None:
        """Start a run if one is due."""
        if self._look is None and self._clock() - self._looked_s >= self._every_s:
            self._begin(DAEMON)

    async def look(self, *, actor: str) -> DoctorStatus:
        """Run now; a request during a run gets the result of that run. Raises
        ``DoctorBusyError``."""
        task = self._look or self._begin(actor)
        await asyncio.shield(task)
        if self._hanging:
            raise DoctorBusyError(self._error or "the doctor does not respond")
        return self.status()

    @property
    def _hanging(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _begin(self, actor: str) -> asyncio.Task[None]:
        self._look = asyncio.create_task(self._look_once(actor))
        return self._look

    async def _look_once(self, actor: str) -> None:
        self._looked_s = self._clock()
        try:
            if not self._hanging:
                found = await asyncio.wait_for(self._in_thread(), self._limit_s)
                before, self._findings = self._findings, list(found)
                self._at_unix_s, self._error = self._wall_clock(), None
                self._report_changes(before, actor)
        except TimeoutError:
            self._error = (
                f"a check of the machine has not returned for {self._limit_s:g}s; the GPU driver "
                "or a disk may hang"
            )
            log.warning("The doctor: %s.", self._error)
        except Exception as error:
            self._error = f"the machine could not be checked: {type(error).__name__}: {error}"
            log.warning("The doctor: %s.", self._error)
        finally:
            self._look = None

    async def _in_thread(self) -> Sequence[DoctorFinding]:
        """Not in the loop's thread pool: its shutdown would wait for a run that hangs."""
        loop = asyncio.get_running_loop()
        result: asyncio.Future[Sequence[DoctorFinding]] = loop.create_future()

        def settle(found: Sequence[DoctorFinding] | Exception) -> None:
            self._thread = None  # this thread ends now
            if result.done():
                return
            if isinstance(found, Exception):
                result.set_exception(found)
            else:
                result.set_result(found)

        def work() -> None:
            found: Sequence[DoctorFinding] | Exception
            try:
                found = self._doctor.look()
            except Exception as error:
                found = error
            try:
                loop.call_soon_threadsafe(settle, found)
            except RuntimeError:
                log.debug("The node ended before the doctor was back.")

        thread = threading.Thread(target=work, name="doctor", daemon=True)
        self._thread = thread
        thread.start()
        return await result

    def _report_changes(self, before: Sequence[DoctorFinding], actor: str) -> None:
        """By check and severity, so that changing figures do not repeat a finding."""
        old, new = _by_check(before), _by_check(self._findings)
        for one in (new[key] for key in new if key not in old):
            fix = f" Fix: {one.fix}." if one.fix else ""
            sentence = f"The doctor found ({one.severity}, {one.check}): {one.what}.{fix}"
            self._recorder.event(EventKind.DOCTOR_FOUND, sentence, actor=actor)
        over = {check for check, _ in old} - {check for check, _ in new}
        for check in sorted(over):
            sentence = f"The doctor no longer finds a problem with {check} any more."
            self._recorder.event(EventKind.DOCTOR_CLEARED, sentence, actor=actor)


def _by_check(findings: Sequence[DoctorFinding]) -> dict[tuple[str, Severity], DoctorFinding]:
    return {(one.check, one.severity): one for one in findings if one.severity in _REPORTED}


class DoctorApi:
    def __init__(self, watch: DoctorWatch) -> None:
        self._watch = watch

    def routes(self) -> list[Endpoint]:
        return [
            Endpoint(
                "/v1/doctor",
                self.findings,
                summary="Findings of the doctor: before the start, and at the last check.",
                answer=DoctorStatus,
            ),
            Endpoint(
                "/v1/doctor/run",
                self.run,
                method="POST",
                summary="Check again now; the response follows the check.",
                answer=DoctorStatus,
                body=ActorBody,
                changes=True,
                errors=("not_ready",),
            ),
        ]

    async def findings(self, request: Request) -> Response:
        return JSONResponse(jsonable(self._watch.status()))

    async def run(self, request: Request) -> Response:
        body = await parse_body(request, ActorBody)
        actor = recorded_actor(request.scope, body.actor)
        try:
            return JSONResponse(jsonable(await self._watch.look(actor=actor)))
        except DoctorBusyError as error:
            raise ApiError(503, "not_ready", str(error)) from None
