"""The first page's answer in words: is the node healthy, what limits it now, what the policy did
last.

Sentences from the same figures as the panels below them, rates with their window.
"""

from __future__ import annotations

from dataclasses import dataclass

from hisparsed.policy.decisions import Reason
from hisparsed.tui import format as fmt
from hisparsed.tui.model import NOT_WELL, Connection, NodeModel
from hisparsed.tui.styled import Line, line, wrap
from hisparsed.tui.views.drawing import WINDOW, ViewContext
from hisparsed.tui.views.health import engine_summary
from hisparsed.tui.views.panels import h2d_share
from hisparsed.tui.views.policy import effective_mode
from hisparsed.tui.wire import Document, dig, items, number, text

_MUCH_TRAFFIC = 0.8
"""Share of the PCIe budget from which on loads are what limits."""


@dataclass(frozen=True, slots=True)
class Answer:
    """``head`` in its own role, and the rest of the sentence."""

    head: str
    role: str
    rest: str = ""


def verdict_lines(model: NodeModel, width: int, context: ViewContext) -> list[Line]:
    """Node, limit and policy; as many lines as their words need."""
    answers = [("Node", _node(model, context))]
    if model.status is not None:
        answers += [("Limit", _limit(model)), ("Policy", _policy(model, context))]
    return [one for label, answer in answers for one in _lines(label, answer, width)]


_LABEL = 8


def _lines(label: str, answer: Answer, width: int) -> list[Line]:
    """Continuation lines begin below the sentence."""
    first, *more = wrap(f"{answer.head}{answer.rest}", max(20, width - _LABEL))
    head, rest = first.plain[: len(answer.head)], first.plain[len(answer.head) :]
    top = line((f"{label:<{_LABEL}}", "title"), (head, answer.role), rest)
    return [top, *(line(" " * _LABEL) + one for one in more)]


def _node(model: NodeModel, context: ViewContext) -> Answer:
    why = model.link_why.removeprefix(f"{model.address}: ")
    if model.link is Connection.CONNECTING:
        return Answer("not known yet", "warn", f": {model.address} is being asked")
    if model.link is Connection.LOST and model.status is None:
        return Answer(
            "NEVER REACHED",
            "bad",
            f" at {model.address}: {why}. See systemctl status hisparsed, and control_socket in "
            "hisparsed.yaml",
        )
    if model.link is Connection.LOST:
        since = fmt.clock(model.link_since_s)
        return Answer(
            "NOT KNOWN", "bad", f" since {since}: {why}. Everything below is from before that."
        )
    life, now_s = engine_summary(model.status), model.node_now_s(context.now_s)
    if life is not None and life.state != "serving":
        reason = f": {life.why}" if life.why and not life.has_engine else ""
        return Answer("NOT SERVING", life.role, f", {life.words(now_s)}{reason}")
    troubles = sorted(
        (one for one in model.troubles() if one.rank >= NOT_WELL),
        key=lambda one: one.rank,
        reverse=True,
    )
    if troubles:
        words = "; ".join(one.sentence or one.word for one in troubles)
        return Answer("NOT HEALTHY", "bad", f": {words}")
    return Answer("healthy", "good", f": {_doing(model)}")


def _doing(model: NodeModel) -> str:
    requests, latest = dig(model.observed, "requests"), model.history.latest
    running, waiting = number(requests, "running") or 0, number(requests, "waiting") or 0
    if not running and not waiting:
        return "no call runs or waits"
    if running + waiting == 1 and dig(model.status, "canary.running") is True:
        return "no call of a client; the canary asks its own"
    words = f"{fmt.calls(running, 'run')}, {fmt.whole(waiting)} wait{'s' if waiting == 1 else ''}"
    ttft, tokens = latest("ttft"), latest("tokens")
    first = [f"first token {fmt.duration(ttft)}"] if ttft is not None else []
    out = [f"{fmt.short(tokens)} tokens/s out"] if tokens is not None else []
    return f"{words}; {', '.join([*first, *out])} {WINDOW}" if first or out else words


