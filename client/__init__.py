"""A client that gets the whole reply: streams a chat completion and resumes it over cut connections.

Speaks HTTP through an httpx client that the caller passes in; imports nothing of the rest of the project.
"""

from client.errors import (
    ConnectionLost,
    ProtocolViolation,
    ReplyFailed,
    ReplyIncomplete,
    RequestRefused,
    ResumeRefused,
    StreamError,
)
from client.reply import Reply, Usage
from client.resuming import RetryPolicy
from client.stream import AsyncChatStream, ChatStream

__all__ = [
    "AsyncChatStream",
    "ChatStream",
    "ConnectionLost",
    "ProtocolViolation",
    "Reply",
    "ReplyFailed",
    "ReplyIncomplete",
    "RequestRefused",
    "ResumeRefused",
    "RetryPolicy",
    "StreamError",
    "Usage",
]
