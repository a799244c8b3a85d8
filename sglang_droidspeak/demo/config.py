"""What a demo runs on: by default the shipped pair, or a user's own."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal

import torch

from cachetree import CacheTreeError, ConfigError, ModelIdentity, Span, read_profile
from cachetree.checkpoint import read_model_identity, user_cache
from profiles.compute.models import ModelSource, load_tokenizer, look_at
from profiles.data.datasets import Source, load_sources
from profiles.data.documents import Document, make_documents
from profiles.environment import ROOT
from profiles.evidence import MeasuredProfile, read_measured
from profiles.random_models import shape, write_models
from sglang_droidspeak.demo.results import Condition
from sglang_droidspeak.fleet.servers import START_TIMEOUT_S

PAGE_SIZE = 16
"""Tokens."""
_LIMITS: Final = "context-length", "max-total-tokens"
"""SGLang's options that bound a prompt together with its answer."""
_SPARE: Final = 7
"""SGLang refuses prompts that come closer to such a bound."""
PAIRS: Final = ROOT / "examples/pairs"
"""The small pairs, in a clone."""
_REAL: Final = ROOT / "build/real"
"""Where `python -m tools.real` puts the real pair and its data."""
_SKILL: Final = "questions"
"""What the receiver is trained for; the sender is the base model."""
_ADAPTERS: Final = ROOT / "examples/real"
_PROFILE: Final = _ADAPTERS / f"base_to_{_SKILL}_lora.json"
_NOT_HERE: Final = (
    "No real pair with a profile that passed is here; `make real` makes its models. The small "
    "trained pair takes its place: its documents are too short to be timed."
)

_CPU_OPTIONS: Mapping[str, Any] = {
    "device": "cpu",
    "sleep-on-idle": True,
    "max-total-tokens": 32768,
}
"""Without a limit SGLang's KV pool takes most of the memory, and there are two servers."""
_ACCELERATOR_OPTIONS: Mapping[str, Any] = {"mem-fraction-static": 0.35}
"""Both servers on one device."""
_SHIPPED: Mapping[str, Any] = {
    "times_random_pair": True,
    "options": {  # What one request at a time needs.
        "max-total-tokens": 8192,
        "max-running-requests": 4,
        "chunked-prefill-size": 4096,
    },
    "host_gb": 1.0,
}

_NUM_LAYERS, _HIDDEN, _NUM_HEADS = 12, 768, 12
"""Of the random pair."""
_TIMED_BLOCK = Span(4, 7)