def _limit(model: NodeModel) -> Answer:
    """The first thing that keeps calls from going faster, then whether host memory is short."""
    if not model.observed:
        return Answer("not known", "dim", ", since no engine reports")
    answer = _first_limit(model)
    coverage = number(model.derived, "coverage")
    if coverage is None or coverage >= 1:
        return answer
    live = fmt.short(number(model.observed, "sessions.live_set_tokens"))
    reach = fmt.short(number(model.derived, "min_reach_tokens"))
    short = (
        f"live sessions hold {live} tokens, {reach} are in reach (coverage {fmt.ratio(coverage)} "
        "LOW)"
    )
    if answer.head == "nothing":
        return Answer("host memory", "warn", f": {short}, so prefixes are computed again")
    return Answer(answer.head, answer.role, f"{answer.rest}. Also host memory: {short}")


def _first_limit(model: NodeModel) -> Answer:
    observed = model.observed
    gpu, requests = dig(observed, "gpu"), dig(observed, "requests")
    running, waiting = number(requests, "running") or 0, number(requests, "waiting") or 0
    wait = fmt.calls(waiting, "wait")
    most, held = number(observed, "admission.max_running"), number(requests, "held_back")
    if waiting and _reason(model, "multiplier") == Reason.ENGINE_CORE_BOUND:
        busy = fmt.percent(number(observed, "step_cpu.busy_ratio"))
        return Answer(
            "engine core", "warn", f": its CPU is busy {busy} of the time, {wait} for steps"
        )
    if dig(gpu, "waiting_for_blocks"):
        need, free = number(gpu, "head_need_blocks"), fmt.whole(number(gpu, "free_blocks"))
        needs = f"; the next needs {fmt.whole(need)} blocks" if need is not None else ""
        return Answer("GPU memory", "warn", f": {wait}{needs}, {free} are free")
    if waiting and most is not None and running >= most:
        return Answer("calls at once", "warn", f": {wait} for one of {fmt.whole(most)} places")
    if held:
        return Answer("admission", "warn", f": {fmt.counted(held, 'call')} held back by a limit")
    if waiting and _reason(model, "multiplier") == Reason.PREFILL_BOUND:
        return Answer(
            "computation", "warn", f": prefill fills the steps, {wait} for it and not for memory"
        )
    if waiting and _short_of_host(observed):
        blocks = fmt.whole(number(observed, "head_need_blocks"))
        return Answer("host memory", "warn", f": {wait}; the next needs {blocks} idle host blocks")
    if waiting:
        free = fmt.whole(number(gpu, "free_blocks"))
        return Answer("the next steps", "", f": {wait} to be scheduled; {free} GPU blocks are free")
    share = h2d_share(model)
    if share is not None and share > _MUCH_TRAFFIC:
        return Answer("PCIe", "warn", f": loads of rows take {fmt.percent(share)} of their budget")
    return Answer("nothing", "good", ": every call runs" if running else ": there is no load")


def _short_of_host(observed: Document) -> bool:
    pool = dig(observed, "hisparse")
    idle = (number(pool, "cached_blocks") or 0) + (number(pool, "free_blocks") or 0)
    return (number(observed, "head_need_blocks") or 0) > idle


def _reason(model: NodeModel, lever: str) -> str | None:
    levers = items(model.status, "levers")
    return next((text(one, "reason") for one in levers if one.get("lever") == lever), None)


def _policy(model: NodeModel, context: ViewContext) -> Answer:
    """What it did last and why; before that, what it may not do."""
    mode = effective_mode(model)
    held = "" if mode in ("", "act") else f"{mode}; "
    last = next((one for one in model.decisions if one.get("acts")), None)
    if last is None:
        return Answer(held, "warn", _nothing(model))
    ago_s = max(0.0, context.now_s - (number(last, "at_unix_s") or context.now_s))
    failed = text(last, "error")
    sentence = (text(last, "sentence") or "").rstrip(".")
    came = f" It FAILED: {failed}" if failed else ""
    return Answer(held, "warn", f"{fmt.whole_duration(ago_s)} ago: {sentence}.{came}")


def _nothing(model: NodeModel) -> str:
    advice = next((one for one in model.decisions if one.get("code") == Reason.ADVISE_ONLY), None)
    if advice is not None:
        return text(advice, "sentence") or ""
    known = [number(one, "at_unix_s") for one in model.decisions]
    since = fmt.clock(min((at for at in known if at is not None), default=None))
    return f"it has moved nothing since {since}" if known else "it has moved nothing yet"
