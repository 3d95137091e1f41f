"""Finds the device, and moves tensors between it and the host.

The CUDA path is written after torch's documentation and tested on a CPU for shape and logic; it has
never run on a GPU.
"""

import torch

from services.engine.device import Device
from services.engine.errors import UnsupportedModel


def resolve(device: Device) -> torch.device:
    """Raises UnsupportedModel if a GPU is asked for and torch sees none."""
    if device is Device.CPU:
        return torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda")
    if device is Device.CUDA:
        raise UnsupportedModel("it is to run on a GPU (BATON_DEVICE=cuda), and torch sees none")
    return torch.device("cpu")


class HostCopies:
    """Copies between host and device. On the CPU there is nothing to copy."""

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A contiguous tensor on the host, complete."""
        return tensor.contiguous()

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor that work enqueued from now on may read."""
        return tensor


class CudaCopies(HostCopies):
    """Through pinned memory on a stream of its own, so that a page does not wait for a later step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.contiguous()
        ready = torch.cuda.current_stream(self._device).record_event()
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(ready)
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            host.copy_(tensor, non_blocking=True)
            tensor.record_stream(self._stream)
            done = self._stream.record_event()
        done.synchronize()
        return host

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        current = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            moved = tensor.pin_memory().to(self._device, non_blocking=True)
            done = self._stream.record_event()
        current.wait_event(done)
        moved.record_stream(current)
        return moved


def copies_for(device: torch.device) -> HostCopies:
    return CudaCopies(device) if device.type == "cuda" else HostCopies()
