"""Ask the receiver a document's questions over any mixture of KV sources, and score its answers.

fast    Feed in full prefill's answer, over all mixtures at once. Measure how far the next-token
        distributions are from full prefill's.
exact   Decode the answer greedily, and judge it by the data set's metric. If every token of full
        prefill's answer is still the most likely one, the answer is the same: it is not decoded.
        Otherwise full prefill's answer is the draft: tokens that stay the same cost no pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from cachetree import ConfigError
from profiles.compute.layered import LayeredModel, PrefixKV
from profiles.compute.mixtures import Asked, Mixture, decode, forced
from profiles.compute.room import Room
from profiles.data.documents import Document, Tokens
from profiles.data.metrics import Metric
from profiles.data.tasks import judged_part, score
from profiles.stats.measured import Score

DIGITS: Final = 4
FIRST_TOKENS: Final = 8
"""Number of first tokens of an answer on which total variation is measured, as in the drift
guard."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answerer:
    """A model that answers questions, with its tokenizer, end tokens and batch sizes."""

    model: LayeredModel
    tokenizer: PreTrainedTokenizerBase
    ends: frozenset[int]
    room: Room

    def answer(self, document: Document, kv: PrefixKV) -> list[Tokens]:
        """Return greedy answers to all questions of the document, over its KV at all layers."""
        mixture = (0,) * self.model.num_layers
        asked = [Asked(mixture, it.suffix, it.draft) for it in document.questions]
        return self.answer_all(document, [kv], asked)

    def answer_all(
        self, document: Document, sources: Sequence[PrefixKV], asked: Sequence[Asked]
    ) -> list[Tokens]:
        most, rows = document.task.max_new, self.room.rows
        answers = decode(self.model, sources, asked, max_new=most, ends=self.ends, max_rows=rows)
        return [tuple(answer) for answer in answers]

    def quality(self, document: Document, question: int, answer: Tokens) -> float:
        """Return an answer's quality by the data set's metric, rounded as in profiles."""
        asked = document.questions[question]
        text = self.text(answer)
        return round(score(document.task, text, asked.answers, asked.classes), DIGITS)

    def text(self, answer: Tokens) -> str:
        ids = [token for token in answer if token not in self.ends]
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def judged_by(self, answers: Sequence[Tokens], document: Document) -> Document:
        """If the document's metric compares with full prefill's answers, return the document with
        `answers` as its accepted answers. Otherwise return it unchanged."""
        if document.task.metric is not Metric.SAME:
            return document
        texts = [judged_part(document.task, self.text(it)) for it in answers]
        pairs = zip(document.questions, texts, strict=True)
        questions = tuple(replace(it, answers=(text,)) for it, text in pairs)
        return replace(document, questions=questions)


class Examination:
    """Compares answers over any KV with answers over the receiver's own KV, for one document.

    `own` is the receiver's KV of the document; `answers` are its answers over that KV.
    """

    def __init__(
        self, answerer: Answerer, document: Document, own: PrefixKV, answers: Sequence[Tokens]
    ) -> None:
        self._answerer, self._answers = answerer, answers
        self.document = answerer.judged_by(answers, document)
        suffixes = [it.suffix for it in document.questions]
        # An answer's last token is not fed in: what it predicts does not count.
        self._given = [(*it, *of[:-1]) for it, of in zip(suffixes, answers, strict=True)]
        self._lengths = torch.tensor([len(answer) for answer in answers])
        # For every answer token, in order: its question, its place in the answer, and the place in
        # the fed tokens that predicts it.
        self._targets = torch.tensor([token for answer in answers for token in answer])
        self._question_of = torch.arange(len(answers)).repeat_interleave(self._lengths)
        self._place_in = torch.cat([torch.arange(it) for it in self._lengths])
        before = torch.tensor([len(it) - 1 for it in suffixes])
        self._place_of = before[self._question_of] + self._place_in
        self.qualities = [answerer.quality(self.document, i, it) for i, it in enumerate(answers)]
        """Quality of the receiver's own answer to each question."""
        self._own = self._streams([own], [(0,) * answerer.model.num_layers])[0]

    def examine(
        self, sources: Sequence[PrefixKV], mixtures: Sequence[Mixture], *, is_decoded: bool
    ) -> list[tuple[Score, ...]]:
        """Return a score for each mixture and question. A mixture has, for each layer, the index of
        its KV in `sources`. If `is_decoded`, answers are decoded, and scores have their qualities.

        Raises ConfigError if logits are not finite.
        """
        result = self._measure(self._streams(sources, mixtures))
        if not result.isfinite().all():
            raise ConfigError(
                f"logits are not finite in {self._answerer.model.dtype} (question "
                f"{self.document.questions[0].name}); use --dtype bfloat16, and where that does "
                "not help look for broken weights"
            )
        measured = result.tolist()
        questions = self.document.questions
        missing = [
            (i, question)
            for i, (*_, differs) in enumerate(measured)
            for question in range(len(questions))
            if is_decoded and differs[question]
        ]
        asked = [
            Asked(mixtures[i], questions[question].suffix, self._answers[question])
            for i, question in missing
        ]
        answers = self._answerer.answer_all(self.document, sources, asked) if asked else []
        qualities = {
            (i, question): self._answerer.quality(self.document, question, answer)
            for (i, question), answer in zip(missing, answers, strict=True)
        }
        return [
            tuple(
                Score(
                    kl=kl[question],
                    tv=tv[question],
                    quality=qualities.get((i, question), same) if is_decoded else None,
                )
                for question, same in enumerate(self.qualities)
            )
            for i, (kl, tv, _) in enumerate(measured)
        ]

    def _streams(self, sources: Sequence[PrefixKV], mixtures: Sequence[Mixture]) -> Tensor:
        """Return `[mixtures, tokens, hidden]`: the last layer's output wherever it predicts a token
        of the answers."""
        rows = self._answerer.room.rows
        streams = forced(self._answerer.model, sources, mixtures, self._given, rows)
        return torch.stack([stream[self._question_of, self._place_of] for stream in streams])

    @torch.inference_mode()
    def _measure(self, streams: Tensor) -> Tensor:
        """Return `[mixtures, 3, questions]`. The three are an answer's mean KL over all tokens, its
        mean total variation over the first tokens, and the share of its tokens that are not the
        most likely."""
        model, lengths = self._answerer.model, self._lengths
        num_mixtures, num_tokens = streams.shape[:2]
        values = torch.empty(num_mixtures, 3, num_tokens)
        positions = self._answerer.room.positions
        for tokens in torch.arange(num_tokens).split(positions):
            expected = model.logits(self._own[tokens]).log_softmax(-1)
            likely, targets = expected.exp(), self._targets[tokens].to(model.device)
            for part in torch.arange(num_mixtures).split(max(1, positions // len(tokens))):
                got = model.logits(streams[part][:, tokens]).log_softmax(-1)
                kl = (likely * (expected - got)).sum(-1).clamp(min=0)
                tv = ((likely - got.exp()).abs().sum(-1) / 2).clamp(max=1)
                differs = (got.argmax(-1) != targets).float()
                parts = torch.stack([kl, tv, differs], 1).cpu()
                values[part[:, None, None], torch.arange(3)[:, None], tokens] = parts
        values[:, 1, self._place_in >= FIRST_TOKENS] = 0
        sums = torch.zeros(num_mixtures, 3, len(lengths))
        sums.index_add_(2, self._question_of, values)
        return sums / torch.stack([lengths, lengths.clamp(max=FIRST_TOKENS), lengths])
