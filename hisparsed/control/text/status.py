"""The status document as plain text: the whole page, the engine's state, the canary. Pure.

No colours and no terminal control. Also the forms that all pages share: times, settings, values,
and lines with a name in front.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime

from hisparsed.control.status.document import (
    CanaryRun,
    CanaryStatus,
    DoctorStatus,
    EngineState,
    EngineStatus,
    LeverStatus,
    PolicyStatus,
    Status,
)
from hisparsed.engine.cuda.nvml import GpusStatus
from hisparsed.engine.kernel_choice import KernelsStatus
from hisparsed.policy.derived import Derived, PoolFigures, PoolsMemory
from hisparsed.policy.schedules import Scalar
from hisparsed.policy.signals import HotBuffers, Requests, Reserve, SampledRows, Snapshot
from hisparsed.policy.units import counted, format_bytes, format_duration, format_fraction


def engine_lines(life: EngineStatus) -> Iterator[str]:
    """One line if nothing is wrong and never was; else more lines."""
    restarts = counted(life.restarts_total, "restart")
    counts = f"{restarts}, {life.planned_restarts_total} of them asked for"
    took = ""
    if life.last_start_s is not None:
        took = f", the last start took {format_duration(max(1, round(life.last_start_s)))}"
    mark = "" if life.state in (EngineState.SERVING, EngineState.STARTING) else "!! "
    yield f"engine     {mark}{life.sentence}; {counts}{took}"
    last = life.last_exit
    if last is not None:
        how = f" ({'; '.join(last.processes)})" if last.processes else ""
        kept = f"; evidence: {last.evidence}" if last.evidence else ""
        yield f"  LAST END {last.why}{how}{kept}"
    if life.quarantined is not None:
        keys = ", ".join(
            f"{one.key} {one.wanted} (runs {one.running})" for one in life.quarantined.changes
        )
        yield f"  QUARANTINED {keys or 'changed values'}: {life.quarantined.error}"


COLUMN = 11
"""The column where the text begins, after its name."""
_LEAST_WIDTH = 40
_BAR_CELLS = 24
_LEAST_CELLS = 8
_LEGEND = "# in use  = prefix  . free".replace(" ", "\N{NO-BREAK SPACE}")
"""Of the bars; never wrapped inside."""
_HASH_SHOWN = 12


def status_page(status: Status, *, width: int = 80) -> str:
    """The whole page, ending in a newline; what is longer than ``width`` continues below itself."""
    return hanging(_lines(status, width), width)


def hanging(lines: Iterable[str], width: int) -> str:
    """Lines with a name in front as a page; what is longer than ``width`` continues below
    itself.
    """
    return "".join(f"{line}\n" for whole in lines for line in _wrapped(whole, width))


def _wrapped(line: str, width: int) -> list[str]:
    """The line as it is, or wrapped below its text, so that only names are in the left column."""
    if len(line) <= width:
        return [line.replace("\N{NO-BREAK SPACE}", " ")]
    parts = textwrap.wrap(
        line[COLUMN:],
        max(width, _LEAST_WIDTH) - COLUMN,
        break_long_words=False,
        break_on_hyphens=False,
    )
    whole = [line[:COLUMN] + parts[0], *(" " * COLUMN + part for part in parts[1:])]
    return [part.replace("\N{NO-BREAK SPACE}", " ") for part in whole]


def _lines(status: Status, width: int) -> Iterator[str]:
    node = status.node
    up = format_duration(max(0, round(status.at_unix_s - node.started_unix_s)))
    yield f"hisparsed {node.version}, {node.kind} node, {status.lifecycle}, up {up}, pid {node.pid}"
    yield f"model      {node.model}"
    yield f"api        {node.api_url}"
    if status.stalled is not None:
        yield f"  STALLED  {status.stalled}"
    if status.observed is None or status.derived is None:
        yield "report     none: there is no engine, or it has not reported yet"
    else:
        yield from _observed(status.observed, status.derived, status, width)
    if status.gpus is not None:
        yield f"gpus       {_gpus(status.gpus)}"
    if status.kernels is not None:
        yield from _kernels(status.kernels)
    yield from _policy(status.policy, status.levers)
    if status.canary is not None:
        yield f"canary     {status.canary.state}: {status.canary.sentence}"
    if status.engine is not None:
        yield from engine_lines(status.engine)
    if status.doctor is not None:
        yield from _doctor(status.doctor, status.at_unix_s)
    yield f"journal    {_journal(status)}"
    for why in status.not_kept:
        yield f"NOT KEPT   {why}"
    if status.last_sentence is not None and status.last_sentence_unix_s is not None:
        yield f"last       {clock_text(status.last_sentence_unix_s)} {status.last_sentence}"
    for event in status.events[:1]:
        # The lines after the first show a place in a document; `explain` shows all of them.
        first, *more = event.sentence.splitlines() or [""]
        yield f"event      {clock_text(event.at_unix_s)} {first}{' ...' if more else ''}"


def _observed(observed: Snapshot, derived: Derived, status: Status, width: int) -> Iterator[str]:
    loop = status.loop
    yield (
        f"report     {format_duration(round(observed.report_age_s, 2))} ago, cost "
        f"{format_duration(round(observed.report_cost_s, 6))}, {loop.failed_reports} failed; tick "
        f"{loop.tick} took {format_duration(round(loop.last_tick_s, 3))}, {loop.late_ticks} skipped"
    )
    if loop.failed_applies or loop.failed_ticks:
        refused = f"{counted(loop.failed_applies, 'command')} refused"
        yield f"  TROUBLE  {refused}, {counted(loop.failed_ticks, 'tick')} failed"
    for one in observed.ledger.violations:
        yield f"  BROKEN   host ledger, levers frozen: {one.rule}: {one.sentence}"
    yield from _pools(derived.pools, observed.reserve, width)
    requests = observed.requests
    yield (
        f"requests   {requests.running} running ({requests.full} full, {requests.mixed} mixed, "
        f"{requests.none} no residency), {requests.waiting} waiting, "
        f"{requests.held_back or 0} held back, {requests.preemptions_total} preempted, "
        f"{requests.finished_total} finished"
        f"{_waits(requests)}"
    )
    if requests.stalls_total:
        yield (
            f"  STALLS   {requests.stalls_total} found, {requests.stalls_resolved_total} resolved, "
            f"{counted(requests.stalls_given_up_total, 'call')} given up"
        )
    sessions = observed.sessions
    coverage = "nothing idle"
    if derived.coverage is not None:
        coverage = f"coverage {derived.coverage:.2f}"
    yield (
        f"sessions   {sessions.live_sessions} live, live set "
        f"{sessions.live_set_tokens:,} tokens, {coverage}"
    )
    gpu = observed.gpu
    short = "; requests wait for blocks" if gpu.waiting_for_blocks else ""
    if gpu.head_need_blocks is not None:
        short += f"; the next one needs {gpu.head_need_blocks:,}"
    yield f"gpu        {gpu.free_blocks:,} of {gpu.total_blocks:,} blocks free{short}"
    yield f"hot        {_hot(observed.hot, observed.sampled_rows)}"
    admission = observed.admission
    waiting = (
        ""
        if admission.max_waiting_sessions is None
        else f", new sessions refused while {admission.max_waiting_sessions} calls wait"
    )
    yield (
        f"admission  {admission.order}, ageing {format_duration(admission.ageing_s)}, at most "
        f"{admission.max_running} running{waiting}"
    )
    tokens = observed.tokens
    asked, hit = observed.prefix.query_tokens_total, observed.prefix.hit_tokens_total
    share = f" ({format_fraction(round(hit / asked, 3))})" if asked else ""
    yield (
        f"tokens     {tokens.prompt_total:,} in, {tokens.generated_total:,} out, "
        f"{hit:,} from prefixes{share}"
    )


def _waits(requests: Requests) -> str:
    words = ""
    if requests.oldest_wait_s is not None:
        words += f", the oldest waits {format_duration(round(requests.oldest_wait_s))}"
    if requests.refused_total:
        words += f", {requests.refused_total} refused by a limit"
    return words


def _pools(pools: PoolsMemory, reserve: Reserve, width: int) -> Iterator[str]:
    yield (
        f"pools      {format_bytes(pools.budget_bytes)} host budget, pending "
        f"{format_bytes(pools.pending_bytes)}, draining {format_bytes(pools.draining_bytes)}"
        f"   {_LEGEND}"
    )
    both = {"hisparse": pools.hisparse, "offload": pools.offload}
    words = {name: _pool(pool) for name, pool in both.items()}
    room = width - COLUMN - len("[] ") - max(map(len, words.values()))
    cells = min(_BAR_CELLS, max(_LEAST_CELLS, room))
    for name, pool in both.items():
        yield f"  {name:8} [{bar(pool, cells)}] {words[name]}"
    hisparse, offload = pools.hisparse.ghost_tokens_total, pools.offload.ghost_tokens_total
    if hisparse is not None and offload is not None:
        yield (
            f"  ghosts   1% more would have served {hisparse:,} tokens in hisparse, {offload:,} in "
            "offload so far"
        )
    if pools.reserve_bytes or pools.reserve_target_bytes:
        yield (
            f"  reserve  {format_bytes(pools.reserve_bytes)}, target "
            f"{format_bytes(pools.reserve_target_bytes)}, "
            f"{format_bytes(reserve.released_bytes)} given back to the system"
        )


def _pool(pool: PoolFigures) -> str:
    moves = pool.target_bytes != pool.capacity_bytes
    target = f", target {format_bytes(pool.target_bytes)}" if moves else ""
    return f"{format_bytes(pool.capacity_bytes)}{target}, reach {pool.reach_tokens:,} tokens"


def bar(pool: PoolFigures, cells: int = _BAR_CELLS) -> str:
    """In use, reusable prefix and free of a pool's capacity; what is not zero shows."""
    capacity = max(1, pool.capacity_bytes)
    in_use = _cells(pool.in_use_bytes / capacity, cells)
    cached = min(cells - in_use, _cells(pool.cached_bytes / capacity, cells))
    return "#" * in_use + "=" * cached + "." * (cells - in_use - cached)


