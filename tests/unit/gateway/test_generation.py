"""Generations against scripted workers over real gRPC: refusals, failures midway, endings, timings."""

import asyncio
import time
from dataclasses import replace

import grpc
import pytest

from baton.v1 import common_pb2, decode_pb2
from gateway.errors import (
    ContextTooLong,
    DeadlineExceeded,
    GatewayError,
    InvalidRequest,
    Overloaded,
    Unavailable,
)
from gateway.event_log import LogUnavailable, ReplyMeta
from gateway.event_log_memory import MemoryEventLog
from gateway.events import EventKind, ReplyStatus
from gateway.sampling import Sampling
from observability.timings import TTFT_STAGES
from tests.fake_decode import FINGERPRINT, FakeWorker, Script, text
from tests.unit.gateway.generating import (
    NUM_TOKENS,
    SPEC,
    error_of,
    gateway,
    kinds,
    payloads,
    refusing,
    text_of,
)
from tests.waiting import eventually

# --- a reply that nothing disturbs


async def test_the_events_of_a_reply_in_their_order() -> None:
    worker = FakeWorker(script=Script(end_tokens=1))
    async with gateway(worker) as gw:
        reply = await gw.finished()
        deltas = [EventKind.DELTA] * (NUM_TOKENS - 1)
        opening = [EventKind.CREATED, EventKind.IN_PROGRESS, EventKind.ITEM_START, EventKind.PART_START]
        closing = [EventKind.TEXT_DONE, EventKind.PART_DONE, EventKind.ITEM_DONE, EventKind.FINISH]
        assert kinds(reply) == [*opening, *deltas, *closing, EventKind.USAGE, EventKind.DONE]
        assert text_of(reply) == text(NUM_TOKENS - 1)
        (finish,) = payloads(reply, EventKind.FINISH)
        assert (finish["reason"], finish["token_ids"]) == ("stop", [NUM_TOKENS - 1])
        assert finish["num_generated_tokens"] == NUM_TOKENS
        (usage,) = payloads(reply, EventKind.USAGE)
        assert usage == {
            "prompt_tokens": 20,
            "completion_tokens": NUM_TOKENS,
            "total_tokens": 20 + NUM_TOKENS,
            "cached_tokens": 1,
        }
        assert reply.status is ReplyStatus.DONE
        stamps = [event.payload["at_ms"] for event in reply.events if "at_ms" in event.payload]
        assert stamps == sorted(stamps)


async def test_what_the_worker_is_asked_and_what_is_stored() -> None:
    worker = FakeWorker()
    async with gateway(worker) as gw:
        reply = await gw.finished()
        (request,) = worker.requests
        assert request.reply_id == reply.meta.reply_id
        assert request.sampling.seed == reply.meta.seed
        assert request.fingerprint == FINGERPRINT
        assert tuple(request.prompt_token_ids) == SPEC.prompt_token_ids
        assert len(reply.meta.reply_id) == 40
        assert reply.meta.request["timeout_s"] == SPEC.timeout_s
        assert request.cache_salt == SPEC.owner_hash
        given = await gw.finished(replace(SPEC, seed=7, owner_hash="another tenant"))
        assert given.meta.seed == 7
        assert worker.requests[1].cache_salt == "another tenant"
        assert given.meta.reply_id != reply.meta.reply_id


async def test_two_choices_are_two_calls_in_one_log() -> None:
    worker = FakeWorker(script=Script(token_delay_s=0.002))
    async with gateway(worker, FakeWorker(script=Script(token_delay_s=0.001))) as gw:
        reply = await gw.finished(replace(SPEC, num_choices=2))
        assert text_of(reply, 0) == text_of(reply, 1) == text(NUM_TOKENS)
        assert sorted(p["choice"] for p in payloads(reply, EventKind.FINISH)) == [0, 1]
        assert payloads(reply, EventKind.USAGE)[0]["completion_tokens"] == 2 * NUM_TOKENS
        assert kinds(reply)[-2:] == [EventKind.USAGE, EventKind.DONE]


async def test_logprobs_carry_the_tokens_text() -> None:
    async with gateway(FakeWorker()) as gw:
        spec = replace(SPEC, sampling=Sampling(max_tokens=2, logprobs=2))
        first = payloads(await gw.finished(spec), EventKind.DELTA)[0]
        assert first["logprobs"] == [
            {"token_id": 0, "token": "<0>", "logprob": -0.5, "top": [[0, "<0>", -1.0], [1, "<1>", -2.0]]}
        ]
        assert "logprobs" not in payloads(await gw.finished(), EventKind.DELTA)[0]


