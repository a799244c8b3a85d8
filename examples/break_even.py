"""From which link speed on is another model's KV there sooner than a full prefill? Arithmetic only.

    python examples/break_even.py --tokens-per-s 10000 --block 8

Fill in your model's sizes and the prefill speed that you measured. The sum is per token, without
fixed costs and queues. A server also counts those, with the speeds that it sees.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields

from sglang_droidspeak.cli.doctor import break_even_byte_s

LINKS = {"10 Gbit/s": 1.25e9, "25 Gbit/s": 3.125e9, "100 Gbit/s": 12.5e9}
SPEEDS = (2_000, 10_000, 40_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Sizes of a sender and receiver, by default those of Llama-3-8B."""

    layers: int = 32
    hidden: int = 4096
    kv_heads: int = 8
    head_dim: int = 128
    value_bytes: int = 2
    block: int = 8
    """Layers that the receiver recomputes."""
    tokens_per_s: int = 10_000
    """Tokens per second of a full prefill."""

    @property
    def e_bytes(self) -> int:
        """Bytes of E for one token, at the block's first layer."""
        return self.hidden * self.value_bytes

    @property
    def kv_bytes(self) -> int:
        """Bytes of KV for one token, at the loaded layers."""
        return (self.layers - self.block) * 2 * self.kv_heads * self.head_dim * self.value_bytes

    @property
    def full_s(self) -> float:
        return 1 / self.tokens_per_s

    @property
    def block_s(self) -> float:
        """Seconds per token to recompute the block. Its last layer needs only K and V, which costs
        little."""
        return self.full_s * max(0, self.block - 1) / self.layers

    def reuse_s(self, link: float) -> float:
        """Seconds per token to reuse. E is first; KV is loaded while the block is recomputed.
        `link` is in bytes/s."""
        return max(self.e_bytes / link + self.block_s, (self.e_bytes + self.kv_bytes) / link)

    def break_even(self) -> float:
        """Bytes per second at which reuse and full prefill take equally long."""
        price = {"full_prefill_s": self.full_s, "recompute_s": self.block_s}
        return break_even_byte_s({**price, "e_bytes": self.e_bytes, "kv_bytes": self.kv_bytes})


def markdown(pair: Pair | None = None) -> str:
    """Make one row for each prefill speed, or only for the pair's."""
    pairs = [pair] if pair else [Pair(tokens_per_s=it) for it in SPEEDS]
    head = ["full prefill, tokens/s", "break-even, GB/s", *LINKS, "any faster link"]
    rows = [head, ["---"] * len(head)]
    for size in pairs:
        gains = [size.full_s / size.reuse_s(link) for link in LINKS.values()]
        cells = [f"{gain:.1f} ×" if gain > 1 else "full prefill" for gain in gains]
        most = f"{size.full_s / size.block_s:.1f} × at most" if size.block_s else "no limit"
        rows.append([f"{size.tokens_per_s:,}", f"{size.break_even() / 1e9:.2f}", *cells, most])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for field in fields(Pair):
        name = f"--{field.name.replace('_', '-')}"
        parser.add_argument(name, type=int, default=field.default, help="default: %(default)s")
    print(markdown(Pair(**vars(parser.parse_args()))), end="")


if __name__ == "__main__":
    main()