def _cells(share: float, cells: int) -> int:
    return min(cells, max(round(share * cells), 1 if share > 0 else 0))


def _hot(hot: HotBuffers, sampled: SampledRows | None) -> str:
    own = (
        f", {hot.individual_leases} of them by their own miss curves"
        if hot.individual_leases
        else ""
    )
    leases = (
        f"{counted(hot.leased_blocks, 'block')} leased by {counted(hot.leased_requests, 'request')}"
    )
    blocks = counted(hot.lease_blocks, "block")
    next_lease = f"{hot.multiplier:g}x for the next lease ({blocks} per group)"
    return f"{next_lease}, {leases}{own}{_rows(hot, sampled)}"


def _rows(hot: HotBuffers, sampled: SampledRows | None) -> str:
    """Hits and bytes so far; vLLM's own counters with their age where the node counts none."""
    hits, loads, loaded = hot.hits_total, hot.loads_total, hot.h2d_bytes_total
    age = ""
    if not hot.counted:
        if sampled is None:
            return ""
        hits, loads, loaded = sampled.hits_total, sampled.misses_total, sampled.h2d_bytes_total
        age = f" as of {sampled.age_s:.0f}s ago"
    rows = hits + loads
    share = f", {format_fraction(round(hits / rows, 3))} hits" if rows else ""
    return f"{share}, {format_bytes(loaded)} loaded{age}"


