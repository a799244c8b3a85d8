"""SGLang's kernels in which the device itself reads and writes page-locked host memory.

They copy K and V of one layer, or of all layers, in one pass without a temporary buffer. They use
two to four of the device's multiprocessors. This module imports little, unlike `names`.
"""

from sglang.kernels.ops.kvcache.hicache import (
    can_use_hicache_jit_kernel,
    transfer_hicache_all_layer,
    transfer_hicache_one_layer,
)

__all__ = [
    "can_use_hicache_jit_kernel",
    "transfer_hicache_all_layer",
    "transfer_hicache_one_layer",
]
