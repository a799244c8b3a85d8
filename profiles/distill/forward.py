"""Train with a document's KV frozen, and many questions behind it in one forward, as a tree.

    document     question 1   answer   question 2   answer   …
    read once    ^ positions continue from the document's end, for each question

Each question sees the document and itself. The model's own forward runs the tree. The model may be
of any class of transformers that accepts a mask and keeps plain KV.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from cachetree import ConfigError
from profiles.compute.layered import KV, ROUNDING
from profiles.data.documents import Tokens
from profiles.distill.prompts import Lesson

ATTENTION: Final = "droidspeak_frozen"
"""Name of `_attend` in transformers, used on CPUs. It takes half the time of SDPA, which computes
gradients of the document's KV, too."""
_DOCUMENT: Final = -1
"""Marks tokens of the document, which every question sees. A question's tokens have its index."""


LIKELIEST: Final = 128
"""Number of likeliest next tokens that are stored for a distribution. All other tokens together
count as one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """An answer, with a model's likeliest next tokens at the place of each of its tokens."""

    tokens: Tokens
    likeliest: Tensor
    """Likeliest next tokens at each token of the answer: `[tokens, LIKELIEST]`. Empty if no model
    was asked."""
    logprobs: Tensor
    """Log-probabilities of the likeliest tokens."""

    @classmethod
    def joined(cls, parts: Sequence[Said]) -> Said:
        """Join parts of an answer, one after the other."""
        return cls(
            tokens=tuple(token for it in parts for token in it.tokens),
            likeliest=torch.cat([it.likeliest for it in parts]),
            logprobs=torch.cat([it.logprobs for it in parts]),
        )


def said_of(logits: Tensor, answers: Sequence[Tokens]) -> list[Said]:
    """Return the answers with distributions, from the logits before each of their tokens, `[tokens,
    vocabulary]`."""
    most, lengths = min(LIKELIEST, logits.shape[-1]), [len(it) for it in answers]
    logprobs, likeliest = (it.cpu().split(lengths) for it in logits.log_softmax(-1).topk(most))
    return [
        Said(tokens=tokens, likeliest=ids.int(), logprobs=of_ids)
        for tokens, ids, of_ids in zip(answers, likeliest, logprobs, strict=True)
    ]


class Branches:
    """KV of a document, and of several branches behind it: one for each question."""

    def __init__(self, model: PreTrainedModel, kv: Sequence[KV], num_branches: int) -> None:
        self._model, self._cache = model, DynamicCache()
        for layer, (keys, values) in enumerate(kv):
            self._cache.update(keys, values, layer)
        self._num_frozen = kv[0][0].shape[2]
        self._owners = torch.full((self._num_frozen,), _DOCUMENT, device=model.device)
        self._positions = torch.arange(self._num_frozen, device=model.device)
        self._lengths = [self._num_frozen] * num_branches

    def grow(self, tokens: Sequence[Tokens], num_scored: Sequence[int]) -> Tensor:
        """Run new tokens of each branch. Return the logits after the last `num_scored` tokens of
        each branch.

        The logits are `[sum of num_scored, vocabulary]` in float32, branch after branch.
        """
        device, ids = self._model.device, [token for of in tokens for token in of]
        owners, positions, scored = list[int](), list[int](), list[int]()
        for branch, (of, num) in enumerate(zip(tokens, num_scored, strict=True)):
            owners += [branch] * len(of)
            positions += range(self._lengths[branch], self._lengths[branch] + len(of))
            self._lengths[branch] += len(of)
            scored += range(len(owners) - num, len(owners))
        owner, position = (torch.tensor(it, device=device) for it in (owners, positions))
        self._owners = torch.cat([self._owners, owner])
        self._positions = torch.cat([self._positions, position])
        sees = (self._owners == _DOCUMENT) | (self._owners == owner[:, None])
        sees &= self._positions <= position[:, None]
        dtype = self._model.dtype
        mask = torch.zeros(sees.shape, dtype=dtype, device=device)
        mask.masked_fill_(~sees, torch.finfo(dtype).min)
        out = self._model(
            input_ids=torch.tensor([ids], device=device),
            position_ids=position[None],
            attention_mask=mask[None, None],
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=torch.tensor(scored or [0], device=device),
            num_frozen=self._num_frozen,
        )
        return out.logits[0].float()