def _gpus(gpus: GpusStatus) -> str:
    """One line for all: the fullest, the sum over PCIe, and who is slow or lost."""
    used = [card for card in gpus.cards if card.memory_used_bytes is not None]
    parts = [f"{len(gpus.cards)} as of {gpus.age_s:.0f}s ago"]
    if used:
        fullest = max(used, key=lambda card: card.memory_used_bytes or 0)
        parts.append(
            f"fullest {fullest.index} with {format_bytes(fullest.memory_used_bytes or 0)} of "
            f"{format_bytes(fullest.memory_total_bytes or 0)}"
        )
    read = sum(card.pcie_rx_bytes_per_s or 0.0 for card in gpus.cards)
    parts.append(f"{format_bytes(int(read))}/s read over PCIe")
    parts += [
        f"{card.index} slowed by {', '.join(card.slowed_by)}"
        for card in gpus.cards
        if card.slowed_by
    ]
    parts += [f"{card.index} LOST" for card in gpus.cards if card.lost]
    return ", ".join(parts)


def _kernels(kernels: KernelsStatus) -> Iterator[str]:
    mark = "!! " if kernels.reason.fell_back else ""
    yield f"kernels    {mark}{kernels.reason}: {kernels.sentence}"
    if not kernels.offload_trusted:
        yield f"  UNPROVED {kernels.offload_sentence}"


