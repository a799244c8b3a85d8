"""`droidspeak doctor`: check an installation, a configuration, or running servers."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from difflib import get_close_matches
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import Any, Final

import psutil

from cachetree import CacheTreeError, ConfigError, ModelId, read_yaml, settings_of, with_names
from cachetree.checkpoint import (
    NO_ADAPTER,
    acting,
    base_of,
    read_adapter,
    read_shape,
    require_base,
    targets,
)
from cachetree.cli import show
from cachetree.disk import try_directory
from cachetree.transport import (
    Status,
    StatusRequest,
    ask,
    credentials_of,
    is_directory,
    without_password,
)
from sglang_droidspeak.cli.ask import add_key, server_url, state_of
from sglang_droidspeak.cli.serve import as_flags, own_of, server_of
from sglang_droidspeak.cli.terminal import tell
from sglang_droidspeak.fleet.fleet import check_flags
from sglang_droidspeak.request.meta_info import KEY
from sglang_droidspeak.start.config import Settings, cache_config, linker_options, parse_settings
from sglang_droidspeak.verify.check import Check, line

GIB: Final = 1 << 30
PATIENCE_S: Final = 5.0
"""Seconds to wait for a peer's answer."""
_MANY_LAYERS: Final = 1 << 20
"""Number of layers that we assume if it is unknown: more than any model has."""
_WOULD_SHARE: Final = (
    "`droidspeak distill` makes an activated LoRA of it, which does; a LoRA on upper layers only "
    "(PEFT's layers_to_transform) shares the others; `droidspeak profile` measures which layers "
    "this one has to recompute"
)
_START: Final = "start it, or mend its address or keys"
_NOT_USED: Final = "not used, as it did not pass its gate"
_CLOCKS_S: Final = 2.0


def add_parser(commands: Any) -> None:
    doctor = commands.add_parser(
        "doctor",
        help="check an installation, a configuration and running servers",
        description="Check this installation: versions, hooks, plugin and device. With --config, "
        "also check what a server would read at start: settings, profiles, memory, disk, peers "
        "and keys. With --url, also check running servers: backends, clock, memory, disk, keys, "
        "peers, profiles, and whether links are faster than break-even. Each check prints a line. "
        "If something is wrong, the line has the remedy, and the exit status is 1. With --sglang, "
        "only check whether an SGLang has the parts that this package uses, with equal source. "
        "With --adapter, only show the token and the layer from which an adapter's KV differs "
        "from its base's, and whether servers share everything before them without loss. If they "
        "do not, say which adapters would share.",
    )
    doctor.add_argument(
        "--config", type=Path, metavar="FILE", help="file for `sglang.launch_server --config`"
    )
    doctor.add_argument(
        "--url",
        action="append",
        default=[],
        type=server_url,
        metavar="URL",
        help="running SGLang server, such as http://127.0.0.1:30000; may be given several times",
    )
    add_key(doctor)
    doctor.add_argument("--json", action="store_true", help="print one line of JSON")
    doctor.add_argument(
        "--sglang",
        nargs="?",
        const="",
        metavar="FOLDER",
        help="folder that contains the package `sglang`; default: the installed one",
    )
    doctor.add_argument(
        "--adapter", type=Path, metavar="FOLDER", help="folder of a LoRA adapter, as PEFT saves it"
    )
    doctor.add_argument(
        "--model",
        type=Path,
        metavar="FOLDER",
        help="base of --adapter; default: the folder that the adapter's config names",
    )
    doctor.set_defaults(run=_doctor)


def _doctor(args: argparse.Namespace) -> int:
    if args.sglang is not None:
        return _compare(args.sglang)
    if args.adapter is not None:
        checks = [*adapter(args.adapter, args.model)]
        tell(args, checks, map(line, checks))
        return int(not all(it.ok for it in checks))
    checks = [*installation()]
    if args.config is not None:
        checks += configuration(args.config)
    for url in args.url:
        checks += running(url, args.api_key)
    tell(args, checks, map(line, checks))
    return int(not all(it.ok for it in checks))


