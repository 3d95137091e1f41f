"""What a prefill worker may answer instead of the truth: each takes the honest messages."""

import torch

from baton.v1 import prefill_pb2
from services.kv import page as kv_page

Messages = list[prefill_pb2.PrefillMessage]


def flip(messages: Messages) -> Messages:
    page = next(message.page for message in messages if message.HasField("page"))
    payload = bytearray(page.payload)
    payload[len(payload) // 2] ^= 0x10
    page.payload = bytes(payload)
    return messages


def truncate(messages: Messages) -> Messages:
    page = next(message.page for message in messages if message.HasField("page"))
    page.payload = page.payload[:-4]
    return messages


def drop_page(messages: Messages) -> Messages:
    index = next(i for i, message in enumerate(messages) if message.HasField("page"))
    return messages[:index] + messages[index + 1 :]


def repeat_page(messages: Messages) -> Messages:
    index = next(i for i, message in enumerate(messages) if message.HasField("page"))
    return [*messages[: index + 1], messages[index], *messages[index + 1 :]]


def drop_result(messages: Messages) -> Messages:
    return [message for message in messages if not message.HasField("result")]


def miscount(messages: Messages) -> Messages:
    messages[-1].result.num_bytes -= 1
    return messages


def two_first_tokens(messages: Messages) -> Messages:
    first = next(message for message in messages if message.HasField("first_token"))
    return [first, *messages]


def after_result(messages: Messages) -> Messages:
    page = next(message for message in messages if message.HasField("page"))
    return [*messages, page]


def first_token_only(messages: Messages) -> Messages:
    return [message for message in messages if message.HasField("first_token")]


def absurd_first_token(messages: Messages) -> Messages:
    next(m for m in messages if m.HasField("first_token")).first_token.token.token_id = 4_000_000_000
    return messages


def huge_numbers(messages: Messages) -> Messages:
    page = next(message.page for message in messages if message.HasField("page"))
    page.payload = torch.full((len(page.payload) // 4,), 3e38).numpy().tobytes()
    page.checksum = kv_page.checksum(page, [memoryview(page.payload)])
    return messages


def nothing(messages: Messages) -> Messages:
    return []


LIES = [
    flip,
    truncate,
    drop_page,
    repeat_page,
    drop_result,
    miscount,
    two_first_tokens,
    after_result,
    first_token_only,
    absurd_first_token,
    huge_numbers,
    nothing,
]
