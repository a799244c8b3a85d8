"""The baseline of `profiler.py`: every configuration of a pair by itself, with plain transformers.

# for every block           a partial prefill of its own (`oracle.py`) of the context
# for every question        the given answers: one forward; the decoded one: a forward a token
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from benchmarks.oracle import KV, Prefill, prefill, recompute
from cachetree import Span
from profiles.compute.examination import Answerer
from profiles.data.documents import Document, Tokens
from profiles.stats.choice import grid
from profiles.stats.measured import Score


@dataclass(frozen=True, slots=True)
class Found:
    """One question over one configuration."""

    score: Score
    margin: float
    """The smallest distance between the two best tokens, wherever the score rests on the best."""


Results = Mapping[str, Sequence[Found]]
"""By configuration, then by question."""


@dataclass(frozen=True, slots=True)
class Given:
    """An answer that is given token by token: `[tokens, vocabulary]`, and its tokens."""

    logprobs: Tensor
    tokens: Tensor

    @property
    def nll(self) -> float:
        return -float(self.logprobs.gather(-1, self.tokens[:, None]).mean())

    @property
    def agreement(self) -> float:
        return float((self.logprobs.argmax(-1) == self.tokens).float().mean())

    def kl_from(self, expected: Given) -> float:
        differences = expected.logprobs.exp() * (expected.logprobs - self.logprobs)
        return float(differences.sum(-1).mean())


@dataclass(slots=True)
class OneByOne:
    """Every configuration by itself, with plain transformers."""

    name: str
    sender: PreTrainedModel
    answerer: Answerer
    num_batched: int
    """Questions that go through the model together."""
    passes: int = 0

    @property
    def receiver(self) -> PreTrainedModel:
        return self.answerer.model.model

    @torch.inference_mode()
    def measure(self, document: Document) -> Results:
        ids = torch.tensor([document.prefix])
        theirs, ours = (prefill(model, ids) for model in (self.sender, self.receiver))
        self.passes += 2
        questions = document.questions
        starts = range(0, len(questions), self.num_batched)
        batches = [questions[start : start + self.num_batched] for start in starts]
        exams = []
        for batch in (replace(document, questions=it) for it in batches):
            answers, _ = self._decode(ours.kv, batch)
            exams.append((batch, answers, self._force(ours.kv, batch, answers)))
        return {
            name: [it for exam in exams for it in self._examine(kv, *exam)]
            for name, kv in self._configurations(ids, theirs, ours)
        }

    def _configurations(
        self, ids: Tensor, theirs: Prefill, ours: Prefill
    ) -> Iterator[tuple[str, list[KV]]]:
        yield "full reuse", list(theirs.kv)
        for layer in range(len(ours.kv)):
            kv = [*ours.kv[:layer], theirs.kv[layer], *ours.kv[layer + 1 :]]
            yield f"layer {layer} reused", kv
        nothing = [(keys[:, :, :0], values[:, :, :0]) for keys, values in theirs.kv]
        entering = (self.receiver.get_input_embeddings()(ids), *theirs.e[1:])
        for block in grid(len(ours.kv), 1):
            new = recompute(self.receiver, entering[block.start], block, nothing)
            self.passes += 1
            kv = [new.get(layer, loaded) for layer, loaded in enumerate(theirs.kv)]
            yield block_name(block), kv

    def _examine(
        self,
        kv: Sequence[KV],
        document: Document,
        own: Sequence[Tokens],
        expected: Sequence[Given],
    ) -> Iterator[Found]:
        given = self._force(kv, document, own)
        answers, margins = self._decode(kv, document)
        for i, mine in enumerate(given):
            score = Score(
                kl=mine.kl_from(expected[i]),
                agreement=mine.agreement,
                own_nll=mine.nll,
                quality=self.answerer.quality(document, i, answers[i]),
            )
            yield Found(score, min(margins[i], float(_margins(mine.logprobs).min())))

    def _force(self, kv: Sequence[KV], document: Document, own: Sequence[Tokens]) -> list[Given]:
        """The own answers, by question, in rows padded behind."""
        suffixes = [it.suffix for it in document.questions]
        texts = [[*it, *answer[:-1]] for it, answer in zip(suffixes, own, strict=True)]
        width = max(map(len, texts))
        logits = self.receiver(
            input_ids=torch.tensor([text + [0] * (width - len(text)) for text in texts]),
            past_key_values=self._cache(kv, len(texts)),
            use_cache=True,
        ).logits
        return [
            Given(
                of_row[len(suffix) - 1 :][: len(answer)].float().log_softmax(-1),
                torch.tensor(answer),
            )
            for of_row, suffix, answer in zip(logits, suffixes, own, strict=True)
        ]

    def _decode(self, kv: Sequence[KV], document: Document) -> tuple[list[Tokens], list[float]]:
        """Greedy answers and their smallest margins, by question, in rows padded in front."""
        suffixes = [it.suffix for it in document.questions]
        num_rows, longest, num_past = len(suffixes), max(map(len, suffixes)), len(document.prefix)
        answers: list[list[int]] = [[] for _ in suffixes]
        smallest = [float("inf")] * num_rows
        pads = torch.tensor([[longest - len(suffix)] for suffix in suffixes])
        ids = torch.tensor([[0] * (longest - len(suffix)) + [*suffix] for suffix in suffixes])
        mask = torch.ones(num_rows, num_past + longest, dtype=torch.long)
        mask[:, num_past:] = torch.arange(longest) >= pads
        cache = self._cache(kv, num_rows)
        for _ in range(document.task.max_new):
            places = torch.arange(mask.shape[1] - ids.shape[1], mask.shape[1])
            logits = self.receiver(
                input_ids=ids,
                attention_mask=mask,
                position_ids=(places - pads).clamp(min=0),
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            ).logits[:, -1]
            margins = _margins(logits.float()).tolist()
            ids = logits.argmax(-1, keepdim=True)
            going = [i for i, it in enumerate(answers) if not self._has_ended(it)]
            for row in going:
                answers[row].append(int(ids[row]))
                smallest[row] = min(smallest[row], margins[row])
            if all(self._has_ended(it) for it in answers):
                break
            mask = torch.cat([mask, mask.new_ones(num_rows, 1)], 1)
        return [tuple(answer) for answer in answers], smallest

    def _has_ended(self, answer: Sequence[int]) -> bool:
        return bool(answer) and answer[-1] in self.answerer.ends

    def _cache(self, kv: Sequence[KV], num_rows: int) -> DynamicCache:
        rows = [tuple(it.expand(num_rows, -1, -1, -1) for it in layer) for layer in kv]
        return DynamicCache(rows, config=self.receiver.config)


def block_name(block: Span) -> str:
    return f"block [{block.start}, {block.stop})"


def _margins(logits: Tensor) -> Tensor:
    """Between the two best tokens; `[..., vocabulary]` -> `[...]`."""
    best, second = logits.topk(2).values.unbind(-1)
    return best - second
