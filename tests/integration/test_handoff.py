"""The handoff over real gRPC: right text or a typed error, and no block kept, whatever prefill does."""

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from grpc import aio

from baton.v1 import prefill_pb2, prefill_pb2_grpc
from services.rpc.status import failed_targets_of, is_fault
from services.wire import identity_to_proto
from tests.integration.cluster import Cluster, collect, generate_request, running_cluster
from tests.integration.lies import LIES, Messages, first_token_only, nothing
from tests.integration.lying_prefill import Tamper, lying_prefill
from tests.waiting import eventually

KV_BYTES_PER_TOKEN = 2 * 2 * 8 * 4  # of the simulated model: layers, keys and values, head size, float32


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with running_cluster(tmp_path, max_page_bytes=4096) as cluster:
        yield cluster
        await eventually(lambda: cluster.blocks_used == 0, timeout=5)


@pytest.fixture
async def lenient(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with running_cluster(tmp_path, local_prefill="fallback", max_page_bytes=4096) as cluster:
        yield cluster
        await eventually(lambda: cluster.blocks_used == 0, timeout=5)


def closed_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


async def test_decode_generates_from_imported_kv_alone(cluster: Cluster) -> None:
    reply = await collect(cluster.stub.Generate(generate_request(prefill_targets=cluster.targets)))
    assert reply.finished is not None
    assert reply.finished.num_generated_tokens == len(reply.token_ids) == 40
    assert cluster.decode[0].worker.load().prompt_tokens_computed == 0
    assert cluster.prefill[0].worker.load().prompt_tokens_computed == 100
    moved = reply.finished.handoff.num_bytes
    assert (
        moved == cluster.prefill[0].worker.kv.traffic.sent == cluster.decode[0].worker.kv.traffic.received > 0
    )
    assert reply.finished.handoff.num_pages > 1


async def test_what_decode_holds_is_not_sent_again(cluster: Cluster) -> None:
    """The same tenant's second request moves the last token alone; another tenant's everything."""
    moved, texts = [], set()
    for salt in ("a", "a", "b"):
        request = generate_request(prefill_targets=cluster.targets, cache_salt=salt)
        reply = await collect(cluster.stub.Generate(request))
        assert reply.finished is not None
        moved.append(reply.finished.handoff.num_bytes)
        texts.add(reply.text)
    assert moved == [moved[0], moved[0] // 100, moved[0]]
    assert len(texts) == 1


@pytest.mark.parametrize("transport", ["grpc", "tcp"])
@pytest.mark.parametrize(("payload", "share"), [("exact", 1), ("float16", 1 / 2), ("int8", (8 + 4) / 32)])
async def test_decode_says_how_pages_look_on_the_wire(
    tmp_path: Path, transport: str, payload: str, share: float
) -> None:
    """The simulated model's heads have 8 elements; it would notice another cache."""
    async with running_cluster(tmp_path, kv_transport=transport, kv_payload=payload) as cluster:
        for salt in ("a", "b"):  # the second may go on a data connection
            request = generate_request(prefill_targets=cluster.targets, cache_salt=salt)
            reply = await collect(cluster.stub.Generate(request))
            assert reply.finished is not None
            assert reply.finished.handoff.num_bytes == 100 * KV_BYTES_PER_TOKEN * share
        assert len(reply.token_ids) == 40


async def test_a_request_that_names_no_payload_format_is_refused(cluster: Cluster) -> None:
    identity = identity_to_proto(cluster.prefill[0].worker.engine.info.identity)
    request = prefill_pb2.PrefillRequest(identity=identity, prompt_token_ids=[1, 2])
    async with aio.insecure_channel(cluster.targets[0]) as channel:
        with pytest.raises(aio.AioRpcError) as caught:
            await prefill_pb2_grpc.PrefillStub(channel).Prefill(request).read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "payload_format" in (caught.value.details() or "")


async def test_a_prompt_that_decode_holds_whole_is_not_handed_over(lenient: Cluster) -> None:
    replies = []
    for _ in range(2):
        request = generate_request(prefill_targets=lenient.targets)
        replies.append(await collect(lenient.stub.Generate(request)))
    moved = [reply.finished.handoff.num_bytes for reply in replies if reply.finished is not None]
    assert moved[0] > 0
    assert moved[1] == 0
    assert lenient.prefill[0].worker.load().prompt_tokens_computed == 100
    assert replies[0].text == replies[1].text
    assert lenient.decode[0].worker.load().prompt_tokens_computed == 1


async def test_a_prompt_seen_before_is_read_from_the_cache_by_the_same_tenant_only(cluster: Cluster) -> None:
    """The second tenant computes it again: neither its tokens nor its timing tell of the first one's."""
    computed, cached, texts = [], [], set()
    for salt in ("a", "a", "b"):
        request = generate_request(prefill_targets=cluster.targets, cache_salt=salt)
        reply = await collect(cluster.stub.Generate(request))
        assert reply.finished is not None
        computed.append(cluster.prefill[0].worker.load().prompt_tokens_computed)
        cached.append(reply.finished.num_cached_tokens)
        texts.add(reply.text)
    assert computed == [100, 101, 201]
    assert cached == [0, 99, 0]
    assert len(texts) == 1


async def test_split_and_local_text_are_equal(cluster: Cluster, lenient: Cluster) -> None:
    split = await collect(cluster.stub.Generate(generate_request(prefill_targets=cluster.targets)))
    local = await collect(lenient.stub.Generate(generate_request()))
    assert split.text == local.text
    assert split.token_ids == local.token_ids
    assert local.first_timings is not None
    assert local.first_timings.prefill_target == "local"


@pytest.mark.parametrize("cut", [1, 2, 17, 39])
async def test_a_continuation_gives_the_rest(cluster: Cluster, cut: int) -> None:
    whole = await collect(cluster.stub.Generate(generate_request(prefill_targets=cluster.targets)))
    rest = await collect(
        cluster.stub.Generate(
            generate_request(
                prefill_targets=cluster.targets, generated_token_ids=whole.token_ids[:cut], epoch=2
            )
        )
    )
    assert whole.token_ids[:cut] + rest.token_ids == whole.token_ids
    assert whole.text.endswith(rest.text)
    assert rest.finished is not None
    assert rest.finished.num_generated_tokens == 40


async def test_a_continuation_that_is_complete_asks_nobody(cluster: Cluster) -> None:
    whole = await collect(cluster.stub.Generate(generate_request(prefill_targets=cluster.targets)))
    async with lying_prefill(cluster.targets[0], nothing) as (liar, servicer):
        request = generate_request(prefill_targets=[liar], generated_token_ids=whole.token_ids)
        rest = await collect(cluster.stub.Generate(request))
    assert rest.token_ids == []
    assert rest.finished is not None
    assert rest.finished.num_generated_tokens == 40
    assert servicer.num_calls == 0


async def test_one_token_is_one_token(cluster: Cluster) -> None:
    reply = await collect(
        cluster.stub.Generate(generate_request(prefill_targets=cluster.targets, max_tokens=1))
    )
    assert len(reply.token_ids) == 1
    assert reply.finished is not None
    assert reply.finished.num_generated_tokens == 1


@pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 600])
async def test_prompt_lengths_around_blocks(cluster: Cluster, length: int) -> None:
    reply = await collect(
        cluster.stub.Generate(
            generate_request(num_prompt_tokens=length, prefill_targets=cluster.targets, max_tokens=20)
        )
    )
    assert len(reply.token_ids) == 20
    assert cluster.decode[0].worker.load().prompt_tokens_computed == 0


