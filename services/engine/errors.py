"""What the engine raises. It knows neither gRPC nor HTTP: `services/rpc/status.py` maps these.

EngineError
├── InvalidRequest        a field of the request is wrong; `field` names it
│   └── PromptTooLong     prompt and reply can never fit the model or the pool
├── QueueFull             the waiting queue is at its bound; try again later
├── IncompatibleModel     another worker's KV cache would mean something else here; `field` differs
├── InvalidKvPage         a page is damaged, out of range, repeated or missing
├── NoTokenToChoose       the model gave a sequence no finite best logit
├── SequenceReleased      the sequence was released while somebody waited on it
├── EngineStopped         the engine has shut down or its thread has failed
└── UnsupportedModel      the model cannot be served; raised at start, with the reason
"""


class EngineError(Exception):
    """Base of everything the engine raises on purpose."""


class InvalidRequest(EngineError):
    """A request field is wrong; `field` is its name as in `EngineRequest` or `SamplingParams`.

    `sampling` names no single one: together they bar every token.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class PromptTooLong(InvalidRequest):
    """Prompt plus reply can never fit."""


class QueueFull(EngineError):
    """The waiting queue is at its bound."""


class IncompatibleModel(EngineError):
    """Two workers' KV caches are not interchangeable; `field` is the first that differs."""

    def __init__(self, field: str, ours: object, theirs: object) -> None:
        super().__init__(f"{field} differs: {ours!r} here, {theirs!r} there")
        self.field = field


class InvalidKvPage(EngineError):
    """A KV page cannot be imported."""


class NoTokenToChoose(EngineError):
    """See `request.NoToken.LOGITS`."""


class SequenceReleased(EngineError):
    """The sequence no longer exists."""


class EngineStopped(EngineError):
    """The engine takes no more work."""


class UnsupportedModel(EngineError):
    """The model cannot be served."""
