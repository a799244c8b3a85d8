"""A sender that offers its cache and a receiver that reads it, as real servers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from engine_parts import CPU, ENV, Answer, Watcher, answer, oracle, whole_pages
from forked import ServerSpec

from benchmarks.oracle import Generated
from cachetree.ids import Span
from sglang_droidspeak.fleet.servers import Server, free_port, running

OFF = {"mode": "off"}


@dataclass(frozen=True)
class Pair:
    sender: Server
    receiver: Server
    address: str
    """Address of the sender's cache."""
    watcher: Watcher
    """Watcher of the pages that the sender offers."""

    @property
    def models(self) -> dict[str, Path]:
        return {"sender": self.sender.spec.model, "receiver": self.receiver.spec.model}

    def send(self, tokens: Sequence[int], salt: str | None = None) -> None:
        """Have the sender read tokens. Returns once it offers them."""
        answer(self.sender, tokens, max_new_tokens=1, cache_salt=salt)
        self.watcher.wait_for(tokens, self.models["sender"], salt)

    def ask(self, tokens: Sequence[int], **options: Any) -> Answer:
        """Ask a receiver that has nothing of the prompt on its device."""
        self.receiver.flush()
        return answer(self.receiver, tokens, **options)

    def alone(self, tokens: Sequence[int]) -> Answer:
        """Return the receiver's own answer. It keeps nothing of it."""
        reply = self.ask(tokens, droidspeak=OFF)
        self.receiver.flush()
        return reply

    def expected(self, tokens: Sequence[int], block: Span) -> Generated:
        """Return the answer that the receiver must give if it recomputes that block."""
        models = self.models["receiver"], self.models["sender"]
        num_reused = whole_pages(len(tokens))
        return oracle(*models, tokens, block=block, num_reused=num_reused, max_new=12)


@contextmanager
def servers(
    folder: Path,
    models: Sequence[Path],
    sends: Mapping[str, Any] = {},
    reads: Mapping[str, Any] = {},
    options: Mapping[str, Any] = CPU,
    reader: Mapping[str, Any] = {},
    env: Mapping[str, str] = ENV,
) -> Iterator[Pair]:
    """Start both models, with settings of the sender and of the receiver. Both servers get SGLang's
    `options`; the receiver also gets `reader`."""
    address = sends.get("listen", f"tcp://127.0.0.1:{free_port()}")
    offer = {"listen": address, "host_gb": 0.5, **sends}
    read = {"peers": [address], "gate": "none", "host_gb": 0, **reads}
    specs = [
        ServerSpec(model=models[0], name="sender", options=options, droidspeak=offer),
        ServerSpec(
            model=models[1], name="receiver", options={**options, **reader}, droidspeak=read
        ),
    ]
    with (
        running(*specs, folder=folder / "logs", env=env) as (sender, receiver),
        closing(Watcher(models[1], [address])) as watcher,
    ):
        yield Pair(sender, receiver, address, watcher)


def same(first: Answer, second: Answer) -> bool:
    return first.ids == second.ids and first.logprobs == pytest.approx(second.logprobs, abs=2e-4)
