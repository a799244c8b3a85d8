"""SGLang's kernels that read and write page-locked host memory themselves.

Each token's K and V of one layer, or of all layers, moves in one pass: no temporary, and two to
four of the device's multiprocessors. Light to import beside `names`.
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
