"""Clients that read one reply to its end: from a decode worker over gRPC, or from a gateway over HTTP.

Both note the same things, so that a test need not care which way a reply came.
"""

import asyncio
import json
import time
from typing import Any

import httpx
from grpc import aio

from baton.v1 import decode_pb2, decode_pb2_grpc
from client.sse import SseDecoder

_SLACK_S = 1.0  # for a client to notice that its deadline has passed


class ReadReply:
    """A reply that is being read.

    Attributes:
        text: so far.
        seen_text: set with the first text.
        complete: its end has come, and was no error.
        error: status name or code of a typed error.
        details: what else it says.
        took_s: from the request to the end.
    """

    def __init__(self, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self.text = ""
        self.seen_text = asyncio.Event()
        self.complete = False
        self.error: str | None = None
        self.details = ""
        self.took_s = 0.0
        self._began = time.monotonic()
        self._reading = asyncio.create_task(self._run())

    async def ended(self) -> None:
        """Waits for the end; fails if it has not come when the deadline is over."""
        left_s = self._began + self.deadline_s + _SLACK_S - time.monotonic()
        try:
            await asyncio.wait_for(asyncio.shield(self._reading), max(0.0, left_s))
        except TimeoutError:
            raise AssertionError(f"no end within {self.deadline_s} s; so far {self.text!r}") from None

    @property
    def has_ended(self) -> bool:
        return self._reading.done()

    async def close(self) -> None:
        """Leaves, whether or not it has ended."""
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)

    async def _run(self) -> None:
        await self._read()
        self.took_s = time.monotonic() - self._began

    async def _read(self) -> None:
        raise NotImplementedError

    def _take(self, text: str) -> None:
        self.text += text
        if text:
            self.seen_text.set()


class DecodeReply(ReadReply):
    """One Generate call; `token_ids` and `finished` as they came."""

    def __init__(
        self,
        stub: "decode_pb2_grpc.DecodeAsyncStub",
        request: decode_pb2.GenerateRequest,
        deadline_s: float,
    ) -> None:
        self.request = request
        self.token_ids: list[int] = []
        self.finished: decode_pb2.Finished | None = None
        self._call = stub.Generate(request, timeout=deadline_s)
        super().__init__(deadline_s)

    async def _read(self) -> None:
        try:
            async for message in self._call:
                part = message.delta if message.HasField("delta") else message.finished
                self.token_ids += [token.token_id for token in part.tokens]
                if isinstance(part, decode_pb2.Delta):
                    self._take(part.text)
                else:
                    self.finished = part
            self.complete = self.finished is not None
        except aio.AioRpcError as error:
            self.error, self.details = error.code().name, error.details() or ""
        finally:
            self._call.cancel()


class GatewayReply(ReadReply):
    """One streamed chat completion; `status` is HTTP's, and 0 until it is here, as `reply_id` is empty."""

    def __init__(self, address: str, body: dict[str, Any], deadline_s: float) -> None:
        self.status = 0
        self.reply_id = ""
        self._url = f"http://{address}/v1/chat/completions"
        self._body = {"stream": True, "timeout": deadline_s, **body}
        super().__init__(deadline_s)

    async def _read(self) -> None:
        decoder = SseDecoder()
        async with (
            httpx.AsyncClient(timeout=None, trust_env=False, verify=False) as client,
            client.stream("POST", self._url, json=self._body) as response,
        ):
            self.status = response.status_code
            self.reply_id = response.headers.get("location", "").rpartition("/")[2]
            if response.status_code != 200:
                await response.aread()
                self.error = response.json()["error"]["code"]
                return
            async for received in response.aiter_bytes():
                for event in decoder.feed(received):
                    self._take_event(event.data)

    def _take_event(self, data: str) -> None:
        assert not self.complete, f"after the end: {data}"
        assert self.error is None, f"after the error: {data}"
        if data == "[DONE]":
            self.complete = True
            return
        event = json.loads(data)
        if "error" in event:
            self.error = event["error"]["code"]
            return
        for choice in event["choices"]:
            self._take(choice["delta"].get("content") or "")