async def test_the_stages_add_up_to_the_time_to_first_token() -> None:
    timings = decode_pb2.FirstTextTimings(
        decode_queue_ms=5, prefill_queue_ms=10, prefill_ms=20, text_hold_ms=2
    )
    handoff = decode_pb2.HandoffTimings(kv_transfer_ms=3, join_ms=2, first_step_ms=1)
    script = Script(first_delay_s=0.06, token_delay_s=0.005, timings=timings, handoff=handoff)
    async with gateway(FakeWorker(script=script)) as gw:
        reply = await gw.finished()
        (done,) = payloads(reply, EventKind.DONE)
        stages = done["timings"]
        assert (stages["decode_queue"], stages["prefill_queue"], stages["prefill"]) == (5, 10, 20)
        assert stages["text_hold"] == 2
        assert (stages["kv_transfer"], stages["join"], stages["first_step"]) == (3, 2, 1)
        assert reply.first_delta_committed_at is not None
        measured = (reply.first_delta_committed_at - reply.arrived) * 1000
        assert sum(stages[name] for name in TTFT_STAGES) == pytest.approx(measured, abs=0.1)
        assert stages["ttft"] == pytest.approx(measured, abs=0.1)
        assert stages["total"] >= stages["ttft"]


async def test_a_slow_log_is_not_taken_for_the_network() -> None:
    class SlowLog(MemoryEventLog):
        async def create(self, meta: ReplyMeta) -> int:
            await asyncio.sleep(0.2)
            return await super().create(meta)

    async with gateway(FakeWorker(), log=SlowLog("g1")) as gw:
        reply = await gw.finished()
        stages = payloads(reply, EventKind.DONE)[0]["timings"]
        assert stages["log_append"] > 150
        assert stages["relay"] < 50
        assert text_of(reply) == text(NUM_TOKENS)


async def test_spans_and_metrics_tell_of_the_reply() -> None:
    worker = FakeWorker()
    async with gateway(worker) as gw:
        reply = await gw.finished()
        await eventually(lambda: {s.name for s in gw.spans.get_finished_spans()} >= {"chat fake"})
        spans = {span.name: span for span in gw.spans.get_finished_spans()}
        chat, call = spans["chat fake"], spans["baton.v1.Decode/Generate"]
        assert call.parent is not None
        assert call.parent.span_id == chat.context.span_id
        assert f"{chat.context.span_id:016x}" in reply.meta.traceparent
        assert chat.attributes is not None
        assert chat.attributes["gen_ai.usage.output_tokens"] == NUM_TOKENS
        assert chat.attributes["gen_ai.response.finish_reasons"] == ("length",)
        assert chat.attributes["baton.ttft_ms"] > 0
        assert call.status.is_ok or call.status.is_unset
        exposition = gw.metrics.render()[0].decode()
        assert 'baton_outcome="done"' in exposition


# --- refusals


@pytest.mark.parametrize(
    ("code", "field", "kind", "param"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, "top_p", InvalidRequest, "top_p"),
        (grpc.StatusCode.INVALID_ARGUMENT, "include_stop", InvalidRequest, "include_stop_str_in_output"),
        (grpc.StatusCode.INVALID_ARGUMENT, "sampling", InvalidRequest, None),
        (grpc.StatusCode.INVALID_ARGUMENT, "prompt_token_ids", ContextTooLong, "messages"),
        (grpc.StatusCode.INVALID_ARGUMENT, "max_tokens", ContextTooLong, "max_tokens"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "", Overloaded, None),
        (grpc.StatusCode.UNAVAILABLE, "", Unavailable, None),
        (grpc.StatusCode.FAILED_PRECONDITION, "fingerprint", Unavailable, None),
        (grpc.StatusCode.CANCELLED, "", Unavailable, None),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "", Unavailable, None),
        (grpc.StatusCode.INTERNAL, "", GatewayError, None),
    ],
)
async def test_a_refusal_is_told_in_http_terms(
    code: grpc.StatusCode, field: str, kind: type[GatewayError], param: str | None
) -> None:
    worker = refusing(code, field)
    async with gateway(worker) as gw:
        with pytest.raises(kind) as refused:
            await gw.start()
        assert refused.value.param == param
        assert gw.generations.num_active == 0
        assert "127.0.0.1" not in refused.value.message
        await eventually(lambda: worker.num_running == 0)


