"""Partial prefill: run a block of layers over prefix tokens, to write their KV into their slots.

The block runs over the prefix only, right before the batch's own forward. So CUDA graphs, LoRA,
chunking and logits of that forward stay SGLang's. The KV equals that of one forward over prefix and
new tokens, because attention is causal.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch

from cachetree import ConfigError, Span
from sglang_droidspeak.engine.attention import recompute_attention
from sglang_droidspeak.engine.names import ScheduleBatch
from sglang_droidspeak.engine.replay import on_padding, prepared, replay_of, run_as_sglang
from sglang_droidspeak.ranks import Ranks, RanksApart
from sglang_droidspeak.start.config import MIN_PAGE_SIZE
from sglang_droidspeak.store.e_pool import Attachment

log = logging.getLogger(__name__)

_WARM_TOKENS: Final = MIN_PAGE_SIZE
"""Number of tokens in the warm-up: one page, for which SGLang's padding has slots."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTokens:
    """Tokens of one row of a batch, and the block that computes their KV."""

    row: int
    tokens: Span
    block: Span
    read_e: Callable[[Span, torch.Tensor], object] | None
    """Function that reads E at layer block.start, like `Source.read_e`. One call reads some of the
    tokens, because E of all would take much memory. None if block.start is 0."""
    e_map: str = ""
    """Digest of the map that corrects E; empty for no correction."""
    is_exact: bool = False
    """Whether E equals the receiver's own E. Then the block's KV and E are exact, too."""

    @property
    def kind(self) -> tuple[Span, bool, str]:
        """Key that is equal for all tokens that one forward can compute together."""
        return self.block, self.is_exact, self.e_map


def pack(prefixes: Iterable[BlockTokens], max_tokens: int) -> Iterator[list[BlockTokens]]:
    """Pack prefixes into forwards. A forward has at most `max_tokens` tokens, all of one kind. The
    tokens of a prefix stay in order.

    >>> [[(it.row, it.tokens.start, it.tokens.stop) for it in forward] for forward in pack([
    ...     BlockTokens(row=0, tokens=Span(0, 5), block=Span(2, 4), read_e=None),
    ...     BlockTokens(row=1, tokens=Span(0, 2), block=Span(2, 4), read_e=None)], max_tokens=4)]
    [[(0, 0, 4)], [(0, 4, 5), (1, 0, 2)]]
    """
    forward: list[BlockTokens] = []
    room = max_tokens
    for prefix in sorted(prefixes, key=lambda it: (it.kind, it.row)):
        start = prefix.tokens.start
        while start < prefix.tokens.stop:
            if not room or (forward and forward[-1].kind != prefix.kind):
                yield forward
                forward, room = [], max_tokens
            stop = min(prefix.tokens.stop, start + room)
            forward.append(replace(prefix, tokens=Span(start, stop)))
            room -= stop - start
            start = stop
    if forward:
        yield forward


class PartialPrefill:
    """Recompute the blocks of requests, by forward passes of one model runner. Use it on the
    scheduler thread only."""

    def __init__(self, attachment: Attachment, max_tokens: int, ranks: Ranks) -> None:
        self._ranks = ranks
        self._runner = attachment.runner
        self._stack = attachment.stack
        self._corrections = attachment.corrections
        self._max_tokens = max_tokens
        self._e, self._corrected = attachment.buffers(max_tokens)
        choice = attachment.server.settings.recompute_attention
        if self._stack is not None:
            self._attention = recompute_attention(self._runner, choice)

    def warm(self, forward_stream: torch.cuda.Stream | None) -> None:
        """Run two layers over a few tokens: from the embeddings, then from E, plain and corrected
        by each map. So the first request need not wait until something is compiled, loaded or
        connected. Called at start. The stream of forwards first waits for the current stream.
        Raises ConfigError if the layers do not run."""
        if self._stack is None:
            return
        streams = torch.get_device_module(self._runner.device)
        if forward_stream is not None:
            forward_stream.wait_stream(streams.current_stream())
        block, half = Span(0, min(2, len(self._stack))), _WARM_TOKENS // 2
        first = BlockTokens(row=0, tokens=Span(0, half), block=block, read_e=None)
        try:
            with (
                streams.stream(forward_stream),
                on_padding(self._runner, _WARM_TOKENS) as batch,
                self._ranks.together(),
            ):
                behind = Span(half, _WARM_TOKENS)
                rest = replace(first, tokens=behind, read_e=lambda _, into: into.zero_())
                for tokens in (first, rest, *(replace(rest, e_map=it) for it in self._corrections)):
                    self.run(batch, [tokens])
        except RanksApart:
            raise
        except Exception as exc:
            raise ConfigError(
                f"layers cannot be recomputed on {type(self._attention).__name__}: {exc}; "
                "set recompute_attention, or start the server without droidspeak"
            ) from exc
        log.info("droidspeak: recomputed two layers on %s", type(self._attention).__name__)

    def run(self, batch: ScheduleBatch, prefixes: Sequence[BlockTokens]) -> None:
        """Write the KV of each prefix's block into the slots of its row.

        The rows' earlier tokens must already have KV in those layers. Call it inside
        `Ranks.together`. If a rank fails before the layers of a forward, no rank computes these
        layers. If a rank fails within them, raises RanksApart.
        """
        for pieces in pack(prefixes, self._max_tokens):
            self._forward(batch, pieces)

    def run_in_full(self, batch: ScheduleBatch, row: int, tokens: Span) -> None:
        """Run SGLang's own forward over these tokens of a row, in chunks of at most one scheduler
        step. Runs no code of a partial prefill, because that code may have failed. Call it inside
        `Ranks.together`, like `run`."""
        for start in range(tokens.start, tokens.stop, self._max_tokens):
            part = Span(start, min(tokens.stop, start + self._max_tokens))
            forward_batch = replay_of(batch, [(row, part)], self._runner)
            self._ranks.agree()
            with self._ranks.apart():
                run_as_sglang(forward_batch, self._runner)

    def _forward(self, batch: ScheduleBatch, pieces: Sequence[BlockTokens]) -> None:
        first = pieces[0]
        forward_batch = replay_of(batch, [(it.row, it.tokens) for it in pieces], self._runner)
        forward_batch.has_own_e = first.is_exact
        e = self._e_of(pieces)
        with prepared(forward_batch, self._runner, self._attention):
            self._ranks.agree()
            with self._ranks.apart():
                self._stack.run(first.block, e, forward_batch)

    def _e_of(self, pieces: Sequence[BlockTokens]) -> torch.Tensor | None:
        """Read E of all tokens in `pieces`, gather all ranks' columns, and correct E by their map,
        if any. Return it, `[tokens, hidden]`. None if the block starts at layer 0."""
        first = pieces[0]
        num = 0
        for piece in pieces:
            if piece.read_e is None:
                return None
            piece.read_e(piece.tokens, self._e[num : num + len(piece.tokens)])
            num += len(piece.tokens)
        e = self._ranks.whole(self._e[:num])
        return self._corrections[first.e_map](e, self._corrected[:num]) if first.e_map else e
