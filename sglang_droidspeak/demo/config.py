"""Configuration of a demo: by default the shipped pair, or a user's own."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
_LIMITS: Final = "context-length", "max-total-tokens"
"""SGLang's options that limit the total length of a prompt and its answer."""
_SPARE: Final = 7
"""Number of tokens by which a prompt must stay below SGLang's limits on its length."""
PAIRS: Final = ROOT / "examples/pairs"
"""Folder of the repository's small pairs. It exists only in a clone."""
_REAL: Final = ROOT / "build/real"
"""Folder in which `python -m tools.real` puts the real pair and its data."""
_SKILL: Final = "json"
"""Skill of the real pair's receiver. Its sender is the base model."""
_ADAPTERS: Final = ROOT / "examples/real"
REAL_PROFILE: Final = _ADAPTERS / f"base_to_{_SKILL}_lora.json"
"""Profile of the real pair, which is also shown in pages and pictures."""
_NOT_HERE: Final = (
    "No real pair with a profile that passed is here; `make real` makes its models. The small "
    "trained pair takes its place: its documents are too short to be timed."
)

_CPU_OPTIONS: Mapping[str, Any] = {
    "device": "cpu",
    "sleep-on-idle": True,
    "max-total-tokens": 32768,
}
"""SGLang's options on a CPU. They limit the KV pool, because two servers share the memory."""
_ACCELERATOR_OPTIONS: Mapping[str, Any] = {"mem-fraction-static": 0.35}
"""SGLang's options on an accelerator. Two servers share its memory."""
_SHIPPED: Mapping[str, Any] = {
    "times_random_pair": True,
    "options": {  # Enough for one request at a time.
        "max-total-tokens": 8192,
        "max-running-requests": 4,
        "chunked-prefill-size": 4096,
    },
    "host_gb": 1.0,
}

_NUM_LAYERS, _HIDDEN, _NUM_HEADS = 12, 768, 12
"""Shape of the two models of random weights."""
_TIMED_BLOCK = Span(4, 7)


class DemoFailed(CacheTreeError):
    """The demo cannot continue, or a check failed. The message has the cause and the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """Two models to measure, and the plan by which the receiver reuses the sender's KV."""

    title: str
    sender: Path
    receiver: Path
    identity: ModelIdentity
    """Identity of the sender by content."""
    block: Span
    e_maps_of: Path | None = None
    """Profile with the map that corrects E before the block. None: E is not corrected."""
    adapter: Path | None = None
    """LoRA of the receiver."""
    activated: Path | None = None
    """Activated LoRA of the same skill, which the receiver serves too."""

    @property
    def conditions(self) -> Sequence[Condition]:
        return [it for it in Condition if self.activated or not it.is_activated]

    @property
    def adapters(self) -> dict[str, Path]:
        """Adapters by their names in requests."""
        return {it.name: it for it in (self.adapter, self.activated) if it}


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoConfig:
    """A pair of models, its data, and its servers' options. By default the demo runs `shipped`."""

    sender: Path
    receiver: Path
    profile: Path
    data: Path
    receiver_lora: Path | None = None
    """LoRA adapter on the checkpoint `receiver`. The two together are the receiving model."""
    activated_lora: Path | None = None
    """Activated LoRA on the sender's own weights, to compare with the receiver."""
    servers: Literal[1, 2] = 2
    """Number of servers. A single server is both sender (its base) and receiver (its adapters)."""
    num_questions: int | None = None
    """Number of the data's first questions to use; None for all."""
    num_documents: int | None = None
    """Number of the data's first documents to use; None for all."""
    correction: bool = True
    """Whether to correct E, if the profile has a plan that does so."""
    times_random_pair: bool = False
    """Whether to time two models of random weights, too. Their quality says nothing."""
    instead: str = ""
    """Note to the user, if the demo runs another pair than usual."""
    device: str = "auto"
    dtype: str | None = None
    """Data type of the servers. None: float32 on a CPU, to compare answers exactly, and bfloat16
    elsewhere."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """SGLang's own options, for both servers."""
    host_gb: float = 4.0
    """Host memory for the sender's KV and E."""
    out: Path = Path("out/demo")
    start_timeout_s: float = START_TIMEOUT_S

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
        """Return a demo of the small pair in `examples/pairs`. `instead` tells the user why."""
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
        """Return the demo of the pair that `make real` makes, with documents of about 2,000 tokens.
        If its files are missing or its profile did not pass, return the demo of the repository's
        small pair."""
        real = cls(
            sender=_REAL / "base",
            receiver=_REAL / "base",
            receiver_lora=_ADAPTERS / _SKILL,
            activated_lora=_ADAPTERS / f"{_SKILL}_alora",
            profile=REAL_PROFILE,
            data=_REAL / f"data/{_SKILL}/long.jsonl",
            num_documents=2,
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
        """Environment variables of the servers. On a CPU they hide every accelerator: SGLang uses
        its CPU platform only if it sees none."""
        return {"CUDA_VISIBLE_DEVICES": ""} if self.is_on_cpu else {}

    def documents(self, profile: MeasuredProfile) -> list[Document]:
        """Documents and questions for the pair, tokenised by the settings of its profile. Prompts
        that the servers would refuse are cut as the profiler cuts them."""
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
        return documents[: self.num_documents]

    def pair(self) -> tuple[Subject, MeasuredProfile]:
        """Return the pair to measure, and its profile. Raises DemoFailed if the profile forbids
        reuse."""
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
        """Write two models of random weights into `folder`, without progress bars."""
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
