"""Settings of one server, from `linker_extra_config` or from a file that it names.

An example, in SGLang's own `--config server.yaml`:

    enable-unified-cache-external-linker: true
    unified-cache-external-linker-backend: dynamic
    unified-cache-external-linker-config:
      linker: DroidSpeakLinker
      linker_module_path: sglang_droidspeak.linker
      linker_extra_config:
        listen: tcp://127.0.0.1:7001
        profiles: [pair.json]
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from cachetree import CacheConfig, ConfigError, ModelId, read_yaml, settings_of
from cachetree.checkpoint import Codec
from cachetree.transport import MAX_REQUEST_S, PeerConfig, WorkerConfig, parse_http
from cachetree.tree import Retention

LINKER_MODULE = "sglang_droidspeak.linker"
MIN_PAGE_SIZE = 16
GIB = 1 << 30
_SHADOW_RATE = 0.05
_MOST = 1e6
"""Largest allowed value of a setting in GiB or seconds."""

_NEEDS = (
    # a setting, another one that it needs to have an effect, and why
    ("disk_path", "host_gb", "nothing is ever stored"),
    ("lines", "guard_path", "no drift guard watches inherited plans"),
    ("shadow_rate", "guard_path", "its evidence would be lost at the next start"),
    ("shadow_deadline_s", "guard_path", "no answer is compared"),
    ("shadow_busy_share", "guard_path", "no answer is compared"),
    ("hicache_config", "hicache_backend", "there is no backend to make with it"),
    ("allowed_peers", "listen", "no server reads this cache"),
    ("bulk_port", "listen", "no server reads this cache"),
    ("max_link_mb_s", "listen", "no server reads this cache"),
    ("insecure", "listen", "there is no address to allow"),
)


@dataclass(frozen=True, slots=True)
class MemoryShare:
    """Default memory of one rank: a share of the memory of the host, or of the container.

    It depends only on the memory's size, so all processes of a server agree. Eight ranks on one
    host together take at most three quarters of its memory for `HOST` and `STAGING`, except on
    hosts so small that `least_gb` counts.
    """

    divisor: int
    least_gb: float
    most_gb: float

    def of(self, memory_gb: float) -> float:
        """Return the share of `memory_gb` in GiB, rounded down to tenths, within the limits."""
        share_gb = math.floor(10 * memory_gb / self.divisor) / 10
        return min(max(self.least_gb, share_gb), self.most_gb)

    def __call__(self) -> float:
        from profiles.environment import memory_bytes

        return self.of(memory_bytes() / GIB)

    def __str__(self) -> str:
        return f"1/{self.divisor} of the host's, {self.least_gb:g} to {self.most_gb:g}"


HOST = MemoryShare(16, least_gb=2.0, most_gb=16.0)
STAGING = MemoryShare(32, least_gb=1.0, most_gb=8.0)


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings of a server. Relative paths are relative to the working directory."""

    config: str | None = None
    """YAML file with these settings. If it is named, no other key may be set beside it."""
    gpu_tested_weights: tuple[Literal["awq", "gptq", "fp8"], ...] = ()
    """Formats of quantised weights (`awq`, `gptq`, `fp8`) with which `make gpu` has passed on this
    device. No other test covers them, because CPUs cannot run them. The server refuses checkpoints
    in other quantised formats."""
    listen: str | None = None
    """Address at which other servers may read this server's cache, and copy it:
    `tcp://host:port`. None: no other server can read it."""
    peers: tuple[str, ...] = ()
    """Servers from which this one may read: `tcp://host:port`, or `dns://name:port` for all
    addresses of a name. This server trusts what they send, for all tenants."""
    http: str | int | None = None
    """`HOST:PORT` that serves /metrics and /health of this server's cache. A port without a host is
    reachable on this machine only. None: no such pages."""
    profiles: tuple[str, ...] = ()
    """Pair profiles, or folders of them. A named file must have this server's model, or an adapter
    on it, as sender or receiver."""
    lines: tuple[str, ...] = ()
    """Profiles of lines of models (`droidspeak profile --line`). Each must name this server's
    model. After an update, the new model inherits the plan if its weights have changed by no more
    than the profile has proven."""
    e_correction: Literal["none", "profile"] = "profile"
    """`profile` allows plans that correct the sender's E by a map of the profile. The maps are in
    `PAIR.maps.safetensors` beside the profile. `none` allows no such plan. Sender and receiver need
    the same value: it decides at which layer the sender keeps E."""
    capture_layers: tuple[int, ...] | None = None
    """Layers at which the server keeps E. None: the layers that profiles with this model as sender
    need."""
    gate: Literal["enforce", "none"] = "enforce"
    """`none` is for measurements: a request may name any block of any sender, even without a
    profile. Plans that the drift guard has stopped stay stopped."""
    host_gb: float = msgspec.field(default_factory=HOST)
    """Host memory for this server's own KV and E, in GiB for each rank. It is allocated at start,
    on CUDA page-locked. 0 stores nothing. In a container, the default is a share of its limit. With
    a disk, the default is at most half of `disk_gb`."""
    ttl_s: float | None = None
    """Seconds after which an unused entry leaves host memory. None: entries stay until their
    memory is needed."""
    disk_path: str | None = None
    """Folder that keeps the entries of host memory after they leave it, also beyond a restart. Only
    one server may use it at a time. A reader of KV can reconstruct prompts, so the server closes
    the folder and its files to other users."""
    disk_gb: float = 0.0
    """Largest number of GiB of all files in `disk_path`. It has to exceed `host_gb`: the disk also
    has all entries of the host memory."""
    hicache_backend: str | None = None
    """Storage backend of SGLang's HiCache that stores the entries of host memory for a whole
    cluster: `file`, `nixl`, `mooncake` and others."""
    hicache_config: dict[str, Any] = {}
    """Options of `hicache_backend`, as in SGLang's `hicache-storage-backend-extra-config`."""
    codec: Codec = Codec.NONE
    """Encoding in which KV and E are stored and sent. `int8` and `int4` take fewer bytes, but are
    not exact. All servers that share need the same value."""
    staging_gb: float = msgspec.field(default_factory=STAGING)
    """Host memory for fetches in flight, in GiB for each rank. It is allocated at start. If a
    prefix does not fit, only its first pages are fetched. In a container, the default is a share of
    its limit."""
    min_tokens: int = 64
    """Fewest tokens that are worth a fetch."""
    max_recompute_tokens: int = 32768
    """Largest number of tokens that a plan with recomputed layers reuses."""
    max_stall_ms: float | None = None
    """Largest number of milliseconds that recomputed layers and copies may delay decoding requests
    in one scheduler step. Work beyond it waits for the next step, or a shorter prefix is reused.
    None: layers and copies count as tokens of such a step (`chunked-prefill-size`), so the delay is
    at most that of SGLang's own prefill."""
    fetch_deadline_s: float = 10.0
    """Seconds, at most 60, after which a fetch is given up and its request does a full prefill. A
    request that names no block gives up earlier: when its fetch is late by the time that reuse
    would save."""
    peer_cooldown_s: float = 30.0
    """Seconds without a fetch from a worker after three errors within ten seconds. Then one fetch
    tries the worker again. If it fails, the time doubles, up to ten times this value."""
    recompute_attention: Literal["server", "flashinfer"] = "server"
    """Attention backend for recomputed layers. `server` is another instance of the backend that
    this server prefills with. `flashinfer` is FlashInfer, beside any backend of the server. The
    server makes and runs the chosen backend at start, and subtracts its device memory (FlashInfer:
    384 MiB to 2 GiB) from the KV pool."""
    forward_wait_s: float = 0.05
    """Seconds that a forward waits for late layers, beyond the time predicted from the rate so far.
    After that, the prefix is prefilled in full."""
    ttft_target_ms: float | None = None
    """Target for the time to first token, in milliseconds. While no request waits, a plan
    recomputes as many layers as the target allows. None: plans recompute the layers that the
    profile recommends."""
    shadow_rate: float | None = None
    """Share of the requests with another model's KV that the drift guard compares with an exact
    run, 0 to 1. By default 0.05 if there is a `guard_path`."""
    shadow_deadline_s: float = 60.0
    """Seconds that a comparison of the drift guard may wait for its turn. After that it is dropped
    and counted."""
    shadow_busy_share: float = 0.01
    """Share of all time in which comparisons may run beside other requests, 0 to 1. 0: comparisons
    run only while no request runs."""
    guard_path: str | None = None
    """File with the drift guard's evidence about pairs, of this server and this user only. A pair
    that the guard has stopped stays stopped after a restart. None turns the guard off."""
    max_link_mb_s: float | None = None
    """Largest number of megabytes (10^6 bytes) per second that this server sends to readers of its
    cache. None: no limit."""
    shared_memory: bool = True
    """Whether servers on one host copy pages through shared memory. Between hosts, pages always go
    over the connection."""
    key_file: str | None = None
    """File with this server's secret key, made by `cachetree keygen`. None: nothing is
    encrypted."""
    allowed_peers: tuple[str, ...] = ()
    """Public keys of the servers that may read this cache, with the pages of all its tenants. Give
    keys, files of them, or folders of `.pub` files."""
    peer_keys: dict[str, str] = {}
    """Address of each peer, with its public key or a file with the key. Connections to other peers
    are not encrypted. All peers behind a `dns://` address have to prove the key of that address."""
    bulk_port: int = 0
    """Port for KV, E and the messages about them, on the same host as `listen`. After its
    handshake, each peer opens a TCP connection to this port. 0 takes a free port. A firewall or a
    container has to let both ports through, with the same numbers."""
    insecure: bool = False
    """Whether `listen` may be an address other than loopback without keys."""

    def __post_init__(self) -> None:
        for field in ("host_gb", "disk_gb", "staging_gb", "forward_wait_s"):
            if not 0 <= getattr(self, field) <= _MOST:
                raise ConfigError(f"{field} is {getattr(self, field)}; give 0 to {_MOST:.0f}")
        if self.http is not None:
            parse_http(self.http)
        for field in ("shadow_rate", "shadow_busy_share"):
            if not 0 <= (getattr(self, field) or 0) <= 1:
                raise ConfigError(f"{field} is {getattr(self, field)}; give 0 to 1")
        positive = ("min_tokens", "max_recompute_tokens", "fetch_deadline_s", "peer_cooldown_s")
        limits = ("max_stall_ms", "max_link_mb_s", "shadow_deadline_s", "ttft_target_ms")
        for field in (*positive, *limits):
            value = getattr(self, field)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{field} is {value}; give a finite positive number")
        if self.fetch_deadline_s > MAX_REQUEST_S:
            raise ConfigError(
                f"fetch_deadline_s is {self.fetch_deadline_s}; give at most {MAX_REQUEST_S}, after "
                "which a worker ends a fetch"
            )
        Retention(ttl_s=self.ttl_s)
        if (self.disk_path is None) != (self.disk_gb == 0):
            raise ConfigError(
                f"disk_path is {self.disk_path} and disk_gb {self.disk_gb}; give both, or neither"
            )
        defaults = {it.name: it.default for it in msgspec.structs.fields(self)}
        for field, needed, why in _NEEDS:
            setting, other = getattr(self, field), getattr(self, needed)
            if setting and setting != defaults[field] and not other:
                raise ConfigError(  # The message omits the value, which may have credentials.
                    f"{field} is set and {needed} is {other}, so {why}; set {needed}, or remove "
                    f"{field}"
                )
        if self.key_file is not None and self.listen is None and not self.peer_keys:
            raise ConfigError(
                f"key_file is {self.key_file}, and neither listen nor peer_keys gives it a use; "
                "set peer_keys, or remove key_file"
            )

    def taken_gb(self, tp_size: int) -> float:
        """Return the host memory that all ranks take together, in GiB."""
        return tp_size * (self.host_gb + self.staging_gb)

    @property
    def shadow_share(self) -> float:
        if self.guard_path is None:
            return 0.0
        return _SHADOW_RATE if self.shadow_rate is None else self.shadow_rate

    @property
    def max_stall_s(self) -> float | None:
        return None if self.max_stall_ms is None else self.max_stall_ms / 1000


