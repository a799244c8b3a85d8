"""Read and check this server's model, settings and profiles at start."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import msgspec
import torch

from cachetree import ConfigError, ModelId
from cachetree.checkpoint import (
    NO_ADAPTER,
    Codec,
    Family,
    ModelIdentity,
    Weights,
    adapted,
    read_adapter,
    read_weights,
    user_cache,
)
from cachetree.corrections import Correction, read_corrections
from cachetree.memory import Layout
from cachetree.planning import (
    LineProfile,
    PairProfile,
    PrefillCost,
    profile_files,
    read_line,
    read_profile,
    require_one_each,
)
from cachetree.transport import check_peer, check_worker
from sglang_droidspeak import engine
from sglang_droidspeak.engine.probe import require_supported
from sglang_droidspeak.start import refuse
from sglang_droidspeak.start.config import Settings, cache_config, parse_settings

if TYPE_CHECKING:
    from sglang_droidspeak.engine.names import ServerArgs

log = logging.getLogger(__name__)

_SERVED: Final = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
_BESIDE: Final = ["*/*", "consolidated*"]
"""Files of a repository that are not downloaded: they have the same weights in other formats."""


@dataclass(frozen=True, kw_only=True)
class ThisServer:
    """This server's model, settings and profiles. `load_this_server` makes it once per process."""

    settings: Settings
    weights: Weights
    """Weights of the checkpoint, as read at start."""
    profiles: tuple[PairProfile, ...]
    lines: tuple[LineProfile, ...]
    """Profiles of lines of models: a model after an update may inherit their plans."""
    page_size: int
    e_width: int
    """Number of columns of E on each rank."""
    adapters: Mapping[Path, ModelId] | None
    """Model id of the base with each adapter that is loaded at start, by the adapter's folder. None
    if the server cannot serve adapters."""
    corrections: Mapping[str, Correction]
    """Maps that correct E, in host memory. Keys are digests. They come from the profiles with this
    model as receiver."""

    @property
    def identity(self) -> ModelIdentity:
        """Model that the server starts with. After an update, `Models` has the present one."""
        return self.weights.started_as

    @property
    def has_blocks(self) -> bool:
        """Whether layers of this model's class can be recomputed; if not, reuse is exact."""
        return self.identity.architecture in refuse.ARCHITECTURES

    @functools.cached_property
    def transition_layers(self) -> tuple[int, ...]:
        """Layers at which this server keeps E, in ascending order.

        These are the configured layers, or else the layers that its profiles and adapters need.
        Profiles of adapters count from the start, because an adapter may be loaded at any time.
        """
        if not self._keeps_e:
            return ()
        if self.settings.capture_layers is not None:
            return self.settings.capture_layers
        # Readers: adapters of this server, and other servers by an address or a storage.
        to = self.settings.listen, self.settings.hicache_backend, self.settings.disk_path
        is_read = self.adapters is not None or any(to)
        sends = [p.transition_layers() for p in self._profiles_of("sender") if is_read]
        # Each model of a line sends to the next model on this server.
        sends += [it.transition_layers() for it in self.lines]
        return tuple(sorted(frozenset().union(self._first_differences, *sends)))

    @property
    def senders(self) -> dict[ModelId, frozenset[int]]:
        """Models from which this server may read, each with the layers at which its E is needed."""
        receives = self._profiles_of("receiver")
        own = {self.identity.model_id, *(self.adapters or {}).values()}
        return dict.fromkeys(own, self._first_differences) | {
            p.sender.model_id: p.transition_layers() | self._first_differences for p in receives
        }

    @property
    def prefill_prior(self) -> PrefillCost:
        """Cost of a prefill that the server assumes for lengths that it has not measured. It comes
        from a profile of this model, or from the model's sizes. Measured forwards set its scale."""
        times = (it.costs for it in self._profiles_of("receiver") if it.costs is not None)
        measured = next(times, None)
        if measured is None:
            return PrefillCost.of_sizes(self.identity.hidden_size)
        return PrefillCost(
            fixed_s=measured.layer_s,
            token_s=measured.layer_token_s,
            context_s=2 * measured.layer_token2_s,
        )

    @property
    def _keeps_e(self) -> bool:
        return self.settings.host_gb > 0 or self.adapters is not None

    @functools.cached_property
    def _first_differences(self) -> frozenset[int]:
        """Return the first layer at which two models differ, for all pairs among the base and its
        adapters. Reads the adapters' files once."""
        if not self.has_blocks:
            return frozenset()
        num_layers = self.identity.num_layers
        read = [NO_ADAPTER, *(read_adapter(it, num_layers) for it in self.adapters or ())]
        layers = {one.first_difference(other, num_layers) for one in read for other in read}
        return frozenset(layers - {0, num_layers})

    def _profiles_of(self, role: Literal["sender", "receiver"]) -> Iterator[PairProfile]:
        """Yield the usable profiles with this server's model, or an adapter on it, in this role."""
        for profile in self.profiles:
            is_ours = getattr(profile, role) == self.identity or self.adapters is not None
            if is_ours and profile.is_usable:
                yield profile