def _compare(folder: str) -> int:
    from sglang_droidspeak.engine import probe, release

    root = Path(folder) if folder else probe.installed()
    if not (root / "sglang").is_dir():
        raise ConfigError(
            f"{root} has no folder `sglang`; give the folder that a wheel was unpacked into"
        )
    lacking, changed = probe.compare(root)
    for sentence in (*lacking, *changed):
        show(sentence)
    show(
        f"{len(lacking)} missing, {len(changed)} changed since SGLang {release.VERSION}, of "
        f"{len(probe.USED)} functions and classes, and the fields of {len(release.FIELDS)}"
    )
    return int(bool(lacking or changed))


def _check(name: str, ok: bool, text: str, remedy: str = "") -> Check:
    return Check(name=name, ok=ok, found=text, remedy="" if ok else remedy)


def installation() -> Iterator[Check]:
    """Check versions, hooks, plugin and device. Imports torch, and SGLang only in part."""
    import torch

    from sglang_droidspeak.engine import probe, release

    present = version("sglang")
    install = f"pip install sglang=={release.VERSION}"
    yield _check("SGLang", present.split("+")[0] == release.VERSION, present, install)
    moved = sum(map(len, probe.compare(probe.installed())))
    yield _check(
        "hooks",
        not moved,
        f"{moved} of {len(probe.USED)} moved",
        "`droidspeak doctor --sglang` lists them; reinstall SGLang where it was changed",
    )
    plugins = {it.name for it in entry_points(group="sglang.srt.plugins")}
    yield _check(
        "plugin",
        "droidspeak" in plugins,
        f"SGLang sees {', '.join(sorted(plugins)) or 'none'}",
        "install sglang-droidspeak into the environment of SGLang",
    )
    platforms = ", ".join(it.name for it in entry_points(group="sglang.srt.platforms"))
    on_cuda = torch.cuda.is_available()
    device = torch.cuda.get_device_name() if on_cuda else platforms or "none"
    yield _check(
        "device",
        on_cuda or bool(platforms),
        f"{device}, torch {version('torch')}",
        "no accelerator is seen; for a CPU install platforms/torch_cpu of the repository",
    )


def adapter(path: Path, base: Path | None) -> Iterator[Check]:
    """Check the adapter in a PEFT folder, and report what it shares with its base. Without `base`,
    the adapter's config names the base. Raises ConfigError if the folder has no adapter of this
    base."""
    where, ignored = acting(path)
    base = base or base_of(path)
    if base is not None:
        require_base(path, base)
    num_layers = _MANY_LAYERS if base is None else int(read_shape(base)["num_layers"])
    lora = read_adapter(path, num_layers)
    first = lora.first_difference(NO_ADAPTER, num_layers)
    names = ", ".join(targets(path))
    yield _check("adapter", True, f"{where}; changes {names} from layer {first} on")
    yield _check(
        "config",
        not ignored,
        f"SGLang ignores {', '.join(ignored)}" if ignored else "SGLang reads what it says",
        "merge the adapter into its base with PEFT, or train it without",
    )
    yield _check("base", True, "is not here; give --model" if base is None else str(base))
    of_layers = "" if base is None else f" of {num_layers}"
    if lora.invocation:
        shared = "yes: all layers of what comes before the invocation; none is recomputed"
    elif first:
        shared = f"yes: layers below {first}{of_layers}; from layer {first} on all are recomputed"
    else:
        shared = "no: it changes KV from token 0 and layer 0 on"
    yield _check("shares exactly", bool(lora.invocation or first), shared, _WOULD_SHARE)
    if lora.invocation:
        yield _check(
            "server",
            True,
            f"--lora-target-modules {names.replace(',', '')}, not `all`; of "
            "--max-loras-per-batch a slot for each activated adapter and one for the base",
        )


def configuration(path: Path) -> Iterator[Check]:
    """Check a file for `sglang.launch_server --config`. Runs on the server's machine."""
    try:
        options = settings_of(read_yaml(path, "config") or {}, dict[str, Any], f"config {path}")
        extra, flags = _extra_of(options, path), [*as_flags(options)]
        model = options.get("model-path", options.get("model"))
        if not isinstance(model, str):
            raise ConfigError("there is no model-path; add it")
        server = server_of(extra, model, flags)
    except CacheTreeError as exc:
        yield _check("settings", False, str(exc), f"correct {path}")
        return
    adapters = {str(model): folder.name for folder, model in (server.adapters or {}).items()}
    served = options.get("served-model-name", Path(model).name)
    names = adapters | {str(server.identity.model_id): served}
    yield _check("settings", True, with_names(f"model {server.identity.model_id}", names))
    for profile in server.profiles:
        pair = with_names(f"{profile.sender.model_id} to {profile.receiver.model_id}", names)
        said = f"{profile.reason}; {profile.controls or 'no controls were measured'}"
        # A failed profile ends the start if its file is named. In a folder, it is skipped.
        yield _check(f"profile {pair}", True, said if profile.is_usable else f"{_NOT_USED}: {said}")
    settings = server.settings
    yield from _room(settings, server.identity.model_id, own_of(flags).tp)
    for address in settings.peers:
        yield _peer(address, settings)


