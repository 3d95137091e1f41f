"""What a measurement comes to when a worker dies under it, or a call fails although none did."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from grpc import StatusCode, aio

from bench.errors import BenchFailed
from bench.workers import watched
from cli.errors import StartFailed
from cli.processes import ProcessRecord, start_ticks
from cli.run_folder import Entry


@pytest.fixture
def process() -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as started:
        yield started
        started.kill()


def entry_of(process: "subprocess.Popen[bytes]", folder: Path) -> Entry:
    log = folder / "decode-0.log"
    log.write_text("its last words\n")
    record = ProcessRecord(process.pid, "input", start_ticks(process.pid), folder)
    return Entry("decode-0", "127.0.0.1:1", record, log)


def broken() -> aio.AioRpcError:
    return aio.AioRpcError(StatusCode.UNAVAILABLE, aio.Metadata(), aio.Metadata(), details="gone away")


async def test_a_worker_that_dies_is_named_whatever_the_measurement_made_of_it(
    process: "subprocess.Popen[bytes]", tmp_path: Path
) -> None:
    for failure in (broken(), BenchFailed("a stream broke")):

        async def measure(failure: Exception = failure) -> None:
            process.kill()
            raise failure

        with pytest.raises(StartFailed, match="decode-0 died") as caught:
            await watched([entry_of(process, tmp_path)], measure())
        assert caught.value.log_tail == "its last words"


async def test_a_worker_that_dies_ends_a_measurement_that_would_wait(
    process: "subprocess.Popen[bytes]", tmp_path: Path
) -> None:
    entry = entry_of(process, tmp_path)
    process.kill()
    with pytest.raises(StartFailed, match="decode-0 died"):
        await watched([entry], asyncio.sleep(60))


async def test_a_call_that_fails_although_all_live_is_said_in_a_sentence(
    process: "subprocess.Popen[bytes]", tmp_path: Path
) -> None:
    async def measure() -> None:
        raise broken()

    with pytest.raises(BenchFailed, match="a call failed: UNAVAILABLE: gone away"):
        await watched([entry_of(process, tmp_path)], measure())