async def test_a_prompt_longer_than_the_model_is_refused_without_a_call() -> None:
    worker = FakeWorker()
    async with gateway(worker) as gw:
        with pytest.raises(ContextTooLong) as refused:
            await gw.start(replace(SPEC, prompt_token_ids=(1,) * 1000))
        assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "messages")
        assert not worker.requests


async def test_a_full_worker_sends_the_request_to_another() -> None:
    full, free = refusing(grpc.StatusCode.RESOURCE_EXHAUSTED), FakeWorker()
    free.script.load = common_pb2.Load(running=8, blocks_total=1000)  # so the full one is asked first
    async with gateway(full, free) as gw:
        reply = await gw.finished()
        assert text_of(reply) == text(NUM_TOKENS)
        assert len(full.requests) == len(free.requests) == 1


async def test_full_beats_broken_in_what_the_client_is_told() -> None:
    async with gateway(
        refusing(grpc.StatusCode.RESOURCE_EXHAUSTED), refusing(grpc.StatusCode.UNAVAILABLE)
    ) as gw:
        with pytest.raises(Overloaded):
            await gw.start()


async def test_no_worker_is_503_within_two_seconds() -> None:
    worker = FakeWorker()
    async with gateway(worker) as gw:
        for breaking in (_kill, _freeze):
            await breaking(worker)
            started = time.monotonic()
            with pytest.raises(Unavailable):
                await gw.start()
            assert time.monotonic() - started < 2.0
            await worker.kill()
            worker.script.frozen = False
            await worker.start()
            await eventually(lambda: gw.router.is_ready)


async def _kill(worker: FakeWorker) -> None:
    await worker.kill()


async def _freeze(worker: FakeWorker) -> None:
    worker.script.frozen = True


async def test_a_worker_that_never_admits_is_given_up() -> None:
    worker = FakeWorker(script=Script(admit_delay_s=30))
    async with gateway(worker, admit_timeout_s=0.2) as gw:
        with pytest.raises(Unavailable):
            await gw.start()
        await eventually(lambda: worker.num_running == 0, timeout=1)
        with pytest.raises(DeadlineExceeded):
            await gw.start(replace(SPEC, timeout_s=0.1))


async def test_more_replies_than_allowed_are_refused() -> None:
    async with gateway(FakeWorker(script=Script(token_delay_s=0.05)), max_replies=1) as gw:
        reply = await gw.start()
        with pytest.raises(Overloaded):
            await gw.start()
        reply.request_stop("cancelled")
        await eventually(lambda: gw.generations.num_active == 0)
        await gw.start()


async def test_one_refused_choice_refuses_the_reply_and_ends_the_other() -> None:
    good, bad = (
        FakeWorker(script=Script(token_delay_s=0.05)),
        refusing(grpc.StatusCode.INVALID_ARGUMENT, "stop"),
    )
    async with gateway(good, bad) as gw:
        with pytest.raises(InvalidRequest):
            await gw.start(replace(SPEC, num_choices=2))
        await eventually(lambda: good.num_running == 0, timeout=1)
        assert gw.generations.num_active == 0


async def test_a_client_that_leaves_during_admission_leaves_nothing_behind() -> None:
    worker = FakeWorker(script=Script(admit_delay_s=30))
    async with gateway(worker) as gw:
        starting = asyncio.create_task(gw.start())
        await eventually(lambda: worker.num_running == 1)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        await eventually(lambda: worker.num_running == 0, timeout=1)
        assert gw.generations.num_active == 0


async def test_a_client_that_leaves_while_the_log_is_created_leaves_an_ended_reply() -> None:
    created: list[ReplyMeta] = []

    class SlowLog(MemoryEventLog):
        async def create(self, meta: ReplyMeta) -> int:
            epoch = await super().create(meta)
            created.append(meta)
            await asyncio.sleep(0.1)
            return epoch

    worker, log = FakeWorker(script=Script(token_delay_s=1)), SlowLog("g1")
    async with gateway(worker, log=log) as gw:
        starting = asyncio.create_task(gw.start())
        await eventually(lambda: bool(created))
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting

        async def has_ended() -> bool:
            return (await log.state(created[0].reply_id)).status is ReplyStatus.CANCELLED

        await eventually(has_ended, timeout=1)
        await eventually(lambda: worker.num_running == 0, timeout=1)


