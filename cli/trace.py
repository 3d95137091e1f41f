"""`baton trace`: where the time of one reply went, drawn from what its gateway remembers.

Reads the reply's state and its log, no further than the log reached when it was asked, so that a reply
still running is shown as it stands. The drawing is `observability.waterfall`'s.
"""

import json
import sys
from typing import Any, TextIO

import httpx
from httpx_sse import EventSource, SSEError
from rich.console import Console

from cli.errors import CommandError
from observability.timings import HandoffStages, TtftStages
from observability.waterfall import ReplyTimes, Waterfall

_TIMEOUT = httpx.Timeout(20.0, connect=5.0)  # longer than a keepalive interval
_TERMINAL_KINDS = frozenset({"done", "error"})


def trace(url: str, reply_id: str, *, api_key: str = "", out: TextIO | None = None) -> None:
    """Prints a reply's waterfall.

    Args:
        url: a gateway's address; any gateway of the stack can tell.
        api_key: the owner's key, where the gateway wants one.
        out: stdout if not given.

    Raises:
        CommandError: no gateway answers there, it does not know the reply, or it is not one.
    """
    reply_id = reply_id.partition(":")[0]  # an event's ID names its reply too
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    with httpx.Client(base_url=url, headers=headers, timeout=_TIMEOUT, trust_env=False) as http:
        try:
            times = _read(http, reply_id)
        except httpx.HTTPError as error:
            raise CommandError(f"no gateway answers at {url}: {error}") from error
        except (ValueError, KeyError, TypeError, AttributeError, SSEError) as error:
            raise CommandError(f"what answers at {url} is not a gateway: {error}") from error
    console = Console(file=out or sys.stdout, highlight=False, soft_wrap=True)
    drawing = Waterfall(console.width, ascii_only=not console.is_terminal).render(times)
    console.print(drawing, end="")


def _read(http: httpx.Client, reply_id: str) -> ReplyTimes:
    response = http.get(f"/v1/streams/{reply_id}/state")
    _check(response, reply_id)
    state: dict[str, Any] = response.json()
    timings = {name: value for name, value in (state["timings"] or {}).items() if value is not None}
    deltas_ms: dict[int, list[float]] = {}
    if state["last_seq"]:
        deltas_ms = _read_deltas(http, reply_id, state["last_seq"])
    return ReplyTimes(
        title=_title(reply_id, state),
        ttft=TtftStages.from_dict(timings) if "ttft" in timings else None,
        handoff=HandoffStages.from_dict(timings),
        deltas_ms=deltas_ms,
    )


def _read_deltas(http: httpx.Client, reply_id: str, last_seq: int) -> dict[int, list[float]]:
    deltas_ms: dict[int, list[float]] = {}
    with http.stream("GET", f"/v1/streams/{reply_id}", params={"format": "baton"}) as response:
        _check(response, reply_id)
        for frame in EventSource(response).iter_sse():
            if not frame.data:
                continue
            event = json.loads(frame.data)
            if event["kind"] == "delta":
                deltas_ms.setdefault(event["choice"], []).append(float(event["at_ms"]))
            if event["seq"] >= last_seq or event["kind"] in _TERMINAL_KINDS:
                break
    return deltas_ms


def _check(response: httpx.Response, reply_id: str) -> None:
    address = f"{response.url.scheme}://{response.url.netloc.decode()}"
    match response.status_code:
        case 200:
            return
        case 401 | 403:
            raise CommandError(f"the gateway at {address} wants a key: set BATON_API_KEY")
        case 404:
            raise CommandError(f"the gateway at {address} knows no reply {reply_id!r} of yours")
        case 410:
            raise CommandError(f"reply {reply_id!r} has expired")
        case status:
            raise CommandError(f"the gateway at {address} answers {status} about reply {reply_id!r}")


def _title(reply_id: str, state: dict[str, Any]) -> str:
    parts = [f"{reply_id}  {state['status']}"]
    if state.get("finish_reason"):
        parts.append(f"({state['finish_reason']})")
    usage = state.get("usage") or {}
    if usage:
        parts.append(
            f" {usage.get('prompt_tokens', 0)} prompt + {usage.get('completion_tokens', 0)} reply tokens"
        )
    epoch = state.get("owner_epoch") or 1
    if epoch > 1:
        parts.append(f" taken over {epoch - 1}x")
    return " ".join(parts)