async def test_a_spare_replaces_a_worker_that_is_not_there(cluster: Cluster) -> None:
    targets = [closed_port(), *cluster.targets]
    reply = await collect(cluster.stub.Generate(generate_request(prefill_targets=targets)))
    assert reply.first_timings is not None
    assert reply.first_timings.prefill_attempts == 2
    assert reply.first_timings.prefill_target == cluster.targets[0]


async def test_prefill_workers_that_fail_are_named_and_full_ones_are_not(cluster: Cluster) -> None:
    honest, dead = cluster.targets[0], closed_port()
    async with lying_prefill(honest, nothing, then_fail=grpc.StatusCode.RESOURCE_EXHAUSTED) as (full, _):
        targets = [dead, full, honest]
        reply = await collect(cluster.stub.Generate(generate_request(prefill_targets=targets)))
    assert reply.first_timings is not None
    assert list(reply.first_timings.failed_prefill_targets) == [dead]
    assert reply.finished is not None
    assert list(reply.finished.timings.failed_prefill_targets) == [dead]


async def test_a_worker_whose_pages_never_come_is_named_at_the_end(lenient: Cluster) -> None:
    async with lying_prefill(lenient.targets[0], first_token_only) as (liar, _):
        reply = await collect(lenient.stub.Generate(generate_request(prefill_targets=[liar])))
    assert reply.finished is not None
    assert list(reply.finished.timings.failed_prefill_targets) == [liar]