async def test_with_the_log_down_a_reply_lives_in_memory() -> None:
    class DownLog(MemoryEventLog):
        async def create(self, meta: ReplyMeta) -> int:
            raise LogUnavailable

        async def healthy(self) -> bool:
            return False

    async with gateway(FakeWorker(), log=DownLog("g1")) as gw:
        reply = await gw.start()
        await eventually(lambda: reply.ended and reply.events[-1].is_terminal)
        assert not reply.resumable
        assert text_of(reply) == text(NUM_TOKENS)


# --- workers that fail midway


@pytest.mark.parametrize("num_tokens", range(NUM_TOKENS + 1))
async def test_a_worker_that_dies_after_any_token_costs_no_text(num_tokens: int) -> None:
    dying, spare = FakeWorker(script=Script(die_after=num_tokens)), FakeWorker()
    spare.script.load = common_pb2.Load(running=8, blocks_total=1000)
    async with gateway(dying, spare) as gw:
        reply = await gw.finished()
        assert text_of(reply) == text(NUM_TOKENS)
        assert list(spare.requests[0].generated_token_ids) == list(range(num_tokens))
        assert spare.requests[0].sampling == dying.requests[0].sampling
        assert kinds(reply).count(EventKind.FINISH) == 1
        assert reply.status is ReplyStatus.DONE


@pytest.mark.parametrize(
    "code",
    [
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.DATA_LOSS,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.UNKNOWN,
    ],
)
async def test_whatever_status_ends_a_call_the_reply_goes_on(code: grpc.StatusCode) -> None:
    dying, spare = FakeWorker(script=Script(die_after=3, die_with=code)), FakeWorker()
    spare.script.load = common_pb2.Load(running=8, blocks_total=1000)
    async with gateway(dying, spare) as gw:
        reply = await gw.finished()
        assert text_of(reply) == text(NUM_TOKENS)
        assert f'baton_reason="{code.name.lower()}"' in gw.metrics.render()[0].decode()


async def test_a_worker_that_fails_every_two_tokens_still_gets_there() -> None:
    async with gateway(FakeWorker(script=Script(die_after=2)), retry_s=1.0) as gw:
        reply = await gw.finished()
        assert text_of(reply) == text(NUM_TOKENS)


@pytest.mark.parametrize(
    "garbage",
    [
        decode_pb2.GenerateMessage(),
        decode_pb2.GenerateMessage(delta=decode_pb2.Delta(tokens=[common_pb2.SampledToken(token_id=1)])),
        decode_pb2.GenerateMessage(delta=decode_pb2.Delta(text="no token")),
        decode_pb2.GenerateMessage(finished=decode_pb2.Finished()),
    ],
)
async def test_garbage_is_a_failure_and_is_not_shown(garbage: decode_pb2.GenerateMessage) -> None:
    mad, spare = FakeWorker(script=Script(garbage_after=3, garbage=garbage)), FakeWorker()
    spare.script.load = common_pb2.Load(running=8, blocks_total=1000)
    async with gateway(mad, spare) as gw:
        reply = await gw.finished()
        assert text_of(reply) == text(NUM_TOKENS)
        await eventually(lambda: mad.num_running == 0, timeout=1)


async def test_an_end_without_finished_is_a_failure_not_a_success() -> None:
    async with gateway(FakeWorker(script=Script(end_after=4)), retry_s=1.0) as gw:
        reply = await gw.finished()
        assert text_of(reply) == text(NUM_TOKENS)
        assert kinds(reply)[-1] is EventKind.DONE


async def test_a_worker_that_is_killed_and_started_again_goes_on() -> None:
    worker = FakeWorker(script=Script(token_delay_s=0.01))
    async with gateway(worker, retry_s=5.0) as gw:
        reply = await gw.start()
        await eventually(lambda: len(reply.events) > 8)
        await worker.kill()
        await eventually(lambda: not gw.router.is_ready)
        await worker.start()
        await eventually(lambda: reply.settled)
        assert text_of(reply) == text(NUM_TOKENS)
        assert len(worker.requests) == 2


