"""Every way a call can end leaves exactly one ended span per side, with the right status."""

import asyncio
import gc
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio
from grpc import aio
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind, StatusCode

from services.rpc.interceptors import Method
from tests.unit.rpc.echo_service import Echo, running_echo
from tests.waiting import eventually

STYLES = pytest.mark.parametrize("method", ["Write", "Yield"])
OK, CANCELLED, DEADLINE, UNKNOWN = 0, 1, 4, 2


@pytest_asyncio.fixture
async def echo() -> AsyncIterator[Echo]:
    async with running_echo() as echo:
        yield echo


def check(span: ReadableSpan, code: int, status: StatusCode = StatusCode.UNSET) -> None:
    assert span.attributes is not None
    assert span.attributes["rpc.grpc.status_code"] == code
    assert span.status.status_code is status
    assert ("error.type" in span.attributes) is (status is StatusCode.ERROR)


# --- normal ends


@STYLES
async def test_a_stream_read_to_its_end(echo: Echo, method: str) -> None:
    assert [message async for message in echo.stream(method, b"go")] == [b"0", b"1", b"2"]
    client, server = await echo.both()
    for span in (client, server):
        assert span.name == f"test.v1.Echo/{method}"
        assert span.attributes is not None
        assert span.attributes["rpc.system"] == "grpc"
        assert span.attributes["rpc.service"] == "test.v1.Echo"
        assert span.attributes["rpc.method"] == method
        check(span, OK)


@STYLES
async def test_a_stream_read_by_read(echo: Echo, method: str) -> None:
    call = echo.stream(method, b"go")
    assert await call.initial_metadata() is not None
    assert [await call.read() for _ in range(3)] == [b"0", b"1", b"2"]
    assert await call.read() is aio.EOF
    for span in await echo.both():
        check(span, OK)


async def test_one_answer(echo: Echo) -> None:
    assert await echo.ask(b"hello") == b"hello"
    for span in await echo.both():
        assert span.name == "test.v1.Echo/Ask"
        check(span, OK)


async def test_the_call_keeps_its_interface(echo: Echo) -> None:
    call = echo.stream("Write", b"go")
    ended: list[object] = []
    call.add_done_callback(ended.append)
    assert not call.done()
    assert await call.initial_metadata() is not None
    assert [message async for message in call] == [b"0", b"1", b"2"]
    assert await call.code() is grpc.StatusCode.OK
    assert await call.details() == ""
    assert await call.trailing_metadata() is not None
    assert call.done()
    assert not call.cancelled()
    assert not call.cancel()
    await eventually(lambda: ended == [call])


# --- one trace


async def test_the_server_span_is_the_child_of_the_client_span_which_is_the_child_of_the_caller(
    echo: Echo,
) -> None:
    with echo.tracer.start_as_current_span("caller") as caller:
        async for _ in echo.stream("Write", b"go"):
            pass
    await eventually(lambda: len(echo.exporter.get_finished_spans()) == 3)
    (client,), (server,) = echo.ended(SpanKind.CLIENT), echo.ended(SpanKind.SERVER)
    assert client.parent is not None
    assert client.parent.span_id == caller.get_span_context().span_id
    assert server.parent is not None
    assert client.context is not None
    assert server.parent.span_id == client.context.span_id
    assert server.parent.is_remote
    assert server.context is not None
    assert server.context.trace_id == caller.get_span_context().trace_id


async def test_the_server_span_is_current_in_the_handler_and_in_its_tasks(echo: Echo) -> None:
    async for _ in echo.stream("Yield", b"child"):
        pass
    await eventually(lambda: len(echo.exporter.get_finished_spans()) == 3)
    (server,) = echo.ended(SpanKind.SERVER)
    (work,) = echo.ended(SpanKind.INTERNAL)
    assert work.parent == server.context
    assert [span.get_span_context() for span in echo.service.spans] == [server.context]


async def test_a_callers_own_metadata_stays(echo: Echo) -> None:
    call = echo.stream("Write", b"go", metadata=(("x-request-id", "7"), ("traceparent-like", "no")))
    assert await call.read() == b"0"
    call.cancel()


async def test_a_malformed_traceparent_starts_a_new_trace(echo: Echo) -> None:
    async with aio.insecure_channel(echo.address) as plain:
        stub = plain.unary_unary("/test.v1.Echo/Ask")
        await stub(b"hello", metadata=(("traceparent", "00-nonsense"), ("blob-bin", b"\xff")))
    await eventually(lambda: len(echo.ended(SpanKind.SERVER)) == 1)
    assert echo.ended(SpanKind.SERVER)[0].parent is None


