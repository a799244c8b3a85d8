"""Time eight adapters of one server that read one document, beside SGLang alone. This is
`benchmarks.lora` with layers of an 8B model."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import lora
from benchmarks.gpu.parts import is_rehearsal
from benchmarks.gpu.random_weights import write_seeded
from benchmarks.gpu.servers import SizedServer, env, scale
from benchmarks.random_servers import NUM_LAYERS

NUM_ADAPTERS = 8
DEVICE = {
    "device": "cuda",
    "dtype": "bfloat16",
    "lora_backend": "triton",
    "mem_fraction_static": 0.3,
}


def measure(_num_tokens: int) -> Iterator[dict[str, Any]]:
    """Measure one round of times to first token: adapters one after the other, then all at once."""
    at, num_adapters = scale(), 2 if is_rehearsal() else NUM_ADAPTERS
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (base,) = write_seeded(folder, at.config(NUM_LAYERS), ("base",), 0)
        models = lora.write(base, num_adapters)
        specs = lora.specs(
            models,
            at.document_tokens,
            num_adapters,
            SizedServer,
            **({} if is_rehearsal() else DEVICE),
        )
        with lora.bench(specs, at.document_tokens, env(folder)) as testbed:
            measured = lora.measure(testbed, 1)
    results = {"adapters": num_adapters}
    for who in lora.CONTENDERS:
        results |= {f"{who}_{name}": round(ms, 2) for name, ms in measured[who].items()}
    yield results | {name: round(measured[name], 3) for name in ("later_gain", "burst_gain")}