async def test_a_worker_that_freezes_is_left_for_another() -> None:
    frozen, spare = FakeWorker(script=Script(stall_after=5)), FakeWorker()
    spare.script.load = common_pb2.Load(running=8, blocks_total=1000)
    async with gateway(frozen, spare) as gw:
        reply = await gw.start()
        await eventually(lambda: text_of(reply) == text(5))
        frozen.script.frozen = True
        await eventually(lambda: reply.settled, timeout=6)
        assert text_of(reply) == text(NUM_TOKENS)
        await eventually(lambda: frozen.num_running == 0, timeout=1)


async def test_without_workers_the_reply_ends_with_one_error_after_the_retry_time() -> None:
    worker = FakeWorker(script=Script(token_delay_s=0.02))
    async with gateway(worker, retry_s=0.5) as gw:
        reply = await gw.start()
        await eventually(lambda: len(reply.events) > 6)
        await worker.kill()
        started = time.monotonic()
        await eventually(lambda: reply.settled, timeout=3)
        assert 0.4 < time.monotonic() - started < 1.5
        error = error_of(reply)
        assert (error["status"], error["code"]) == (503, "decode_unavailable")
        assert text(NUM_TOKENS).startswith(text_of(reply))
        assert reply.status is ReplyStatus.ERROR


async def test_a_worker_that_admits_and_fails_again_and_again_is_not_hammered() -> None:
    worker = FakeWorker(script=Script(first_delay_s=0.03, die_after=0))
    async with gateway(worker, retry_s=0.6) as gw:
        reply = await gw.finished()
        assert error_of(reply)["code"] == "decode_unavailable"
        assert len(worker.requests) < 12


async def test_a_replaced_model_ends_the_reply() -> None:
    worker = FakeWorker(script=Script(token_delay_s=0.05))
    async with gateway(worker, retry_s=5.0) as gw:
        reply = await gw.start()
        await eventually(lambda: len(reply.events) > 5)
        await worker.kill()
        worker.fingerprint = "another"
        await worker.start()
        await eventually(lambda: reply.settled)
        assert error_of(reply)["code"] == "model_replaced"


async def test_a_request_found_invalid_after_admission_ends_in_band() -> None:
    worker = FakeWorker(script=Script(die_after=2, die_with=grpc.StatusCode.INVALID_ARGUMENT))
    async with gateway(worker) as gw:
        assert error_of(await gw.finished())["status"] == 400
        assert len(worker.requests) == 1


async def test_one_failing_choice_does_not_disturb_the_other() -> None:
    first, second = FakeWorker(script=Script(die_after=4)), FakeWorker(script=Script(token_delay_s=0.01))
    async with gateway(first, second) as gw:
        reply = await gw.finished(replace(SPEC, num_choices=2))
        assert text_of(reply, 0) == text_of(reply, 1) == text(NUM_TOKENS)


# --- endings that are asked for


async def test_cancelling_ends_the_call_and_closes_the_reply() -> None:
    worker = FakeWorker(script=Script(token_delay_s=0.03))
    async with gateway(worker) as gw:
        reply = await gw.start()
        async with gw.hub.attach(reply.meta.reply_id):
            await eventually(lambda: len(reply.events) > 6)
            started = time.monotonic()
            await gw.hub.cancel(reply.meta.reply_id)
            await eventually(lambda: reply.settled and worker.num_running == 0, timeout=1)
        assert time.monotonic() - started < 1
        (finish,) = payloads(reply, EventKind.FINISH)
        assert finish["reason"] == "cancelled"
        num_tokens = len(payloads(reply, EventKind.DELTA))
        assert finish["num_generated_tokens"] == num_tokens < NUM_TOKENS
        assert kinds(reply)[-2:] == [EventKind.USAGE, EventKind.DONE]
        assert payloads(reply, EventKind.DONE)[0]["timings"]["ttft"] > 0
        assert reply.status is ReplyStatus.CANCELLED


async def test_cancelling_while_queued_or_between_workers() -> None:
    worker = FakeWorker(script=Script(first_delay_s=30))
    async with gateway(worker, retry_s=30) as gw:
        queued = await gw.start()
        await gw.hub.cancel(queued.meta.reply_id)
        await eventually(lambda: queued.settled and worker.num_running == 0, timeout=1)
        assert queued.status is ReplyStatus.CANCELLED
        stranded = await gw.start()
        await worker.kill()
        await eventually(lambda: not gw.router.is_ready)
        await gw.hub.cancel(stranded.meta.reply_id)
        await eventually(lambda: stranded.settled, timeout=1)
        assert stranded.status is ReplyStatus.CANCELLED