def _policy(policy: PolicyStatus, levers: list[LeverStatus]) -> Iterator[str]:
    yield (
        f"policy     generation {policy.generation} ({policy.content_hash[:_HASH_SHOWN]}), mode "
        f"{policy.effective or policy.mode}, {policy.path}"
    )
    if policy.last_error is not None:
        first = policy.last_error.splitlines()[0]
        yield f"  REJECTED {counted(policy.reload_failures, 'reload')}; the last: {first}"
    for entry in policy.schedules:
        if entry.active:
            yield f"  schedule {entry.name} is active"
    for override in policy.overrides:
        expires = override.expires_unix_s
        until = "it is unset" if expires is None else clock_text(expires)
        value = value_text(override.value)
        yield f"  set      {override.key} = {value} by {override.actor} until {until}"
    for one in policy.pending_restart:
        yield f"  RESTART  {one.key} runs as {one.running}; {one.wanted} needs a restart"
    for lever in levers:
        marks = "".join(
            f" {mark}"
            for mark, on in (("FROZEN", lever.frozen), ("NEEDS RESTART", lever.pending_restart))
            if on
        )
        setting = setting_text(lever.current)
        yield f"  {lever.lever:10} {lever.mode:6} {setting:>8}  {lever.reason}{marks}"


def value_text(value: Scalar) -> str:
    """A value that was set, as in the document."""
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def setting_text(value: float | str) -> str:
    """A lever's value as a person writes it."""
    return value if isinstance(value, str) else f"{value:g}"


def _doctor(doctor: DoctorStatus, now_s: float) -> Iterator[str]:
    ago = format_duration(max(0, round(now_s - doctor.at_unix_s)))
    yield (
        f"doctor     {doctor.fatal} fatal, {counted(doctor.warnings, 'warning')} of "
        f"{counted(doctor.checks, 'check')}, {ago} ago"
    )
    if doctor.error is not None:
        yield f"  TROUBLE  {doctor.error}"
    for one in doctor.findings:
        fix = f"; fix: {one.fix}" if one.fix else ""
        yield f"  {one.severity.upper():8} {one.check}: {one.what}{fix}"


def _journal(status: Status) -> str:
    journal = status.journal
    if journal.writing:
        return f"{counted(journal.written, 'record')} written, {journal.dropped:,} dropped"
    return f"STOPPED: {journal.error}; {counted(journal.dropped, 'record')} dropped"


def clock_text(unix_s: float) -> str:
    """Local time to the second."""
    try:
        moment = datetime.fromtimestamp(unix_s, UTC).astimezone()
    except (ValueError, OverflowError, OSError):
        return "a time beyond every calendar"
    return moment.strftime("%Y-%m-%d %H:%M:%S")


def canary_page(status: CanaryStatus, *, width: int = 80) -> str:
    """The whole page, ending in a newline; what is longer than ``width`` continues below itself."""
    return hanging(_canary_lines(status), width)


def _canary_lines(status: CanaryStatus) -> Iterator[str]:
    yield f"canary     {status.state}{', being asked' if status.running else ''}"
    yield f"found      {status.sentence}"
    if status.last_unix_s is not None:
        yield f"last       {clock_text(status.last_unix_s)} ({status.last_trigger})"
    if status.prompt_tokens:
        yield f"question   {status.prompt_tokens} tokens, answered with {status.answer_tokens}"
    for run in status.last_round:
        yield f"  {run.asked:8} {_canary_run(run)}"
    yield (
        f"cost       {status.scheduled_tokens_total:,} tokens, "
        f"{status.step_seconds_total:.2f}s of steps"
    )
    if status.not_ready:
        yield "ready      no: /readyz answers 503"
    if status.evidence is not None:
        yield f"evidence   {status.evidence}"


def _canary_run(run: CanaryRun) -> str:
    source = "computed again" if run.recomputed else f"{run.prefix_hit_tokens} tokens held"
    equal = "near tie" if run.near_tie else "equal" if run.equal else "DIFFERENT"
    return (
        f"{equal}, {source}; decode steps {run.steps_full} full, "
        f"{run.steps_mixed} mixed, {run.steps_none} no residency"
    )
