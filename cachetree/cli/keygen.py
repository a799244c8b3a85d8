"""Command `cachetree keygen`: make the key pair of a server."""

from __future__ import annotations

import argparse
from pathlib import Path

from cachetree.cli.show import show, show_json
from cachetree.transport import write_key_pair


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    keygen = commands.add_parser(
        "keygen",
        help="make the key pair of a server",
        description="Write two files: NAME.key, which the server itself reads (`key_file`), and "
        "NAME.pub, which goes to the servers that it talks to (`allowed_peers`, "
        "`peer_keys`). A server that lists NAME.pub trusts this server with the pages of "
        "all tenants. No file is overwritten.",
    )
    keygen.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="DIR",
        help="folder for the files; made if needed",
    )
    keygen.add_argument(
        "--name", default="cachetree", help="name of the files, and remark behind the key"
    )
    keygen.add_argument("--json", action="store_true", help="print one line of JSON")
    keygen.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    keys, secret_file, public_file = write_key_pair(args.out, args.name)
    if args.json:
        made = {
            "public_key": keys.public,
            "key_file": str(secret_file),
            "public_key_file": str(public_file),
        }
        show_json(made)
        return
    show(keys.public)
    show(f"wrote {secret_file}, which stays here, and {public_file}, which the others need")