async def test_a_reply_that_nobody_reads_is_abandoned() -> None:
    worker = FakeWorker(script=Script(token_delay_s=0.5))
    async with gateway(worker, resume_grace_s=0.3) as gw:
        reply = await gw.start()
        await eventually(lambda: reply.settled and worker.num_running == 0, timeout=3)
        assert error_of(reply)["code"] == "abandoned"
        assert reply.status is ReplyStatus.ABANDONED


async def test_a_fenced_reply_just_stops() -> None:
    worker = FakeWorker(script=Script(token_delay_s=0.03))
    async with gateway(worker) as gw:
        reply = await gw.start()
        await eventually(lambda: len(reply.events) > 5)
        reply.fence()
        await eventually(lambda: worker.num_running == 0 and gw.generations.num_active == 0, timeout=1)
        assert not reply.ended


async def test_overflow_and_timeout_end_with_an_error() -> None:
    worker = FakeWorker(script=Script(token_delay_s=0.05))
    async with gateway(worker) as gw:
        overflowing = await gw.start()
        overflowing.request_stop("overflow")
        await eventually(lambda: overflowing.settled)
        assert error_of(overflowing)["code"] == "log_unavailable"
        late = await gw.finished(replace(SPEC, timeout_s=0.2))
        assert (error_of(late)["status"], error_of(late)["code"]) == (504, "timeout")
        await eventually(lambda: worker.num_running == 0, timeout=1)


async def test_closing_ends_what_runs_and_its_calls() -> None:
    worker = FakeWorker(script=Script(token_delay_s=0.05))
    async with gateway(worker) as gw:
        begun, fresh = await gw.start(), await gw.start()
        await gw.generations.close()
        await eventually(lambda: begun.settled and fresh.settled and worker.num_running == 0, timeout=1)
        assert error_of(begun)["code"] == error_of(fresh)["code"] == "gateway_stopping"


async def test_what_a_worker_reports_of_this_gateways_own_requests_counts_once() -> None:
    worker = FakeWorker(script=Script(stall_after=0))
    other = FakeWorker(script=Script(load=common_pb2.Load(running=3, blocks_total=1000)))
    async with gateway(worker, other) as gw:
        for _ in range(2):
            await gw.start()
        reported = time.monotonic()
        worker.script.load = common_pb2.Load(running=2, blocks_total=1000)
        await eventually(lambda: (gw.router.heard_at(worker.address) or 0.0) > reported + 0.1)
        await gw.start()
        assert (len(worker.requests), len(other.requests)) == (3, 0)


async def cancel_again_and_again(task: "asyncio.Task[object]") -> None:
    while not task.done():
        task.cancel()
        await asyncio.sleep(0)


async def test_a_start_that_is_cancelled_again_and_again_leaves_no_call() -> None:
    admits, hesitates = (
        FakeWorker(script=Script(stall_after=0)),
        FakeWorker(script=Script(admit_delay_s=60.0)),
    )
    async with gateway(admits, hesitates) as gw:
        start = asyncio.create_task(gw.start(replace(SPEC, num_choices=2)))
        await eventually(lambda: admits.num_running == hesitates.num_running == 1)
        await asyncio.sleep(0.1)  # the one has been admitted
        await cancel_again_and_again(start)
        await eventually(lambda: admits.num_running == hesitates.num_running == 0, timeout=1)
        assert gw.router.num_under_way == 0


@pytest.mark.parametrize("num_steps", range(1, 7))
async def test_a_reply_that_is_cancelled_again_and_again_leaves_no_call(num_steps: int) -> None:
    worker = FakeWorker(script=Script(stall_after=0))
    async with gateway(worker) as gw:
        before = asyncio.all_tasks()
        await gw.start()
        (run,) = [task for task in asyncio.all_tasks() - before if "ReplyTask.run" in repr(task.get_coro())]
        for _ in range(num_steps):
            await asyncio.sleep(0)
        await cancel_again_and_again(run)
        assert gw.router.num_under_way == 0
        await eventually(lambda: worker.num_running == 0, timeout=1)
