"""What the commands raise when they cannot do what was asked: one line for the terminal, no traceback."""


class CommandError(Exception):
    """The command failed; the message says why and what to do."""


class ModelUnavailable(CommandError):
    """The model could not be fetched, checked or converted."""


class StartFailed(CommandError):
    """A process of the stack died or did not get ready; `log_tail` holds its last log lines."""

    def __init__(self, message: str, log_tail: str = "") -> None:
        super().__init__(message)
        self.log_tail = log_tail
