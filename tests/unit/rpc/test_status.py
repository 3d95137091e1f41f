"""Every exception a worker raises on purpose has one status, and the field survives the wire."""

import inspect

import grpc
import pytest
from grpc import aio

from services.engine import errors
from services.rpc import status


def engine_errors() -> list[type[Exception]]:
    return [
        kind
        for _, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, errors.EngineError) and kind is not errors.EngineError
    ]


@pytest.mark.parametrize("kind", engine_errors(), ids=lambda kind: kind.__name__)
def test_the_table_names_every_engine_error(kind: type[Exception]) -> None:
    assert any(issubclass(kind, listed) for listed, _ in status.STATUS_TABLE)


def test_no_entry_is_hidden_by_an_earlier_one() -> None:
    kinds = [kind for kind, _ in status.STATUS_TABLE]
    for index, kind in enumerate(kinds):
        assert not any(issubclass(kind, earlier) for earlier in kinds[:index])


def test_what_is_not_named_is_internal() -> None:
    assert status.status_of(ValueError("x")) is grpc.StatusCode.INTERNAL


@pytest.mark.parametrize(
    ("error", "code", "field"),
    [
        (errors.PromptTooLong("max_tokens", "too long"), grpc.StatusCode.INVALID_ARGUMENT, "max_tokens"),
        (errors.IncompatibleModel("dtype", "a", "b"), grpc.StatusCode.FAILED_PRECONDITION, "dtype"),
        (status.Draining("draining"), grpc.StatusCode.UNAVAILABLE, None),
        (status.PrefillUnavailable("none", ["10.0.0.1:1", "[::1]:2"]), grpc.StatusCode.UNAVAILABLE, None),
    ],
)
async def test_a_caller_sees_status_text_reason_and_what_is_at_fault(
    error: Exception, code: grpc.StatusCode, field: str | None
) -> None:
    async def refuse(request: bytes, context: aio.ServicerContext) -> bytes:  # type: ignore[type-arg]
        await status.abort(context, error)

    server = aio.server()
    handlers = {"Refuse": grpc.unary_unary_rpc_method_handler(refuse)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.T", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            with pytest.raises(aio.AioRpcError) as caught:
                await channel.unary_unary("/t.T/Refuse")(b"")
    finally:
        await server.stop(None)
    assert caught.value.code() is code
    assert caught.value.details() == str(error)
    assert status.field_of(caught.value) == field
    assert status.reason_of(caught.value) == type(error).__name__
    assert status.failed_targets_of(caught.value) == getattr(error, "failed_targets", ())