def at_rank(location: str, tp_rank: int) -> str:
    """Return the address of a rank, from the address of the first rank: the port plus `tp_rank`.

    Port 0, which takes a free port, stays 0. A text that is no address stays as it is.

    >>> at_rank("tcp://127.0.0.1:7001", 2), at_rank("tcp://127.0.0.1:0", 2), at_rank("disk", 2)
    ('tcp://127.0.0.1:7003', 'tcp://127.0.0.1:0', 'disk')
    """
    host, _, port = location.rpartition(":")
    has_port = location.startswith(("tcp:", "dns:")) and port.isdecimal() and int(port)
    if not tp_rank or not has_port:
        return location
    return f"{host}:{int(port) + tp_rank}"


def cache_config(settings: Settings, model: ModelId, tp_rank: int = 0) -> CacheConfig:
    """Translate the settings into the cache's configuration, for one rank that runs `model`. Raises
    ConfigError."""
    worker = WorkerConfig()
    if settings.listen is not None:
        cap = None if settings.max_link_mb_s is None else int(settings.max_link_mb_s * 1e6)
        worker = WorkerConfig(
            listen=at_rank(settings.listen, tp_rank),
            key_file=settings.key_file,
            allowed_peers=settings.allowed_peers,
            bulk_port=settings.bulk_port and settings.bulk_port + tp_rank,
            insecure=settings.insecure,
            model=model,
            max_bytes_per_s=cap,
            shared_memory=settings.shared_memory,
        )
    return CacheConfig(
        host_bytes=int(settings.host_gb * GIB),
        ttl_s=settings.ttl_s,
        staging_bytes=int(settings.staging_gb * GIB),
        disk_path=settings.disk_path or "",
        disk_bytes=int(settings.disk_gb * GIB),
        serves=settings.listen is not None,
        worker=worker,
        peers=tuple(at_rank(it, tp_rank) for it in settings.peers),
        peer_keys={at_rank(it, tp_rank): key for it, key in settings.peer_keys.items()},
        peer=PeerConfig(
            key_file=settings.key_file,
            cooldown_s=settings.peer_cooldown_s,
            shared_memory=settings.shared_memory,
        ),
    )


