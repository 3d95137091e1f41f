"""What ends a benchmark without a figure."""


class BenchFailed(Exception):
    """Something computed was not what was asked for, so its time would mean nothing."""
