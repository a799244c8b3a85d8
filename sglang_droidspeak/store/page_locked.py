"""Host memory that the device copies from and to while the host goes on."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from cachetree import ConfigError

log = logging.getLogger(__name__)


def page_locked(memory: memoryview) -> Callable[[], None]:
    """Register it with the device, once and for all; returns what ends that.

    Blocks while the system makes all its pages. Raises ConfigError.
    """
    cuda = torch.cuda.cudart()
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    error = cuda.cudaHostRegister(address, memory.nbytes, 0)
    if int(error):
        raise ConfigError(
            f"{memory.nbytes} bytes of host memory cannot be page-locked (CUDA error "
            f"{int(error)}); lower host_gb or staging_gb"
        )

    def end() -> None:
        error = cuda.cudaHostUnregister(address)
        if int(error):
            log.warning("host memory stays page-locked: CUDA error %d", int(error))

    return end