async def test_concurrent_calls_do_not_mix(echo: Echo) -> None:
    async def one() -> int:
        with echo.tracer.start_as_current_span("caller") as span:
            async for _ in echo.stream("Write", b"child"):
                await asyncio.sleep(0)
        return span.get_span_context().trace_id

    traces = await asyncio.gather(*(one() for _ in range(50)))
    assert len(set(traces)) == 50
    await eventually(lambda: len(echo.exporter.get_finished_spans()) == 50 * 4)
    for trace_id in traces:
        spans = [
            s for s in echo.exporter.get_finished_spans() if s.context and s.context.trace_id == trace_id
        ]
        assert sorted(span.name for span in spans) == [
            "caller",
            "test.v1.Echo/Write",
            "test.v1.Echo/Write",
            "work",
        ]


# --- errors


@pytest.mark.parametrize("method", ["Write", "Yield", "Ask"])
async def test_an_abort_for_the_servers_fault(echo: Echo, method: str) -> None:
    with pytest.raises(aio.AioRpcError) as caught:
        await _finish(echo, method, b"abort")
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    for span in await echo.both():
        check(span, grpc.StatusCode.UNAVAILABLE.value[0], StatusCode.ERROR)
        assert "secret" not in span.to_json()


@pytest.mark.parametrize("method", ["Write", "Yield", "Ask"])
async def test_an_abort_for_the_clients_fault_is_no_error_of_the_server(echo: Echo, method: str) -> None:
    with pytest.raises(aio.AioRpcError):
        await _finish(echo, method, b"refuse")
    client, server = await echo.both()
    check(client, grpc.StatusCode.INVALID_ARGUMENT.value[0], StatusCode.ERROR)
    check(server, grpc.StatusCode.INVALID_ARGUMENT.value[0])


@pytest.mark.parametrize("method", ["Write", "Yield", "Ask"])
async def test_an_exception_in_the_handler(echo: Echo, method: str) -> None:
    with pytest.raises(aio.AioRpcError):
        await _finish(echo, method, b"crash")
    client, server = await echo.both()
    check(client, UNKNOWN, StatusCode.ERROR)
    check(server, UNKNOWN, StatusCode.ERROR)
    assert server.attributes is not None
    assert server.attributes["error.type"] == "LookupError"
    assert "secret" not in server.to_json()


async def test_a_status_that_the_handler_set_without_raising(echo: Echo) -> None:
    with pytest.raises(aio.AioRpcError) as caught:
        await _finish(echo, "Write", b"code")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    client, server = await echo.both()
    check(client, grpc.StatusCode.NOT_FOUND.value[0], StatusCode.ERROR)
    check(server, grpc.StatusCode.NOT_FOUND.value[0])


@pytest.mark.parametrize("method", ["Write", "Ask"])
async def test_nobody_there(echo: Echo, method: str) -> None:
    await echo.server.stop(None)
    with pytest.raises(aio.AioRpcError):
        await _finish(echo, method, b"go")
    (client,) = echo.ended(SpanKind.CLIENT)
    check(client, grpc.StatusCode.UNAVAILABLE.value[0], StatusCode.ERROR)


async def test_a_method_that_is_not_served(echo: Echo) -> None:
    with pytest.raises(aio.AioRpcError) as caught:
        await echo.stream("Missing", b"go").read()
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    await eventually(lambda: len(echo.ended(SpanKind.CLIENT)) == 1)
    assert echo.ended(SpanKind.SERVER) == []


# --- cancellation, deadlines, abandonment


@STYLES
async def test_cancelled_by_the_client_before_the_first_message(echo: Echo, method: str) -> None:
    call = echo.stream(method, b"hang")
    reading = asyncio.create_task(call.read())
    await eventually(lambda: echo.service.num_started == 1)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    await _check_cancelled(echo)


@STYLES
async def test_cancelled_by_the_client_after_a_message(echo: Echo, method: str) -> None:
    call = echo.stream(method, b"hang-after")
    assert await call.read() == b"0"
    call.cancel()
    await _check_cancelled(echo)


@STYLES
async def test_the_reading_task_is_cancelled(echo: Echo, method: str) -> None:
    call = echo.stream(method, b"hang-after")

    async def read_all() -> None:
        async for _ in call:
            pass

    reading = asyncio.create_task(read_all())
    await eventually(lambda: echo.service.num_started == 1)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    await _check_cancelled(echo)