async def test_when_no_prefill_worker_delivers_the_status_names_those_at_fault(cluster: Cluster) -> None:
    dead = closed_port()
    with pytest.raises(aio.AioRpcError) as caught:
        await collect(cluster.stub.Generate(generate_request(prefill_targets=[dead])))
    assert failed_targets_of(caught.value) == (dead,)
    assert not is_fault(caught.value)  # not decode's


async def test_waiting_for_blocks_counts_once_when_a_prefill_worker_fails(tmp_path: Path) -> None:
    async with running_cluster(tmp_path, max_num_seqs=1, sim_token_ms=25.0) as cluster:
        ahead = cluster.stub.Generate(generate_request(prefill_targets=cluster.targets))
        await ahead.read()
        targets = [closed_port(), *cluster.targets]
        behind = cluster.stub.Generate(generate_request("reply-bbbbbbbbbbbbbbbb", prefill_targets=targets))
        _, reply = await asyncio.gather(collect(ahead), collect(behind))
    assert reply.first_timings is not None
    assert reply.first_timings.prefill_attempts == 2
    # About a second, against what a refused connection takes: a tenth of it.
    assert 0 < reply.first_timings.prefill_queue_ms < reply.first_timings.decode_queue_ms


async def test_without_any_prefill_worker_a_strict_decode_refuses_before_admission(cluster: Cluster) -> None:
    with pytest.raises(aio.AioRpcError) as caught:
        await collect(cluster.stub.Generate(generate_request()))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "BATON_LOCAL_PREFILL" in (caught.value.details() or "")


async def test_without_any_prefill_worker_a_lenient_decode_runs_the_prompt(lenient: Cluster) -> None:
    reply = await collect(lenient.stub.Generate(generate_request(prefill_targets=[closed_port()])))
    assert len(reply.token_ids) == 40
    assert lenient.decode[0].worker.load().prompt_tokens_computed == 100
    assert reply.first_timings is not None
    assert reply.first_timings.prefill_queue_ms > 0  # the lost attempt


@pytest.mark.parametrize("tamper", LIES, ids=lambda lie: lie.__name__)
async def test_a_lying_worker_costs_time_never_text(cluster: Cluster, tamper: Tamper) -> None:
    honest = cluster.targets[0]
    undisturbed = await collect(cluster.stub.Generate(generate_request(prefill_targets=[honest])))
    async with lying_prefill(honest, tamper) as (liar, servicer):
        reply = await collect(cluster.stub.Generate(generate_request(prefill_targets=[liar, honest])))
    assert servicer.num_calls == 1
    assert reply.token_ids == undisturbed.token_ids
    assert reply.text == undisturbed.text


@pytest.mark.parametrize("tamper", LIES, ids=lambda lie: lie.__name__)
async def test_a_liar_alone_ends_in_a_typed_error(cluster: Cluster, tamper: Tamper) -> None:
    async with lying_prefill(cluster.targets[0], tamper) as (liar, _):
        with pytest.raises(aio.AioRpcError) as caught:
            await collect(cluster.stub.Generate(generate_request(prefill_targets=[liar])))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert liar in (caught.value.details() or "")


async def test_reordered_pages_are_fine(cluster: Cluster) -> None:
    def reverse(messages: Messages) -> Messages:
        return [*reversed(messages[:-1]), messages[-1]]

    honest = cluster.targets[0]
    undisturbed = await collect(cluster.stub.Generate(generate_request(prefill_targets=[honest])))
    async with lying_prefill(honest, reverse) as (shuffler, _):
        reply = await collect(cluster.stub.Generate(generate_request(prefill_targets=[shuffler])))
    assert reply.token_ids == undisturbed.token_ids
    assert reply.finished is not None
    assert reply.finished.timings.prefill_attempts == 1


@pytest.mark.parametrize("status", [grpc.StatusCode.INTERNAL, grpc.StatusCode.RESOURCE_EXHAUSTED])
async def test_a_failure_after_the_first_token_never_samples_it_again(
    lenient: Cluster, status: grpc.StatusCode
) -> None:
    honest = lenient.targets[0]
    undisturbed = await collect(lenient.stub.Generate(generate_request(prefill_targets=[honest])))
    async with lying_prefill(honest, first_token_only, then_fail=status) as (liar, _):
        reply = await collect(lenient.stub.Generate(generate_request(prefill_targets=[liar])))
    assert reply.token_ids == undisturbed.token_ids


