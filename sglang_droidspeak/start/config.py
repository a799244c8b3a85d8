"""The configuration of one server: what stands under `linker_extra_config`, or in a file it names.

In SGLang's own `--config server.yaml`:

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
"""Of what takes memory, GiB, or a while, seconds."""

_NEEDS = (
    # a setting, the one without which it does nothing, and why
    ("disk_path", "host_gb", "nothing is ever stored"),
    ("shadow_rate", "guard_path", "what it finds would be forgotten at the next start"),
    ("shadow_deadline_s", "guard_path", "no answer is compared"),
    ("shadow_busy_share", "guard_path", "no answer is compared"),
    ("hicache_config", "hicache_backend", "there is no backend to make with it"),
    ("allowed_peers", "listen", "nobody reads from this server"),
    ("bulk_port", "listen", "nobody reads from this server"),
    ("max_link_mb_s", "listen", "nobody reads from this server"),
    ("insecure", "listen", "there is no address to allow"),
)


@dataclass(frozen=True, slots=True)
class MemoryShare:
    """Memory of one rank if the settings do not say: a share of the host's, or the container's.

    It depends on nothing else, so that all processes of a server agree. `HOST` and `STAGING` of
    eight ranks, of any servers on one host, take three quarters of it at most, beside the least.
    """

    divisor: int
    least_gb: float
    most_gb: float

    def of(self, memory_gb: float) -> float:
        """Whole tenths, rounded down."""
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
    """Everything a server can be told. Relative paths are relative to the working directory."""

    config: str | None = None
    """A YAML file with these same keys; no other key may stand beside it."""
    gpu_tested_weights: tuple[Literal["awq", "gptq", "fp8"], ...] = ()
    """Formats of quantised weights, `awq`, `gptq` and `fp8`, with which `make gpu` has passed on
    this device: no CPU runs them, so no other test has. A checkpoint in one that is not named is
    refused."""
    listen: str | None = None
    """Address at which others may read this server's cache, `tcp://host:port`, and workers of their
    own keep copies of it. None serves no other server."""
    peers: tuple[str, ...] = ()
    """Servers whose caches this one may read, `tcp://host:port`, or where they are found:
    `dns://name:port`, all addresses of a name. Each is trusted to have computed what it serves, for
    all tenants."""
    http: str | int | None = None
    """`HOST:PORT` of /metrics and /health of this server's cache; a port alone is for this machine.
    None has neither."""
    profiles: tuple[str, ...] = ()
    """Pair profiles, or folders of them; a file must name this server's model on one side, or an
    adapter on it."""
    e_correction: Literal["none", "profile"] = "profile"
    """`profile` also uses plans that bring the sender's E closer to this model's by a map of the
    profile, which lies beside it (`PAIR.maps.safetensors`), where the profile has some; `none` uses
    no such plan. The same at the senders, which keep E for the plan that is recommended then."""
    capture_layers: tuple[int, ...] | None = None
    """Layers whose E is kept; none takes them from the profiles in which this model sends."""
    gate: Literal["enforce", "none"] = "enforce"
    """`none` lets a request name any block of any sender, profile or not, that the drift guard has
    not taken out of service; for measurements."""
    host_gb: float = msgspec.field(default_factory=HOST)
    """Host memory for this server's own KV and E, GiB for each rank; made, and on CUDA page-locked,
    at start. 0 stores nothing. In a container the default is a share of its limit; with a disk it
    is at most half of `disk_gb`."""
    ttl_s: float | None = None
    """What nobody has used for so long leaves it in any case; none keeps it until room is
    needed."""
    disk_path: str | None = None
    """Folder that keeps the same also when it leaves memory or the server ends; one server at a
    time. Prompts can be read out of KV: folder and files are this user's alone, and one that others
    could read is closed to them."""
    disk_gb: float = 0.0
    """Budget of all files in it, GiB; above `host_gb`, because it holds what memory holds too."""
    hicache_backend: str | None = None
    """Storage backend of SGLang's HiCache that keeps the same for a whole cluster: `file`, `nixl`,
    `mooncake` and others."""
    hicache_config: dict[str, Any] = {}
    """What the backend is made with, as in SGLang's `hicache-storage-backend-extra-config`."""
    codec: Codec = Codec.NONE
    """How KV and E are kept and sent: `int8` and `int4` take fewer bytes and are not exact;
    the same on all that share."""
    staging_gb: float = msgspec.field(default_factory=STAGING)
    """Host memory for fetches in flight, GiB for each rank, made at start too. Of a prefix that
    does not fit only the first pages are fetched. In a container the default is a share of its
    limit."""
    min_tokens: int = 64
    """Shorter reuse is not worth a fetch."""
    max_recompute_tokens: int = 32768
    """Of longer prefixes only so many tokens are reused with layers recomputed."""
    max_stall_ms: float | None = None
    """Longest that recomputed layers and copies to the device may hold up decoding requests in one
    step: less of a prefix is reused, and requests wait for the next step. By default layers and
    copies take their share of the tokens of one step (`chunked-prefill-size`), so that decoding
    requests wait no longer than beside SGLang's own prefill."""
    fetch_deadline_s: float = 10.0
    """After this, at most 60, a fetch is given up and its request does a full prefill. A request
    that names no block gives up sooner: once its fetch is as late as reuse would save."""
    peer_cooldown_s: float = 30.0
    """How long a worker is left alone after three errors within ten seconds; it doubles, up to ten
    times this, each time that the one fetch which then tries it fails."""
    recompute_attention: Literal["server", "flashinfer"] = "server"
    """What layers are recomputed on: `server`, another instance of the attention backend of this
    server's own prefills, or `flashinfer`, one of FlashInfer beside any other. It is made and run
    at start, and its device memory (of FlashInfer 384 MiB to 2 GiB) is left out of the KV pool."""
    forward_wait_s: float = 0.05
    """How much longer a forward waits for layers than they should take at the rate so far; then
    full prefill."""
    ttft_target_ms: float | None = None
    """While no request waits, recompute as many layers as meet this; none recomputes what the
    profile recommends."""
    shadow_rate: float | None = None
    """Share of the requests that reuse another model's KV whose answers the drift guard compares
    with an exact run, 0 to 1; by default 0.05 where there is a `guard_path`."""
    shadow_deadline_s: float = 60.0
    """How long such a comparison waits for its turn; then it is dropped, and counted."""
    shadow_busy_share: float = 0.01
    """Share of all time that comparisons may take beside other requests, 0 to 1; with 0 they run
    only while no request does."""
    guard_path: str | None = None
    """File in which the drift guard keeps what it knows of pairs, this server's alone and this
    user's alone; a pair that is out of service stays so after a restart. None turns it off."""
    max_link_mb_s: float | None = None
    """Cap on what this server sends to those that read its cache, 10^6 bytes per second; none does
    not cap it."""
    shared_memory: bool = True
    """Between servers of one host, pages are copied from memory to memory; elsewhere they always
    come over the connection."""
    key_file: str | None = None
    """This server's secret key file, made by `cachetree keygen`; none encrypts nothing."""
    allowed_peers: tuple[str, ...] = ()
    """Who may read this server's cache, the pages of all its tenants: public keys, files of them,
    folders of `.pub` files."""
    peer_keys: dict[str, str] = {}
    """Address of a peer to its public key, or to the file with it; to the others this server talks
    in clear. Those that are found have to prove the key of where they are found."""
    bulk_port: int = 0
    """Where KV, E and the messages about them go, over a TCP connection that each peer opens after
    its handshake at `listen`, on the same host; 0 takes a free port. A firewall or a container has
    to let both ports through, under the same numbers."""
    insecure: bool = False
    """Allows a `listen` address other than loopback without keys."""

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
            given, other = getattr(self, field), getattr(self, needed)
            if given and given != defaults[field] and not other:
                raise ConfigError(  # Credentials may be in what is given.
                    f"{field} is set and {needed} is {other}, so {why}; set {needed}, or remove "
                    f"{field}"
                )
        if self.key_file is not None and self.listen is None and not self.peer_keys:
            raise ConfigError(
                f"key_file is {self.key_file}, and neither listen nor peer_keys gives it a use; "
                "set peer_keys, or remove key_file"
            )

    def taken_gb(self, tp_size: int) -> float:
        """Host memory of all ranks together, GiB."""
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
    """Where that rank of a server or worker is, whose first is there: so many ports further.

    A free port stays one, and so does what is no address.

    >>> at_rank("tcp://127.0.0.1:7001", 2), at_rank("tcp://127.0.0.1:0", 2), at_rank("disk", 2)
    ('tcp://127.0.0.1:7003', 'tcp://127.0.0.1:0', 'disk')
    """
    host, _, port = location.rpartition(":")
    has_port = location.startswith(("tcp:", "dns:")) and port.isdecimal() and int(port)
    if not tp_rank or not has_port:
        return location
    return f"{host}:{int(port) + tp_rank}"


def cache_config(settings: Settings, model: ModelId, tp_rank: int = 0) -> CacheConfig:
    """What the settings mean for the cache of one rank that runs `model`; raises ConfigError."""
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
    """Settings as they stand in `where`; raises ConfigError naming it, the key and the remedy."""
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
    # A disk holds what memory holds too, so a smaller one would keep nothing for longer.
    host_gb = min(settings.host_gb, settings.disk_gb / 2)
    return msgspec.structs.replace(settings, host_gb=host_gb)


def linker_options(settings: Mapping[str, Any]) -> dict[str, Any]:
    """SGLang's options that have a server use the extension with these settings."""
    return {
        "enable-unified-cache-external-linker": True,
        "unified-cache-external-linker-backend": "dynamic",
        "unified-cache-external-linker-config": {
            "linker": "DroidSpeakLinker",
            "linker_module_path": LINKER_MODULE,
            "linker_extra_config": dict(settings),
        },
    }