async def test_a_generator_that_never_waits_is_cancelled_too(echo: Echo) -> None:
    call = echo.stream("Yield", b"endless")
    assert await call.read() == b"0"
    call.cancel()
    await _check_cancelled(echo)


async def test_one_answer_cancelled(echo: Echo) -> None:
    call = echo.ask(b"hang")
    await eventually(lambda: echo.service.num_started == 1)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await _check_cancelled(echo)


async def test_cancelled_before_it_began_leaves_no_span(echo: Echo) -> None:
    call = echo.stream("Write", b"go")
    assert call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call.read()
    assert await call.code() is grpc.StatusCode.CANCELLED
    assert await call.initial_metadata() is None
    assert call.cancelled()
    assert echo.exporter.get_finished_spans() == ()
    assert echo.service.num_started == 0


@STYLES
async def test_cancelled_while_its_headers_are_awaited(echo: Echo, method: str) -> None:
    call = echo.stream(method, b"hang")
    waiting = asyncio.create_task(call.initial_metadata())
    await eventually(lambda: echo.service.num_started == 1)
    call.cancel()
    await waiting
    await _check_cancelled(echo)


@pytest.mark.parametrize("method", ["Write", "Yield", "Ask"])
async def test_the_deadline_passes(echo: Echo, method: str) -> None:
    with pytest.raises(aio.AioRpcError) as caught:
        await _finish(echo, method, b"hang", timeout=0.3)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    for span in await echo.both():
        check(span, DEADLINE, StatusCode.ERROR)


async def test_a_cancellation_well_before_the_deadline_is_not_the_deadline(echo: Echo) -> None:
    call = echo.stream("Write", b"hang-after", timeout=30)
    await call.read()
    call.cancel()
    await _check_cancelled(echo)


@STYLES
async def test_dropped_midway(echo: Echo, method: str) -> None:
    async def read_one() -> None:
        async for _ in echo.stream(method, b"hang-after"):
            return

    await read_one()
    gc.collect()  # the call and its iterator hold each other
    await _check_cancelled(echo)


async def test_dropped_without_a_look(echo: Echo) -> None:
    call = echo.stream("Write", b"hang")
    await eventually(lambda: echo.service.num_started == 1)
    del call
    gc.collect()
    await _check_cancelled(echo)


async def test_collected_in_another_thread(echo: Echo) -> None:
    calls = [echo.stream("Write", b"hang")]
    await eventually(lambda: echo.service.num_started == 1)

    def drop_and_collect() -> None:
        calls.clear()
        gc.collect()

    await asyncio.to_thread(drop_and_collect)
    await _check_cancelled(echo)


@STYLES
async def test_the_server_stops(echo: Echo, method: str) -> None:
    call = echo.stream(method, b"hang-after")
    assert await call.read() == b"0"
    await echo.server.stop(None)
    with pytest.raises((aio.AioRpcError, asyncio.CancelledError)):
        await asyncio.wait_for(_read_to_end(call), timeout=10)
    await eventually(lambda: echo.service.num_released == 1)
    _, server = await echo.both()
    check(server, CANCELLED)


async def test_the_channel_closes(echo: Echo) -> None:
    call = echo.stream("Write", b"hang-after")
    assert await call.read() == b"0"
    await echo.channel.close()
    await _check_cancelled(echo)


# --- what is not traced


async def test_load_streams_have_no_spans(echo: Echo) -> None:
    assert [message async for message in echo.stream("WatchLoad", b"")] == [b"load"]
    assert await echo.ask(b"hello") == b"hello"
    client, server = await echo.both()
    assert client.name == server.name == "test.v1.Echo/Ask"


@pytest.mark.parametrize(
    ("path", "traced"),
    [
        ("/baton.v1.Decode/Generate", True),
        (b"/baton.v1.Prefill/Prefill", True),
        ("/baton.v1.Decode/WatchLoad", False),
        ("/grpc.health.v1.Health/Check", False),
        ("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", False),
    ],
)
def test_which_methods_are_traced(path: str | bytes, *, traced: bool) -> None:
    assert Method.parse(path).traced is traced


async def _finish(echo: Echo, method: str, request: bytes, **options: float) -> None:
    if method == "Ask":
        await echo.ask(request, **options)
    else:
        async for _ in echo.stream(method, request, **options):
            pass


async def _check_cancelled(echo: Echo) -> None:
    await eventually(lambda: echo.service.num_released == 1)
    for span in await echo.both():
        check(span, CANCELLED)


async def _read_to_end(call: Any) -> None:
    while await call.read() is not aio.EOF:
        pass
