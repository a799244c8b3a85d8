"""Models: their identity by content, their family, and the encoding of their KV and E.

Import `cachetree.checkpoint.codecs`, which computes on tensors, by its own name: it needs torch.
"""

from cachetree.checkpoint.adapters import (
    NO_ADAPTER,
    Adapter,
    acting,
    adapter_digest,
    base_of,
    read_adapter,
    read_invocation,
    require_base,
    targets,
)
from cachetree.checkpoint.digests import bytes_digest, tensor_digests, user_cache
from cachetree.checkpoint.family import Codec, Family, ModelIdentity, vector_bytes
from cachetree.checkpoint.identity import (
    adapted,
    first_difference,
    read_model_identity,
    read_shape,
    read_weights,
)
from cachetree.checkpoint.rope import varying_rope
from cachetree.checkpoint.safetensors_files import weight_files
from cachetree.checkpoint.sketches import Sketch, sketch_of
from cachetree.checkpoint.tokenizer import tokenizer_difference
from cachetree.checkpoint.weights import Layout, Weights

__all__ = [
    "NO_ADAPTER",
    "Adapter",
    "Codec",
    "Family",
    "Layout",
    "ModelIdentity",
    "Sketch",
    "Weights",
    "acting",
    "adapted",
    "adapter_digest",
    "base_of",
    "bytes_digest",
    "first_difference",
    "read_adapter",
    "read_invocation",
    "read_model_identity",
    "read_shape",
    "read_weights",
    "require_base",
    "sketch_of",
    "targets",
    "tensor_digests",
    "tokenizer_difference",
    "user_cache",
    "varying_rope",
    "vector_bytes",
    "weight_files",
]
