"""`droidspeak`: profile a pair, show what the extension does, start a fleet, name a model."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from cachetree import CacheTreeError, read_yaml
from cachetree.checkpoint import read_model_identity
from profiles import cli as profiler

PAIR = ("sender", "receiver", "profile", "data")
INTERRUPTED = 130


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    with _terminable():
        try:
            return args.run(args)
        except KeyboardInterrupt:
            _complain("interrupted; nothing was left running")
            return INTERRUPTED
        except CacheTreeError as exc:
            _complain(str(exc))
            return 1


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="droidspeak", description=__doc__, allow_abbrev=False)
    top.add_argument(
        "--version",
        action="version",
        version=f"droidspeak {version('sglang-droidspeak')} for SGLang {version('sglang')}",
    )
    commands = top.add_subparsers(dest="command", required=True)
    _add_demo(
        commands.add_parser(
            "demo",
            help="start a sender and a receiver, and measure what reuse costs and saves",
            description="Start two SGLang servers, have one read documents, and have the other "
            "answer questions about them: by full prefill, full reuse, the profile's block, and "
            "the block of all layers. Without a pair it takes the one that is shipped, and times "
            "a randomly initialised pair of 12 layers × 768 on documents of 2,000 tokens; your "
            "own pair is timed on your own documents. Exit status 1 where a check does not hold.",
            allow_abbrev=False,
        )
    )
    identity = commands.add_parser(
        "identity",
        help="print the model id of a checkpoint and what decides it",
        description="The id by which profiles, requests and metrics name a model. It is computed "
        "from the checkpoint's content; its folder's name means nothing.",
        allow_abbrev=False,
    )
    identity.add_argument("path", type=Path, metavar="PATH", help="checkpoint folder")
    identity.add_argument("--adapter", type=Path, metavar="PATH", help="PEFT adapter on it")
    identity.add_argument("--json", action="store_true", help="one line of JSON")
    identity.set_defaults(run=_identity)
    up = commands.add_parser(
        "up",
        help="start the workers and engines of one file, and keep them until Ctrl-C",
        description="Start every worker (`cachetree serve`) and every engine "
        "(`sglang.launch_server`) of a file such as examples/fleet.yaml, wait until all are ready, "
        "say so in a table, and tell when one of them ends. Ctrl-C ends them all.",
        allow_abbrev=False,
    )
    up.add_argument("file", type=Path, metavar="FILE", help="YAML: workers and engines by name")
    up.add_argument(
        "--out", type=Path, default=Path("out/fleet"), metavar="DIR", help="logs and configurations"
    )
    up.add_argument("--device", help="of all engines, in place of what the file says")
    up.set_defaults(run=_up)
    peers = commands.add_parser(
        "peers",
        help="show how the peers of a running server are doing",
        description="Ask a running SGLang server which workers it reads from and how they are "
        "doing. Exit status 1 where one of them is not ready.",
        allow_abbrev=False,
    )
    peers.add_argument("url", metavar="URL", help="of SGLang, such as http://127.0.0.1:30000")
    peers.add_argument("--api-key", metavar="KEY", help="where the server asks for one")
    peers.set_defaults(run=_peers)
    doctor = commands.add_parser(
        "doctor",
        help="say what moved in another SGLang",
        description="Compare what this package hooks, calls and reads of SGLang with the source of "
        "the installed one, or of one that was unpacked into a folder, without running it. Exit "
        "status 1 where something moved.",
        allow_abbrev=False,
    )
    doctor.add_argument(
        "--sglang",
        nargs="?",
        const="",
        required=True,
        metavar="FOLDER",
        help="that holds the package `sglang`; default: the installed one",
    )
    doctor.set_defaults(run=_doctor)
    profiler.add_commands(commands)
    return top


def _add_demo(demo: argparse.ArgumentParser) -> None:
    demo.set_defaults(run=_demo)
    pair = demo.add_argument_group("your own pair (all four, or none)")
    pair.add_argument("--sender", type=Path, metavar="PATH", help="checkpoint that reads first")
    pair.add_argument("--receiver", type=Path, metavar="PATH", help="checkpoint that answers")
    pair.add_argument("--profile", type=Path, metavar="FILE", help="pair profile, JSON")
    pair.add_argument(
        "--data", type=Path, metavar="FILE", help="questions about documents, JSONL as LongBench v1"
    )
    pair.add_argument(
        "--template",
        metavar="TEXT",
        help="prompt with {context} and {input}; default for your own pair: "
        r"'{context}\n\n{input}', with the tokenizer's own special tokens",
    )
    pair.add_argument("--max-new", type=int, metavar="N", help="longest answer")
    measure = demo.add_argument_group("measurement")
    measure.add_argument("--num-questions", type=int, metavar="N", help="only the first N")
    measure.add_argument(
        "--num-documents", type=int, metavar="N", help="documents that are timed; default: 6"
    )
    measure.add_argument("--out", type=Path, default=Path("out/demo"), metavar="DIR")
    servers = demo.add_argument_group("servers")
    servers.add_argument(
        "--device", default="auto", help="as SGLang's; default: an accelerator where there is one"
    )
    servers.add_argument(
        "--dtype",
        choices=["float32", "bfloat16", "float16"],
        help="default: float32 on a CPU, else bfloat16",
    )
    servers.add_argument(
        "--host-gb", type=float, metavar="GIB", help="the sender's host memory for its cache"
    )
    servers.add_argument(
        "--options", type=Path, metavar="FILE", help="YAML with SGLang's options for all servers"
    )


def _demo(args: argparse.Namespace) -> int:
    from rich.console import Console

    from sglang_droidspeak.demo import DemoConfig, DemoFailed, run_demo

    given = [name for name in PAIR if getattr(args, name) is not None]
    if given and len(given) < len(PAIR):
        missing = " and ".join(f"--{name}" for name in PAIR if name not in given)
        _complain(f"--{given[0]} needs {missing} too")
        return 2
    config = DemoConfig()
    if given:
        config = replace(
            config,
            template="{context}\n\n{input}",
            max_new=32,
            random_pair=None,
            options={},
            host_gb=4.0,
        )
    names = (*PAIR, "template", "max_new", "num_questions", "num_documents")
    names += ("out", "device", "dtype", "host_gb")
    chosen = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    try:
        config = replace(config, **chosen)
        if args.options is not None:
            config = replace(config, options={**config.options, **_read_options(args.options)})
        run_demo(config, Console())
    except DemoFailed as exc:
        _complain(str(exc))
        return 1
    return 0


def _read_options(path: Path) -> dict[str, Any]:
    from sglang_droidspeak.demo import DemoFailed

    options = read_yaml(path, "options")
    if not isinstance(options, dict):
        raise DemoFailed(f"options {path} holds no keys; give SGLang's flags as `name: value`")
    return options


def _up(args: argparse.Namespace) -> int:
    from sglang_droidspeak.fleet.fleet import read_fleet, shared_cores, specs
    from sglang_droidspeak.fleet.servers import ServerFailed, running

    options = {} if args.device is None else {"device": args.device}
    wanted = specs(read_fleet(args.file), options)
    _print(f"starting {len(wanted)} processes; their logs are in {args.out}")
    try:
        with running(*wanted, folder=args.out, env=shared_cores(wanted)) as processes:
            for process in processes:
                _print(f"{process.name:20} {process.address}")
            _print("ready; Ctrl-C ends them")
            while processes:
                time.sleep(0.5)
                for process in [it for it in processes if not it.is_alive]:
                    processes.remove(process)
                    _complain(f"{process.name} ended; {process.log} says why")
    except ServerFailed as exc:
        _complain(str(exc))
    return 1


def _peers(args: argparse.Namespace) -> int:
    import requests

    from sglang_droidspeak.start.peers import KEY

    headers = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    try:
        reply = requests.get(f"{args.url.rstrip('/')}/server_info", headers=headers, timeout=10)
        reply.raise_for_status()
        told = reply.json()["internal_states"][0].get(KEY)
    except (requests.RequestException, LookupError, ValueError) as exc:
        _complain(f"{args.url} does not answer as an SGLang server does: {exc}")
        return 1
    if told is None:
        _complain(f"{args.url} runs without droidspeak")
        return 1
    for peer in told["peers"]:
        _print(f"{peer['address']:30} {peer['state']:12} {peer['reason']}".rstrip())
    return int(any(peer["state"] != "ready" for peer in told["peers"]))


def _doctor(args: argparse.Namespace) -> int:
    from sglang_droidspeak.engine import probe, release

    root = Path(args.sglang) if args.sglang else probe.installed()
    if not (root / "sglang").is_dir():
        _complain(f"{root} has no folder `sglang`; give the folder that a wheel was unpacked into")
        return 1
    lacking, changed = list(probe.lacking(root)), list(probe.changed(root))
    for line in (*lacking, *changed):
        _print(line)
    _print(
        f"{len(lacking)} missing, {len(changed)} changed since SGLang {release.VERSION}, of "
        f"{len(release.USED)} functions and classes, and the fields of {len(release.FIELDS)}"
    )
    return int(bool(lacking or changed))


def _identity(args: argparse.Namespace) -> int:
    identity = read_model_identity(args.path, adapter=args.adapter)
    fields = {"model_id": identity.model_id, **msgspec.structs.asdict(identity)}
    if args.json:
        _print(msgspec.json.encode(fields).decode())
    else:
        for name, value in fields.items():
            _print(f"{name:20} {value}")
    return 0


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM end the servers on its way out, as Ctrl-C does."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _print(line: str) -> None:
    print(line, flush=True)  # noqa: T201


def _complain(text: str) -> None:
    print(f"droidspeak: {text}", file=sys.stderr, flush=True)  # noqa: T201


if __name__ == "__main__":
    raise SystemExit(main())