def _extra_of(options: dict[str, Any], path: Path) -> dict[str, Any]:
    linker = options.get("unified-cache-external-linker-config")
    with contextlib.suppress(TypeError, ValueError):  # A string has JSON.
        linker = json.loads(linker)
    check_flags(str(path), options)
    if not isinstance(linker, dict):
        raise ConfigError(f"{path} does not configure droidspeak; `droidspeak serve` writes it")
    expected = linker_options({})
    known = expected["unified-cache-external-linker-config"]
    for name in [*linker, *known]:
        if name not in known:
            close = get_close_matches(name, known, n=1, cutoff=0)
            raise ConfigError(f"there is no key {name}; did you mean {close[0]}?")
        if name != "linker_extra_config" and linker.get(name) != known[name]:
            raise ConfigError(f"{name} is {linker.get(name)}; did you mean {known[name]}?")
    for name, wanted in expected.items():
        if not isinstance(wanted, dict) and options.get(name) != wanted:
            needed = f"{name}: {json.dumps(wanted)}"
            raise ConfigError(f"there is no {needed}, and SGLang runs without droidspeak; add it")
    return linker.get("linker_extra_config") or {}


def _room(settings: Settings, model: ModelId, ranks: int) -> Iterator[Check]:
    """Check that this machine has the memory and disk that the settings ask for, for all ranks."""
    from profiles.environment import free_memory_bytes

    wanted, free = settings.taken_gb(ranks), free_memory_bytes() / GIB
    sizes = f"{wanted:.1f} GiB are taken at start, {free:.1f} GiB are free"
    yield _check("memory", wanted < free, sizes, "lower host_gb or staging_gb")
    if settings.disk_path is not None:
        try:
            for rank in range(ranks):
                config = cache_config(settings, model, rank)
                try_directory(config.disk_of(rank, ranks).absolute())
        except ConfigError as exc:
            yield _check("disk", False, str(exc), "correct disk_path")
            return
        folder = Path(settings.disk_path).absolute()
        place = next(it for it in (folder, *folder.parents) if it.exists())
        entries = (*folder.glob("entry-*"), *folder.glob("rank*/entry-*"))
        written = sum(it.stat().st_size for it in entries if it.exists()) / GIB
        wanted = max(0.0, ranks * settings.disk_gb - written)
        free = psutil.disk_usage(str(place)).free / GIB
        sizes = f"up to {wanted:.1f} GiB more are written, {free:.1f} GiB are free"
        yield _check("disk", wanted < free, sizes, "lower disk_gb, or make room")


def _peer(address: str, settings: Settings) -> Check:
    """Check a peer: connect to it as the server would."""
    name = f"peer {without_password(address)}"
    if is_directory(address):
        return _check(name, True, "looked into while it runs: see `droidspeak peers`")
    try:
        keys = credentials_of(settings.key_file, settings.peer_keys.get(address))
        status = ask(address, StatusRequest(), Status, timeout_s=PATIENCE_S, credentials=keys)
    except CacheTreeError as exc:
        return _check(name, False, str(exc), _START)
    return _check(name, True, f"serves {status.model or 'many models'}")


def running(url: str, key: str | None) -> Generator[Check, None, dict[str, Any] | None]:
    """Check a server by the state that it reports. Return the state, or None without an answer."""
    try:
        state, off_s = state_of(url, key)
    except CacheTreeError as exc:
        yield _check(url, False, str(exc), "start it, or give its --api-key")
        return None
    yield from _of_state(url, state, off_s)
    return state


