"""What a demo runs on: by default the shipped pair, or a user's own."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch

from cachetree import CacheTreeError, ModelIdentity, PairProfile, Span, read_profile
from cachetree.checkpoint import read_model_identity
from profiles.data import Record, RecordError, read_records
from profiles.environment import ROOT
from profiles.random_models import shape, write_models
from sglang_droidspeak.demo.rig import DemoFailed, Subject

PAIRS: Final = ROOT / "examples/pairs"
"""The small pairs, in a clone."""

_CPU_OPTIONS: Mapping[str, Any] = {
    "device": "cpu",
    "sleep-on-idle": True,
    "max-total-tokens": 32768,
}
"""Without a limit SGLang's KV pool takes most of the memory, and there are two servers."""
_CPU_ENV: Mapping[str, str] = {"CUDA_VISIBLE_DEVICES": "", "SGLANG_TORCH_CPU_START": "fork"}
"""The CPU platform is there only where no accelerator is seen; forking starts faster."""
_ACCELERATOR_OPTIONS: Mapping[str, Any] = {"mem-fraction-static": 0.35}
"""Both servers on one device."""
_SMALL: Mapping[str, Any] = {
    "max-total-tokens": 8192,
    "max-running-requests": 4,
    "chunked-prefill-size": 4096,
}
"""What one request at a time needs."""

_TIMED_BLOCK = Span(4, 7)


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomPair:
    """Randomly initialised models: right for time, meaningless for quality."""

    layers: int = 12
    hidden: int = 768
    heads: int = 12
    block: Span = _TIMED_BLOCK
    num_tokens: int = 2000
    num_new_tokens: int = 24

    @property
    def title(self) -> str:
        return f"random weights, {self.layers} layers × {self.hidden}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoConfig:
    """Defaults are the small pair of the repository."""

    sender: Path = PAIRS / "weights/sender"
    receiver: Path = PAIRS / "weights/receiver"
    profile: Path = PAIRS / "sender_to_receiver.json"
    data: Path = PAIRS / "data/held_out.jsonl"
    template: str = "<bos> {context} {input}"
    max_new: int = 8
    num_questions: int | None = None
    """Only the first of the data's questions; None: all."""
    num_documents: int = 6
    """Documents that are timed; one more warms up."""
    random_pair: RandomPair | None = RandomPair()
    """What is timed; None times the pair itself on its own documents."""
    device: str = "auto"
    dtype: str | None = None
    """None: float32 on a CPU, where answers can then be compared exactly; else bfloat16."""
    options: Mapping[str, Any] = field(default_factory=lambda: _SMALL)
    """SGLang's own, for all servers."""
    host_gb: float = 1.0
    out: Path = Path("out/demo")

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
        if self.is_on_cpu:
            return {**_CPU_OPTIONS, **self.options}
        device = {} if self.device == "auto" else {"device": self.device}
        return {**_ACCELERATOR_OPTIONS, **device, **self.options}

    @property
    def env(self) -> dict[str, str]:
        """On a CPU each of the two servers computes on its half of the cores."""
        if not self.is_on_cpu:
            return {}
        num_threads = max(1, len(os.sched_getaffinity(0)) // 2)
        return {"OMP_NUM_THREADS": str(num_threads), **_CPU_ENV}

    def records(self) -> Sequence[Record]:
        try:
            return read_records(self.data)[: self.num_questions]
        except RecordError as exc:
            raise DemoFailed(str(exc)) from exc

    def pair(self) -> tuple[Subject, PairProfile]:
        """The pair whose quality is measured; DemoFailed where its profile does not allow it."""
        if self.sender.is_relative_to(PAIRS) and not PAIRS.is_dir():
            raise DemoFailed(
                f"the small pair is not in {PAIRS}: it is part of the repository and not of "
                "the installed package; run the demo from a clone, or give --sender, --receiver, "
                "--profile and --data"
            )
        try:
            sender, receiver = read_model_identity(self.sender), read_model_identity(self.receiver)
            profile = read_profile(self.profile)
        except CacheTreeError as exc:
            raise DemoFailed(str(exc)) from exc
        for role, model, expected in (
            ("sender", sender, profile.sender),
            ("receiver", receiver, profile.receiver),
        ):
            if model.model_id != expected.model_id:
                raise DemoFailed(
                    f"profile {self.profile} has {role} {expected.model_id}, and "
                    f"{getattr(self, role)} is {model.model_id} by content; profile this pair"
                )
        if not profile.passed or profile.recommended is None:
            raise DemoFailed(
                f"profile {self.profile} did not pass its gate: {profile.reason}; "
                "a server would not reuse this pair"
            )
        return self._subject(self.sender, self.receiver, sender, profile.recommended.block), profile

    def make_random(self, pair: RandomPair, folder: Path) -> Subject:
        """Write the pair that is timed, without a progress bar of its own."""
        config = shape(
            "llama",
            layers=pair.layers,
            hidden=pair.hidden,
            heads=pair.heads,
            kv_heads=pair.heads,
        )
        dtype = getattr(torch, self.resolved_dtype)
        with contextlib.redirect_stderr(io.StringIO()):  # transformers' own progress bars
            sender, receiver = write_models(folder, config, ["sender", "receiver"], dtype=dtype)
        return self._subject(sender, receiver, read_model_identity(sender), pair.block)

    def _subject(
        self, sender: Path, receiver: Path, identity: ModelIdentity, block: Span
    ) -> Subject:
        return Subject(
            sender=sender,
            receiver=receiver,
            sender_identity=identity,
            block=block,
            dtype=self.resolved_dtype,
            options=self.server_options,
            host_gb=self.host_gb,
        )