def is_configured(args: Any) -> bool:
    """Whether a server with these resolved arguments uses this package's linker."""
    config = args.unified_cache_external_linker_config
    return (
        args.enable_unified_cache_external_linker
        and args.unified_cache_external_linker_backend == "dynamic"
        and isinstance(config, dict)
        and config.get("linker_module_path") == LINKER_MODULE
    )


def parse_settings(extra: dict[str, Any], where: str = "linker_extra_config") -> Settings:
    """Parse settings. `where` names their file or option in errors. Raises ConfigError with
    `where`, the key and the remedy."""
    settings = _settings(extra, where)
    if settings.config is None:
        return settings
    if len(extra) > 1:
        others = ", ".join(sorted(extra.keys() - {"config"}))
        raise ConfigError(
            f"{where} has config: {settings.config} and also {others}; move them into that file"
        )
    path = Path(settings.config)
    nested = _settings(read_yaml(path, "config") or {}, f"config {path}")
    if nested.config is not None:
        raise ConfigError(f"config {path} names another config {nested.config}; give one file")
    return nested


def _settings(content: Any, where: str) -> Settings:
    if isinstance(content, dict) and "push_to" in content:
        raise ConfigError(
            f"{where}: there is no push_to any more, because workers fetch what they keep; remove "
            "it, set listen, and name that address under cache.keeps in the worker's file"
        )
    settings = settings_of(content, Settings, where)
    if not settings.disk_gb or "host_gb" in content:
        return settings
    # The disk also has all entries of the memory. A smaller disk would keep nothing for longer.
    host_gb = min(settings.host_gb, settings.disk_gb / 2)
    return msgspec.structs.replace(settings, host_gb=host_gb)


def linker_options(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return SGLang's options for a server that uses this package with these settings."""
    return {
        "enable-unified-cache-external-linker": True,
        "unified-cache-external-linker-backend": "dynamic",
        "unified-cache-external-linker-config": {
            "linker": "DroidSpeakLinker",
            "linker_module_path": LINKER_MODULE,
            "linker_extra_config": dict(settings),
        },
    }