async def test_what_one_worker_finds_too_long_another_may_run(cluster: Cluster, lenient: Cluster) -> None:
    honest = cluster.targets[0]
    undisturbed = await collect(cluster.stub.Generate(generate_request(prefill_targets=[honest])))
    refusal = grpc.StatusCode.INVALID_ARGUMENT
    async with lying_prefill(honest, nothing, then_fail=refusal) as (small, _):
        spare = await collect(cluster.stub.Generate(generate_request(prefill_targets=[small, honest])))
        local = await collect(lenient.stub.Generate(generate_request(prefill_targets=[small])))
        with pytest.raises(aio.AioRpcError) as caught:
            await collect(cluster.stub.Generate(generate_request(prefill_targets=[small])))
    assert spare.token_ids == local.token_ids == undisturbed.token_ids
    assert caught.value.code() is refusal


async def test_another_model_is_refused_with_the_field(cluster: Cluster) -> None:
    with pytest.raises(aio.AioRpcError) as caught:
        await collect(
            cluster.stub.Generate(generate_request(prefill_targets=cluster.targets, fingerprint="other"))
        )
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "fingerprint" in (caught.value.details() or "")


async def test_a_prompt_that_can_never_fit_is_refused_at_once(cluster: Cluster) -> None:
    with pytest.raises(aio.AioRpcError) as caught:
        await collect(
            cluster.stub.Generate(generate_request(num_prompt_tokens=40_000, prefill_targets=cluster.targets))
        )
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_higher_epoch_ends_the_older_call(tmp_path: Path) -> None:
    async with running_cluster(tmp_path, sim_token_ms=20.0) as cluster:
        first = cluster.stub.Generate(generate_request(prefill_targets=cluster.targets))
        await first.read()
        second = cluster.stub.Generate(generate_request(prefill_targets=cluster.targets, epoch=2))
        with pytest.raises(aio.AioRpcError) as caught:
            await collect(first)
        assert caught.value.code() is grpc.StatusCode.ABORTED
        stale = cluster.stub.Generate(generate_request(prefill_targets=cluster.targets, epoch=1))
        with pytest.raises(aio.AioRpcError) as caught:
            await collect(stale)
        assert caught.value.code() is grpc.StatusCode.ABORTED
        assert len((await collect(second)).token_ids) == 40
        await eventually(lambda: cluster.blocks_used == 0, timeout=5)


@pytest.mark.parametrize("after_messages", [0, 1, 5])
async def test_cancelling_frees_both_sides(tmp_path: Path, after_messages: int) -> None:
    async with running_cluster(tmp_path, sim_token_ms=20.0, sim_prefill_ms_per_token=2.0) as cluster:
        call = cluster.stub.Generate(generate_request(prefill_targets=cluster.targets))
        await eventually(lambda: cluster.prefill[0].blocks_used > 0, timeout=5)
        for _ in range(after_messages):
            await call.read()
        call.cancel()
        await eventually(lambda: cluster.blocks_used == 0, timeout=5)
        await eventually(lambda: all(w.worker.lifecycle.num_active == 0 for w in cluster.prefill), timeout=5)


async def test_many_at_once_equal_each_alone(cluster: Cluster) -> None:
    requests = [
        generate_request(
            f"reply-{i:016d}", num_prompt_tokens=10 + 37 * i, prefill_targets=cluster.targets, seed=i
        )
        for i in range(12)
    ]
    alone = [await collect(cluster.stub.Generate(request)) for request in requests]
    for request in requests:
        request.epoch = 2
    together = await asyncio.gather(*(collect(cluster.stub.Generate(request)) for request in requests))
    assert [reply.token_ids for reply in together] == [reply.token_ids for reply in alone]


async def test_a_draining_worker_finishes_its_work_and_refuses_more(tmp_path: Path) -> None:
    async with running_cluster(tmp_path, sim_token_ms=10.0) as cluster:
        call = cluster.stub.Generate(generate_request(prefill_targets=cluster.targets))
        await call.read()
        drain = asyncio.create_task(cluster.decode[0].server.drain())
        await cluster.decode[0].worker.lifecycle.draining.wait()
        with pytest.raises(aio.AioRpcError) as caught:
            await collect(
                cluster.stub.Generate(
                    generate_request("reply-bbbbbbbbbbbbbbbb", prefill_targets=cluster.targets)
                )
            )
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        reply = await collect(call)
        assert reply.finished is not None
        await drain