class DemoFailed(CacheTreeError):
    """The demo cannot go on, or a check failed. The message says which and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """Two models, and how the receiver reuses."""

    title: str
    sender: Path
    receiver: Path
    identity: ModelIdentity
    """Of the sender."""
    block: Span
    e_maps_of: Path | None = None
    """Profile whose map corrects E before the block begins; None where none does."""
    adapter: Path | None = None
    """The receiver's LoRA."""
    activated: Path | None = None
    """An activated LoRA of the same skill, which the receiver serves beside it."""

    @property
    def conditions(self) -> Sequence[Condition]:
        return [it for it in Condition if self.activated or not it.is_activated]

    @property
    def adapters(self) -> dict[str, Path]:
        """By the names that requests call them."""
        return {it.name: it for it in (self.adapter, self.activated) if it}


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoConfig:
    """A pair, what it is asked, and how it is served. `shipped` is what runs by default."""

    sender: Path
    receiver: Path
    profile: Path
    data: Path
    receiver_lora: Path | None = None
    """Adapter that makes the receiver of its checkpoint."""
    activated_lora: Path | None = None
    """Activated LoRA on the sender's own weights, to be compared with the receiver."""
    servers: Literal[1, 2] = 2
    """1: one server reads as the base and answers as its adapters."""
    num_questions: int | None = None
    """Only the first of the data's questions; None: all."""
    num_documents: int | None = None
    """Likewise of its documents."""
    num_questions_each: int | None = None
    """Likewise of each document's questions."""
    correction: bool = True
    """Whether E is corrected where the profile's plan says so."""
    times_random_pair: bool = False
    """Whether a pair of random weights is timed too: right for time, meaningless for quality."""
    instead: str = ""
    """What a person should know about the choice of the pair."""
    device: str = "auto"
    dtype: str | None = None
    """None: float32 on a CPU, where answers can then be compared exactly; else bfloat16."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """SGLang's own, for both servers."""
    host_gb: float = 4.0
    """Host memory for the sender's KV and E."""
    out: Path = Path("out/demo")
    start_timeout_s: float = START_TIMEOUT_S
    """Longest that a server may take to be ready."""

    def __post_init__(self) -> None:
        for name in ("num_questions", "num_documents"):
            value = getattr(self, name)
            if value is not None and value < 1:
                flag = name.replace("_", "-")
                raise ConfigError(f"--{flag} is {value}; it has to be at least 1, or not given")
        if self.servers == 1 and (self.receiver_lora is None or self.sender != self.receiver):
            raise ConfigError(
                "--servers is 1; that needs --receiver-lora, on one checkpoint as --sender and "
                "--receiver"
            )

    @classmethod
    def small(cls, instead: str = "") -> DemoConfig:
        """The small trained pair of the repository."""
        return cls(
            sender=PAIRS / "weights/sender",
            receiver=PAIRS / "weights/receiver",
            profile=PAIRS / "sender_to_receiver.json",
            data=PAIRS / "data/held_out.jsonl",
            instead=instead,
            **_SHIPPED,
        )

    @classmethod
    def shipped(cls) -> DemoConfig:
        """The real pair where it has been made and has passed, on documents of about 2,000 tokens;
        else the small one."""
        real = cls(
            sender=_REAL / "base",
            receiver=_REAL / "base",
            receiver_lora=_ADAPTERS / _SKILL,
            activated_lora=_ADAPTERS / f"{_SKILL}_alora",
            profile=_PROFILE,
            data=_REAL / f"data/{_SKILL}/long.jsonl",
            num_documents=3,
            num_questions_each=2,
            **_SHIPPED,
        )
        weights = real.sender / "model.safetensors"
        is_made = all(it.exists() for it in (weights, real.profile, real.data))
        return real if is_made and read_profile(real.profile).passed else cls.small(_NOT_HERE)

    @property
    def is_on_cpu(self) -> bool:
        return self.device == "cpu" or (
            self.device == "auto" and not torch.accelerator.is_available()
        )

    @property
    def resolved_dtype(self) -> str:
        return self.dtype or ("float32" if self.is_on_cpu else "bfloat16")

    @property
    def server_options(self) -> dict[str, Any]:
        fixed = {"dtype": self.resolved_dtype, "page-size": PAGE_SIZE}
        if self.is_on_cpu:
            return {**_CPU_OPTIONS, **self.options, **fixed}
        device = {} if self.device == "auto" else {"device": self.device}
        return {**_ACCELERATOR_OPTIONS, **device, **self.options, **fixed}

    @property
    def env(self) -> dict[str, str]:
        """The CPU platform is there only where no accelerator is seen."""
        return {"CUDA_VISIBLE_DEVICES": ""} if self.is_on_cpu else {}

    def documents(self, profile: MeasuredProfile) -> list[Document]:
        """What the pair is asked, as its profile was made, in the tokens that a server would make
        of it; longer prompts than the servers take are cut as the profiler cuts them."""
        made = profile.made
        sources = load_sources([str(self.data)], made.options)
        records = tuple(it for source in sources for it in source.records)[: self.num_questions]
        longest = max(it.task.max_new for it in records)
        receiver = look_at(ModelSource(path=self.receiver))
        stated = (self.server_options.get(it) for it in _LIMITS)
        limits = receiver.config.max_position_embeddings, *filter(None, stated)
        fitting = min(limits) - max(longest, _SPARE)
        documents = make_documents(
            [Source(name=str(self.data), records=records)],
            load_tokenizer(receiver.source),
            page_size=PAGE_SIZE,
            max_prompt_tokens=min(made.max_prompt_tokens or fitting, fitting),
        )
        return [
            replace(it, questions=it.questions[: self.num_questions_each])
            for it in documents[: self.num_documents]
        ]

    def pair(self) -> tuple[Subject, MeasuredProfile]:
        """The pair whose quality is measured; DemoFailed where its profile does not allow it."""
        if self.sender.is_relative_to(PAIRS) and not PAIRS.is_dir():
            raise DemoFailed(
                f"the small pair is not in {PAIRS}: it is part of the repository and not of "
                "the installed package; run the demo from a clone, or give --sender, --receiver, "
                "--profile and --data"
            )
        profile = read_measured(self.profile)
        source = ModelSource(path=self.receiver, adapter=self.receiver_lora)
        for role, of_role in (("sender", ModelSource(path=self.sender)), ("receiver", source)):
            model = read_model_identity(of_role.path, user_cache(), of_role.adapter)
            expected = getattr(profile, role)
            if model.model_id != expected.model_id:
                raise DemoFailed(
                    f"profile {self.profile} has {role} {expected.model_id}, and "
                    f"{of_role} is {model.model_id} by content; profile this pair"
                )
        if self.activated_lora and read_model_identity(self.receiver, user_cache()).model_id != (
            profile.sender.model_id
        ):
            raise DemoFailed(
                f"--activated-lora is {self.activated_lora}; it shares the sender's KV only on "
                f"the sender's own weights, and {self.receiver} has others"
            )
        best = profile.recommended
        if not profile.passed or best is None:
            raise DemoFailed(
                f"profile {self.profile} did not pass its gate: {profile.reason}; "
                "a server would not reuse this pair"
            )
        is_corrected = best.e_map is not None and self.correction
        corrected = ", E corrected" if is_corrected else ""
        subject = Subject(
            title=f"{self.sender.name} → {(self.receiver_lora or self.receiver).name}{corrected}",
            sender=self.sender,
            receiver=self.receiver,
            identity=profile.sender,
            block=best.block,
            e_maps_of=self.profile if is_corrected else None,
            adapter=self.receiver_lora,
            activated=self.activated_lora,
        )
        return subject, profile

    def make_random(self, folder: Path) -> Subject:
        """Write the random pair, without a progress bar of its own."""
        config = shape(
            "llama", layers=_NUM_LAYERS, hidden=_HIDDEN, heads=_NUM_HEADS, kv_heads=_NUM_HEADS
        )
        dtype = getattr(torch, self.resolved_dtype)
        with contextlib.redirect_stderr(io.StringIO()):  # transformers' own progress bars
            sender, receiver = write_models(folder, config, ["sender", "receiver"], dtype=dtype)
        return Subject(
            title=f"random weights, {_NUM_LAYERS} layers × {_HIDDEN}",
            sender=sender,
            receiver=receiver,
            identity=read_model_identity(sender),
            block=_TIMED_BLOCK,
        )
