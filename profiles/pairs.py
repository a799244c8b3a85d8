"""Decide which pairs of several models can matter, and say why the others cannot.

The model that reads a document first computes exact KV, and other models may load it. All KV that
they compute from it is approximate, and no server offers approximate KV. So a pair matters if its
sender reads documents first. Usually the base does, and its adapters follow. A request log shows
which models read first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import msgspec

from cachetree import ConfigError, read_yaml, settings_of
from cachetree.checkpoint import read_invocation
from profiles.adapters import ADAPTER_CONFIG
from profiles.compute.models import ModelSource, look_at, look_at_pair
from profiles.data.datasets import GSM8K
from profiles.data.logs import BASE, Context
from profiles.data.metrics import Metric
from profiles.settings import LOG, Settings

FIRST_ALONE: Final = (
    "the sender is an adapter, and reads after its base: KV that it computes then is offered to no "
    "model; if it reads first, show it by --from-log or name it among the receiver's senders"
)

NEVER_AFTER: Final = "in the log the receiver was asked nothing that the sender had read first"
NO_DATA: Final = "nothing to ask the receiver; give it data, or --from-log"


class Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One model of a models file, by the name that servers give it. Paths are relative to the
    file."""

    model: str
    adapter: str = ""
    data: tuple[str, ...] = ()
    """Values of `--data` for pairs with this model as receiver. Empty: the command's own data."""
    senders: tuple[str, ...] | None = None
    """Names of models that may send KV to this model. None: all models for which it can matter."""
    template: str | None = None
    metric: str | None = None
    max_new: int | None = None

    @property
    def source(self) -> ModelSource:
        return ModelSource(
            path=Path(self.model), adapter=Path(self.adapter) if self.adapter else None
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A pair by the names of its models, and the reason if it is not to be profiled."""

    sender: str
    receiver: str
    why_not: str = ""
    """Reason why the pair needs no profile, or can have none. Empty if the pair is to be
    profiled."""
    about: str = ""
    """Pairs to which `why_not` applies: this pair, or a group such as `any → NAME`."""
    num_prompts: int = 0
    """Number of the receiver's prompts in the log that begin with a context which the sender had
    read first."""
    num_tokens: int = 0
    """Number of tokens of the contexts at the start of these prompts, together."""

    @property
    def name(self) -> str:
        return f"{self.sender} → {self.receiver}"


def read_entries(settings: Settings) -> dict[str, Entry]:
    """Read the models that the settings name, by file or by folder; raises ConfigError."""
    if settings.models is not None:
        path = settings.models
        stated = read_yaml(path, "models file")
        if not isinstance(stated, dict) or len(stated) < 2:
            raise ConfigError(f"models file {path} names fewer than two models; write NAME: each")
        entries = {
            str(name): settings_of(it, Entry, f"{path}: {name}") for name, it in stated.items()
        }
        for name, entry in entries.items():
            if entry.metric not in (None, *Metric):
                raise ConfigError(
                    f"{path}: {name}: metric is {entry.metric}; it has to be {' or '.join(Metric)}"
                )
            if unknown := {*(entry.senders or ())} - entries.keys():
                raise ConfigError(
                    f"{path}: {name}: senders has {', '.join(sorted(unknown))}, which is no model "
                    f"of the file; it has {', '.join(entries)}"
                )
        return {name: _from(path.parent, it) for name, it in entries.items()}
    folder, base = settings.adapters, settings.base
    if base is None:
        raise ConfigError("--adapters is given without --base; name the model that they are of")
    entries = {BASE: Entry(model=str(base), data=_beside(folder, BASE))}
    for config in sorted(folder.glob(f"*/{ADAPTER_CONFIG}")):
        name = config.parent.name
        entries[name] = Entry(
            model=str(base), adapter=str(config.parent), data=_beside(folder, name)
        )
    if len(entries) < 2:
        raise ConfigError(f"{folder} has no folder with an {ADAPTER_CONFIG}; name theirs")
    return entries


def _beside(folder: Path, name: str) -> tuple[str, ...]:
    data = folder / f"{name}.jsonl"
    return (str(data),) if data.is_file() else ()


def _from(folder: Path, entry: Entry) -> Entry:
    """Return the entry with paths relative to the working directory in place of `folder`. Values of
    `data` that name no file, such as `gsm8k`, stay as they are."""
    data = tuple(_data_from(folder, it) for it in entry.data)
    adapter = entry.adapter and str(folder / entry.adapter)
    return msgspec.structs.replace(
        entry, model=str(folder / entry.model), adapter=adapter, data=data
    )


def _data_from(folder: Path, data: str) -> str:
    for kind in LOG, f"{GSM8K}:":
        if data.startswith(kind):
            return f"{kind}{folder / data.removeprefix(kind)}"
    return str(folder / data) if (folder / data).exists() else data


def pairs_of(
    entries: Mapping[str, Entry], settings: Settings, contexts: Iterable[Context] | None
) -> list[Wanted]:
    """Return every pair: first those to profile, most shared tokens first, and then the others.

    `contexts` come from a log, with models named as in `entries`; None without a log.
    """
    problems = {name: _problem(it) for name, it in entries.items()}
    reads = None if contexts is None else reads_of(contexts)
    followers = {receiver for _, receiver in reads or ()}
    pairs = []
    for receiver, theirs in entries.items():
        for sender, ours in entries.items():
            if sender == receiver:
                continue
            num_prompts, num_tokens = (reads or {}).get((sender, receiver), (0, 0))
            pair = Wanted(
                sender=sender, receiver=receiver, num_prompts=num_prompts, num_tokens=num_tokens
            )
            broken = next((name for name in (receiver, sender) if problems[name]), None)
            why_not, about = "", pair.name
            if broken is not None:
                why_not, about = problems[broken], f"all of {broken}"
            elif not (theirs.data or settings.data):
                why_not, about = NO_DATA, f"any → {receiver}"
            elif theirs.senders is not None:
                why_not = "" if sender in theirs.senders else "its entry names other senders"
            elif reads is not None:
                why_not = "" if num_prompts else NEVER_AFTER
                about = pair.name if receiver in followers else f"any → {receiver}"
            elif ours.adapter:
                why_not = FIRST_ALONE
            why_not = why_not or _apart(ours.source, theirs.source)
            pairs.append(replace(pair, why_not=why_not, about=about))
    return sorted(pairs, key=lambda it: (bool(it.why_not), -it.num_tokens))


def reads_of(contexts: Iterable[Context]) -> dict[tuple[str, str], tuple[int, int]]:
    """Count the prompts of later readers of contexts, and the tokens of these contexts, for each
    first reader and later reader."""
    reads: dict[tuple[str, str], tuple[int, int]] = {}
    for context in contexts:
        first = min(context.asked, key=lambda of: of.number).model
        for of in context.asked:
            if of.model != first:
                prompts, tokens = reads.get((first, of.model), (0, 0))
                reads[first, of.model] = prompts + 1, tokens + context.num_shared
    return reads


def _problem(entry: Entry) -> str:
    """Return the reason why no pair with this model can be profiled. Empty if there is none."""
    try:
        if entry.adapter and read_invocation(Path(entry.adapter)):
            return (
                f"{Path(entry.adapter).name} is an activated adapter: its KV before the invocation "
                "is its base's, which needs no profile"
            )
        look_at(entry.source)
    except ConfigError as exc:
        return str(exc)
    return ""


def _apart(sender: ModelSource, receiver: ModelSource) -> str:
    try:
        theirs, ours = look_at_pair(sender, receiver)
    except ConfigError as exc:
        return str(exc)
    same = theirs.identity == ours.identity
    return "both are the same model, which shares exactly without a profile" if same else ""