class KeptKV:
    """Stores documents' KV in a folder of bounded size. KV that does not fit is computed again."""

    def __init__(self, folder: Path, max_bytes: float) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._left = max_bytes - sum(it.stat().st_size for it in folder.glob("*.safetensors"))

    def get(self, ids: Tokens, device: torch.device, read: Callable[[], list[KV]]) -> list[KV]:
        digest = hashlib.sha256(torch.tensor(ids).numpy().tobytes()).hexdigest()[:24]
        file = self._folder / f"{digest}.safetensors"
        if file.exists():
            stored = load_file(file, device=str(device))
            return [(stored[f"{i}.k"], stored[f"{i}.v"]) for i in range(len(stored) // 2)]
        kv = read()
        tensors = {f"{i}.{'kv'[j]}": it for i, pair in enumerate(kv) for j, it in enumerate(pair)}
        num_bytes = sum(it.nbytes for it in tensors.values())
        if num_bytes <= self._left:
            self._left -= num_bytes
            write_tensors(tensors, file)
        return kv


class Reader:
    """A model that reads documents and answers questions about them.

    A student reads as the base up to the invocation: `as_base` switches its adapter off.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        ends: frozenset[int],
        kept_kv: KeptKV | None = None,
        as_base: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.model, self._ends, self._kept_kv, self._as_base = model, ends, kept_kv, as_base

    def along(self, lesson: Lesson, questions: Sequence[int], answers: Sequence[Tokens]) -> Tensor:
        """Return the logits before every token of `answers`, `[tokens, vocabulary]`. `questions`
        has the indices of the questions that `answers` answer."""
        tokens = [
            (*lesson.after(it), *answer[:-1]) for it, answer in zip(questions, answers, strict=True)
        ]
        return self._begin(lesson, questions).grow(tokens, [len(it) for it in answers])

    @torch.no_grad()
    def answer(self, lesson: Lesson, questions: Sequence[int]) -> list[Said]:
        """Answer the lesson's questions with these indices, greedily. An answer includes its end
        token, unless it reaches `max_new` tokens first."""
        branches, most = self._begin(lesson, questions), lesson.document.task.max_new
        said: list[list[Said]] = [[] for _ in questions]
        new_tokens = [lesson.after(it) for it in questions]
        for _ in range(most):
            logits = branches.grow(new_tokens, [bool(it) for it in new_tokens])
            chosen = logits.argmax(-1).tolist()
            alive = [place for place, it in enumerate(new_tokens) if it]
            for place, new in zip(alive, said_of(logits, [(it,) for it in chosen]), strict=True):
                said[place].append(new)
                new_tokens[place] = () if set(new.tokens) & self._ends else new.tokens
            if not any(new_tokens):
                break
        return [Said.joined(it) for it in said]

    @torch.no_grad()
    def _begin(self, lesson: Lesson, questions: Sequence[int]) -> Branches:
        """Read the document, and each question up to its invocation."""
        with self._as_base():
            branches = Branches(self.model, self._read(lesson.document.prefix), len(questions))
            before = [lesson.before(it) for it in questions]
            if any(before):
                branches.grow(before, [0] * len(before))
        return branches

    def _read(self, ids: Tokens) -> list[KV]:
        def read() -> list[KV]:
            return read_document(self.model, ids)

        return read() if self._kept_kv is None else self._kept_kv.get(ids, self.model.device, read)


@torch.no_grad()
def read_document(model: PreTrainedModel, ids: Tokens) -> list[KV]:
    """Compute a model's own KV of a document. Raises ConfigError if its cache is not plain KV."""
    input_ids = torch.tensor([list(ids)], device=model.device)
    cache = model(input_ids=input_ids, use_cache=True, logits_to_keep=1).past_key_values
    kv = [
        (getattr(it, "keys", None), getattr(it, "values", None))
        for it in getattr(cache, "layers", ())
    ]
    if not kv or any(it is None or it.ndim != 4 for pair in kv for it in pair):
        raise ConfigError(
            f"{model.config.architectures} keeps more than keys and values of its tokens; models "
            "with plain attention at all layers are supported"
        )
    return kv


@torch.no_grad()
def check_forward(model: PreTrainedModel, ids: Tokens) -> None:
    """Raise ConfigError if branches behind frozen KV give other logits than the model's own
    forward. `ids` has at least four tokens."""
    half, stop = len(ids) // 2, len(ids)
    expected = model(input_ids=torch.tensor([list(ids)], device=model.device)).logits[0, -1].float()
    branches = Branches(model, read_document(model, ids[:half]), 2)
    branches.grow([ids[half:][::-1], ids[half : stop - 1]], [0, 0])
    distance = (branches.grow([(), ids[-1:]], [0, 1])[0] - expected).abs().max()
    allowed = ROUNDING[model.dtype] * expected.abs().max()
    if not distance <= allowed:
        raise ConfigError(
            f"behind frozen KV, {type(model).__name__} gives logits that are {distance:.3g} from "
            f"its own forward's (allowed: {allowed:.3g}); models with plain attention at all "
            "layers are supported"
        )


def write_tensors(
    tensors: dict[str, Tensor], file: Path, metadata: dict[str, str] | None = None
) -> None:
    """Write a file that readers see only once it is complete."""
    part = file.with_suffix(".part")
    save_file({name: it.contiguous().cpu() for name, it in tensors.items()}, part, metadata)
    part.rename(file)


class _Frozen(torch.autograd.Function):
    """Attention for one sequence, in which the first keys and values get no gradient.

    Queries are `[kv_heads, group, queries, size]` and scaled; keys and values are `[kv_heads, keys,
    size]`. The additive mask covers the keys that are not frozen.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        heads, _, num_queries, size = query.shape
        rows, num_frozen = query.reshape(heads, -1, size), keys.shape[1] - mask.shape[1]
        scores = rows @ keys.mT
        scores.view(heads, -1, num_queries, keys.shape[1])[..., num_frozen:] += mask
        weights = scores.softmax(-1)
        out = weights @ values
        ctx.save_for_backward(rows, keys, values, weights, out)
        ctx.num_frozen = num_frozen
        return out.view_as(query)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        rows, keys, values, weights, out = ctx.saved_tensors
        first, grad = ctx.num_frozen, grads[0].reshape(rows.shape)
        of_scores = grad @ values.mT
        of_scores -= (grad.float() * out.float()).sum(-1, keepdim=True).to(grad.dtype)
        of_scores *= weights
        of_keys, of_values = torch.zeros_like(keys), torch.zeros_like(values)
        of_keys[:, first:] = of_scores[..., first:].mT @ rows
        of_values[:, first:] = weights[..., first:].mT @ grad
        return (of_scores @ keys).view_as(grads[0]), of_keys, of_values, None


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    num_frozen: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute attention for transformers: by `_Frozen` if a tree is run, otherwise by SDPA."""
    if num_frozen is None or attention_mask is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
    _, heads, num_queries, size = query.shape
    scale = size**-0.5 if scaling is None else scaling
    grouped = (query[0] * scale).view(key.shape[1], -1, num_queries, size)
    out = _Frozen.apply(grouped, key[0], value[0], attention_mask[0, 0, :, num_frozen:])
    return out.reshape(1, heads, num_queries, -1).transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, _attend)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
