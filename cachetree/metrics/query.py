"""What a cache answers to whoever routes requests: how much of a prompt it has, and by whose cache
it would be served how soon.

The question and the answer are those of Mooncake's indexer (its RFC 1403). `full_prefill_s` and
`senders` are added: an indexer keeps the models apart, and here one reads another's cache.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Final

import msgspec

from cachetree.cache import Cache
from cachetree.errors import UNREADABLE, ConfigError
from cachetree.ids import DISK, LOCAL, Location, ModelId, is_pool
from cachetree.planning import (
    Considered,
    Costs,
    Demand,
    Profiles,
    best_of_each,
)
from cachetree.tree import page_hashes

MAX_BODY_BYTES: Final = 16 << 20
MAX_TOKENS: Final = 1 << 20
_TENANT: Final = "default"

Token = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that are not known are skipped."""

    model: str
    token_ids: Annotated[list[Token], msgspec.Meta(max_length=MAX_TOKENS)]
    block_size: int | None = None
    lora_name: str | None = None
    cache_salt: str | None = None
    tenant_id: str = _TENANT
    instance_id: str | None = None


class SenderScore(msgspec.Struct, frozen=True, kw_only=True):
    """One model at one place, and the best that the asked model may do with what it has."""

    sender: ModelId
    location: Location
    matched_tokens: int
    reused_tokens: int
    """The prompt's first ones, with what the device has already."""
    block: tuple[int, int] | None
    """Layers that are recomputed, half-open; None loads all."""
    exact: bool
    bytes: int
    """To fetch, of all ranks."""
    seconds: float | None
    """Predicted until the whole prompt is prefilled; None where speeds are unknown."""


class Instance(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    rename={"gpu": "GPU", "cpu": "CPU", "disk": "DISK", "dp": "DP"},
):
    """Of the model's own exact KV, tokens from the prompt's start."""

    longest_matched: int
    gpu: int
    cpu: int
    disk: int
    dp: dict[str, int]
    full_prefill_s: float | None
    """Predicted for what the device lacks; None where its speed is unknown."""
    senders: list[SenderScore]
    """The soonest first."""


@dataclass(frozen=True, kw_only=True)
class Queries:
    """Answers for one cache; any thread."""

    cache: Cache
    name: str
    """By which requests reach it: an address."""
    usual: Demand
    """Of a request of no tokens."""
    costs: Callable[[Collection[Location]], Costs]
    profiles: Profiles
    names: Mapping[str, ModelId] = field(default_factory=dict)
    """Of models, beside their ids."""

    def answer(self, body: bytes) -> bytes:
        """JSON for JSON; raises ConfigError."""
        try:
            asked = msgspec.json.decode(body, type=Asked)
        except UNREADABLE as exc:
            raise ConfigError(f"the question cannot be read: {exc}") from exc
        model = self._model(asked)
        is_ours = asked.tenant_id == _TENANT and asked.instance_id in (None, self.name)
        found = {self.name: self._instance(model, asked.token_ids)} if is_ours else {}
        return msgspec.json.encode({asked.tenant_id: found})

    def _model(self, asked: Asked) -> ModelId:
        page_size = self.usual.page_size
        if asked.block_size not in (None, page_size):
            raise ConfigError(f"block_size is {asked.block_size}; pages here have {page_size}")
        if asked.lora_name:
            raise ConfigError(
                f"lora_name is {asked.lora_name!r}; name an adapter by its id, in model"
            )
        if asked.cache_salt:
            raise ConfigError("cache_salt is given; what lies under a salt is told to nobody")
        known = self.names.get(asked.model)
        if known is None and not re.fullmatch("[0-9a-f]{32}", asked.model):
            raise ConfigError(
                f"model is {asked.model!r}; give an id, as `droidspeak identity` prints it"
            )
        return known or ModelId(asked.model)

    def _instance(self, model: ModelId, tokens: Sequence[int]) -> Instance:
        page_size = self.usual.page_size
        matches = self.cache.match(page_hashes(tokens, page_size), is_use=False)
        own = {it.location: it.num_pages for it in matches if it.model == model}
        gpu = max((num for at, num in own.items() if is_pool(at)), default=0)
        # A prompt's last token is computed in any case.
        num_pages = max(0, len(tokens) - 1) // page_size
        demand = replace(
            self.usual,
            receiver=model,
            num_pages=num_pages,
            first_page=min(gpu, num_pages),
            num_new_tokens=len(tokens) - num_pages * page_size,
        )
        others = [it for it in matches if it.model != model or not is_pool(it.location)]
        considered = Considered(demand, others, self.costs({it.location for it in others}))
        cpu, disk = own.get(LOCAL, 0), own.get(DISK, 0)
        longest = page_size * max(gpu, cpu, disk)
        return Instance(
            longest_matched=longest,
            gpu=gpu * page_size,
            cpu=cpu * page_size,
            disk=disk * page_size,
            dp={"0": longest},
            full_prefill_s=considered.full_prefill_s,
            senders=sorted(self._scores(considered), key=lambda it: (it.seconds or 0.0, it.bytes)),
        )

    def _scores(self, considered: Considered) -> Iterator[SenderScore]:
        for match, way in best_of_each(considered, self.profiles):
            assert way.pages is not None and way.bytes is not None
            yield SenderScore(
                sender=way.sender,
                location=way.location,
                matched_tokens=match.num_pages * self.usual.page_size,
                reused_tokens=way.pages[1] * self.usual.page_size,
                block=way.block,
                exact=way.exact,
                bytes=self.cache.family.tp_size * way.bytes,
                seconds=way.ttft_s,
            )
