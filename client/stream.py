"""A chat completion that survives cut connections: `ChatStream` blocks, `AsyncChatStream` awaits.

    with httpx.Client(base_url="http://127.0.0.1:8000") as http:
        with ChatStream(http, {"messages": [{"role": "user", "content": "Hello"}]}) as stream:
            for piece in stream:
                print(piece, end="", flush=True)
            reply = stream.result()

Iterating yields text as it comes and goes on over as many connections as it takes; it returns only
after the terminal event. Whatever else happens is an exception of `client.errors`, and `result` gives
nothing but whole replies. The read timeout of the httpx client is what notices a silent connection:
keep it above the server's keepalive interval.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator, Mapping
from typing import Any, Self

import httpx

from client.reply import Reply, ReplyFold, Usage
from client.resuming import Attempt, Resuming, RetryPolicy

_LONGEST_ERROR_BODY = 65_536


class _Stream:
    """What both kinds show of their reply."""

    def __init__(
        self,
        request: Mapping[str, Any] | None,
        *,
        last_event_id: str = "",
        policy: RetryPolicy | None = None,
    ) -> None:
        """Args:
        request: body of the chat completion, one choice; None to go on with the reply of `last_event_id`.
        """
        if (request is None) == (not last_event_id):
            raise ValueError("either a request, or the last event ID of a reply to go on with")
        if request is not None:
            if request.get("n") not in (None, 1):
                raise ValueError("a chat stream reads one choice: leave `n` out")
            request = {"stream_options": {"include_usage": True}, **request, "stream": True}
        self._fold = ReplyFold(last_event_id)
        self._resuming = Resuming(
            dict(request) if request is not None else None,
            self._fold,
            policy or RetryPolicy(),
            time.monotonic,
        )

    @property
    def text(self) -> str:
        """The text that has come so far: a fragment unless `complete`."""
        return self._fold.text

    @property
    def complete(self) -> bool:
        """Whether the reply's `[DONE]` has come."""
        return self._fold.complete

    @property
    def reply_id(self) -> str | None:
        """None until the first event."""
        return self._fold.reply_id

    @property
    def last_event_id(self) -> str | None:
        """Where another stream would go on; None until the first event."""
        return self._fold.last_event_id or None

    @property
    def finish_reason(self) -> str | None:
        return self._fold.finish_reason

    @property
    def usage(self) -> Usage | None:
        return self._fold.usage

    @property
    def num_resumes(self) -> int:
        """How many times the connection was lost and the stream asked for again."""
        return self._resuming.num_resumes

    def result(self) -> Reply:
        """The whole reply. Raises ReplyIncomplete before its end."""
        return self._fold.result(self.num_resumes)


class ChatStream(_Stream):
    """Streams one reply through a blocking httpx client. Iterate once."""

    def __init__(
        self,
        http: httpx.Client,
        request: Mapping[str, Any] | None = None,
        *,
        last_event_id: str = "",
        policy: RetryPolicy | None = None,
    ) -> None:
        super().__init__(request, last_event_id=last_event_id, policy=policy)
        self._http = http
        self._pieces = self._run()

    def __iter__(self) -> Iterator[str]:
        return self._pieces

    def _run(self) -> Generator[str, None, None]:
        resuming = self._resuming
        while True:
            cause: Exception | None = None
            delay_s: float | None = None
            try:
                with self._http.stream(**_arguments(resuming.next_attempt())) as response:
                    if _is_stream(response):
                        resuming.accepted(response.headers)
                        for received in response.iter_bytes():
                            yield from resuming.feed(received)
                            if self.complete:
                                return
                    else:
                        body = response.read()[:_LONGEST_ERROR_BODY]
                        delay_s = resuming.refused(response.status_code, response.headers, body)
            except httpx.TransportError as error:
                cause = error
            time.sleep(resuming.cut(cause) if delay_s is None else delay_s)

    def close(self) -> None:
        """Drops the connection; the reply goes on, and may be resumed, for the server's grace period."""
        self._pieces.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncChatStream(_Stream):
    """Streams one reply through an async httpx client. Iterate once."""

    def __init__(
        self,
        http: httpx.AsyncClient,
        request: Mapping[str, Any] | None = None,
        *,
        last_event_id: str = "",
        policy: RetryPolicy | None = None,
    ) -> None:
        super().__init__(request, last_event_id=last_event_id, policy=policy)
        self._http = http
        self._pieces = self._run()

    def __aiter__(self) -> AsyncIterator[str]:
        return self._pieces

    async def _run(self) -> AsyncGenerator[str, None]:
        resuming = self._resuming
        while True:
            cause: Exception | None = None
            delay_s: float | None = None
            try:
                async with self._http.stream(**_arguments(resuming.next_attempt())) as response:
                    if _is_stream(response):
                        resuming.accepted(response.headers)
                        async for received in response.aiter_bytes():
                            for piece in resuming.feed(received):
                                yield piece
                            if self.complete:
                                return
                    else:
                        body = (await response.aread())[:_LONGEST_ERROR_BODY]
                        delay_s = resuming.refused(response.status_code, response.headers, body)
            except httpx.TransportError as error:
                cause = error
            await asyncio.sleep(resuming.cut(cause) if delay_s is None else delay_s)

    async def close(self) -> None:
        """Drops the connection; the reply goes on, and may be resumed, for the server's grace period."""
        await self._pieces.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _arguments(attempt: Attempt) -> dict[str, Any]:
    return {
        "method": attempt.method,
        "url": attempt.path,
        "headers": attempt.headers,
        "json": attempt.body,
    }


def _is_stream(response: httpx.Response) -> bool:
    """204 and errors, but also a 200 of something in between that is no event stream."""
    return response.status_code == 200 and response.headers.get("content-type", "").startswith(
        "text/event-stream"
    )