def load_this_server(server_args: ServerArgs) -> ThisServer:
    """Read and check everything for a server that uses this package.

    Raises ConfigError or ProfileError with the field, the value and the remedy.
    """
    args = engine.resolved(server_args)
    require_supported()
    variables = engine.switched_on(refuse.VARIABLES)
    refuse.check_arguments(server_args, args, torch.version.hip, variables)
    extra = args.unified_cache_external_linker_config.get("linker_extra_config") or {}
    tested = parse_settings(extra).gpu_tested_weights
    refuse.check_weights(args.model_path, engine.quantization(server_args), tested)
    refs = args.lora_paths if args.enable_lora else None
    return read_server(
        msgspec.json.encode(extra, order="sorted"),
        args.model_path,
        args.revision,
        args.page_size,
        args.tp_size,
        None if refs is None else tuple(it.lora_path for it in refs),
    )


@functools.cache
def read_server(
    extra_json: bytes,
    model_path: str,
    revision: str | None,
    page_size: int,
    tp_size: int,
    lora_paths: tuple[str, ...] | None,
) -> ThisServer:
    """Read the checkpoint, adapters and profiles that these settings need, and check them. Raises
    ConfigError or ProfileError."""
    settings = parse_settings(msgspec.json.decode(extra_json))
    _check_transport(settings, tp_size)
    if settings.hicache_backend is not None:
        from sglang_droidspeak.engine.hicache import check_backend

        check_backend(settings.hicache_backend, settings.hicache_config)
    path = folder_of(model_path, revision)
    weights = read_weights(path, user_cache())
    identity = weights.started_as
    refuse.check_model(identity, model_path)
    refuse.check_blocks(settings, identity)
    refuse.check_capture_layers(settings, identity)
    e_width = _e_width(settings.codec, identity, page_size, tp_size)
    has_adapters = lora_paths is not None
    folders = map(folder_of, lora_paths or ())
    adapters = {it: adapted(identity, it).model_id for it in folders} if has_adapters else None
    profiles = dict(_read_profiles(settings, identity, has_adapters=has_adapters))
    require_one_each(profiles)
    lines = tuple(read_line(Path(it)) for it in settings.lines)
    for file, line in zip(settings.lines, lines, strict=True):
        refuse.check_line(file, line, identity)
    if lines:
        weights = weights.sketched(path)
    corrections: dict[str, Correction] = {}
    for file, profile in profiles.items():
        if has_adapters or profile.receiver == identity:
            corrections |= read_corrections(profile, file)
    return ThisServer(
        settings=settings,
        weights=weights,
        profiles=tuple(profiles.values()),
        lines=lines,
        page_size=page_size,
        e_width=e_width,
        adapters=adapters,
        corrections=corrections,
    )


def name_of(args: ServerArgs) -> str:
    """Return the base's name for logs and metrics: the served name, or the name of its folder."""
    served: str = args.served_model_name or args.model_path
    return Path(served).name if served == args.model_path else served


def folder_of(path: str, revision: str | None = None) -> Path:
    """Return the local folder of a model or an adapter, from a path or a repository's name.
    Downloads the repository if necessary. Raises ConfigError."""
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                path, revision=revision, allow_patterns=_SERVED, ignore_patterns=_BESIDE
            )
        )
    except (OSError, ValueError) as exc:
        reason = str(exc).partition("\n")[0]
        raise ConfigError(
            f"model {path} is no folder, and Hugging Face does not give it: {reason}"
        ) from exc


def _e_width(codec: Codec, identity: ModelIdentity, page_size: int, tp_size: int) -> int:
    """Return the number of columns of E on each rank. Raises ConfigError if the codec cannot encode
    a rank's E or KV."""
    family = Family(
        **identity.shape,
        model_dtype="float32",
        kv_dtype="float32",
        page_size=page_size,
        codec=codec,
        tp_size=tp_size,
        tp_rank=0,
    )
    Layout.of(family, 1, ())
    return family.e_width


def _check_transport(settings: Settings, tp_size: int) -> None:
    """Check addresses and keys of all ranks, before a model is loaded. Raises ConfigError."""
    for rank in range(tp_size):
        config = cache_config(settings, ModelId(""), rank)
        if config.serves:
            check_worker(config.worker)
        for peer in config.peers:
            check_peer(peer, config.peer_at(peer))
    refuse.check_ports(settings, tp_size)


def _read_profiles(
    settings: Settings, identity: ModelIdentity, *, has_adapters: bool
) -> Iterable[tuple[Path, PairProfile]]:
    """Read the profiles for this server's model, each with its file.

    A file that the settings name has to be for this model and usable. A folder may have profiles of
    a whole fleet; profiles of other models are skipped. If the server serves adapters, profiles of
    any adapter on its base are read, because the adapter may be loaded later.
    """
    for name in settings.profiles:
        path = Path(name)
        for file in profile_files(path):
            profile, is_named = read_profile(file), file == path
            if settings.e_correction == "none":
                profile = profile.uncorrected()
            sides = (profile.sender, profile.receiver)
            if has_adapters:
                sides = tuple(msgspec.structs.replace(it, weights=identity.weights) for it in sides)
            if identity not in sides:
                if is_named:
                    refuse.refuse_pair(file, profile, identity)
                continue
            if not profile.is_usable:
                failed = f"profile {file} did not pass its gate: {profile.reason}"
                if is_named:
                    refuse.check_failed_profile(settings, failed)
                log.warning("%s; it is not used", failed)
            yield file, profile