def _of_state(url: str, state: Mapping[str, Any], off_s: float) -> Iterator[Check]:
    report = state[KEY]
    names = report["names"]
    yield _check(url, True, f"SGLang serves {state.get('model_path')}")
    linker = state.get("unified_cache_external_linker_config") or {}
    try:
        settings = parse_settings(linker.get("linker_extra_config") or {})
    except CacheTreeError as exc:  # The settings are in a file on the server's machine.
        remedy = "ask where the server runs, in its working directory"
        yield _check("backends, keys", False, f"not known here: {exc}", remedy)
    else:
        attention, storage = state.get("attention_backend"), settings.hicache_backend
        used = f"attention by {attention or 'default'}, storage {storage or 'none'}"
        yield _check("backends", True, used)
        yield from _keys(settings)
    yield _check(
        "clock",
        abs(off_s) < _CLOCKS_S,
        f"{off_s:+.0f} s" if round(off_s) else "well",
        "set it by NTP: logs are compared by it",
    )
    yield room(report)
    for peer in report["peers"]:
        words = ": ".join(
            filter(None, [peer["state"], with_names(peer["model"], names), peer["reason"]])
        )
        yield _check(f"peer {peer['address']}", peer["state"] == "ready", words, _START)
    if report["off"]:
        yield _check("server", False, report["off"])
        return
    if not report["pairs"]:
        none = "none: only caches of this very model are read; `droidspeak profile` makes one"
        yield _check("profiles", True, none)
    read = {it["model"] for it in report["peers"]}
    for pair in report["pairs"]:
        name = with_names(f"profile {pair['sender']} to {pair['receiver']}", names)
        is_note = pair["failed"] and pair["sender"] not in read
        is_note |= pair["heir"] == "too_far"
        said = f"{_NOT_USED}: {pair['reason']}" if pair["failed"] else pair["reason"]
        yield _check(name, pair["usable"] or is_note, said, "see `droidspeak profile show`")
    prices = [it["price"] for it in report["pairs"] if it["usable"] and it["price"]]
    if report["peers"]:
        yield from _links(report["links"], prices)


def room(report: Mapping[str, Any]) -> Check:
    """Check a server's memory and disk, from the server's report about its cache."""
    peers, is_up = [it["address"] for it in report["peers"]], report["health"]["live"]
    degraded = [it for it in report["health"]["degraded"] if not any(at in it for at in peers)]
    wrong = "; ".join([*degraded, *([] if is_up else ["the worker's thread is stuck"])])
    remedy = "make room on a full disk; restart the server if the thread is stuck; see docs/run.md"
    return _check("memory, disk", not wrong, wrong or "well", remedy)


def _keys(settings: Settings) -> Iterator[Check]:
    keys = "sealed" if settings.key_file else "none"
    if settings.listen is not None:
        is_safe = not settings.insecure or settings.key_file is not None
        seal = "give it a key_file and allowed_peers: others may read and change what it sends"
        yield _check("keys", is_safe, f"{keys}, listens at {settings.listen}", seal)


def _links(links: Mapping[str, float], prices: Sequence[Mapping[str, Any]]) -> Iterator[Check]:
    """Check that each recently used link is faster than the break-even of every pair."""
    known = [it for it in map(break_even_byte_s, prices) if it is not None]
    if not known:
        yield _check("break-even", True, "no prefill of such a length was measured yet")
        return
    least = f"break-even {max(known) / 1e9:.3g} GB/s for {prices[0]['num_tokens']:,} tokens"
    for address, byte_s in links.items():
        slow = "take a faster link, a codec, or a profile with a smaller block; see docs/why.md"
        speed = f"{byte_s / 1e9:.3g} GB/s, {least}"
        yield _check(f"link {address}", byte_s > max(known), speed, slow)
    if not links:
        yield _check("break-even", True, f"{least}; no link was used of late")


def break_even_byte_s(price: Mapping[str, Any]) -> float | None:
    """Return the bytes per second of a link at which reuse takes as long as a full prefill
    (docs/why.md). Infinite if no link is fast enough. None while the device's speed is unknown."""
    full_s, block_s = price["full_prefill_s"], price["recompute_s"]
    if full_s is None or block_s is None:
        return None
    if block_s >= full_s:
        return math.inf
    e_bytes, kv_bytes = price["e_bytes"], price["kv_bytes"]
    return max((e_bytes + kv_bytes) / full_s, e_bytes / (full_s - block_s))
