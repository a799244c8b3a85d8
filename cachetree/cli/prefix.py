"""How a command names a prefix: by page hashes, or by the tokens that they come from."""

from __future__ import annotations

import argparse
from pathlib import Path

from cachetree.errors import ConfigError, written
from cachetree.ids import PAGE_HASH_BYTES, PageHash
from cachetree.tree import join_hashes, page_hashes


def add_prefix(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--pages", nargs="+", metavar="HASH", help="page hashes from the first on, hexadecimal"
    )
    command.add_argument(
        "--tokens", type=Path, metavar="FILE", help="token ids of a prompt, between spaces"
    )
    command.add_argument("--page-size", type=int, metavar="N", help="tokens per page of --tokens")
    command.add_argument(
        "--salt", default="", metavar="HEX", help="32 bytes of the tenant that --tokens belong to"
    )


def is_given(args: argparse.Namespace) -> bool:
    return args.pages is not None or args.tokens is not None


def prefix_of(args: argparse.Namespace) -> bytes:
    """The pages side by side; raises ConfigError."""
    if (args.pages is None) == (args.tokens is None):
        raise ConfigError("name a prefix, either by --pages, or by --tokens with --page-size")
    if args.pages is not None:
        return join_hashes([_page(text) for text in args.pages])
    if args.page_size is None or args.page_size <= 0:
        raise ConfigError("--tokens needs --page-size: give that of the family, for example 64")
    try:
        tokens = [int(word) for word in args.tokens.read_text().split()]
        pages = page_hashes(tokens, args.page_size, bytes.fromhex(args.salt))
    except OSError as exc:
        raise ConfigError(
            f"--tokens {written(args.tokens)} cannot be read: {exc.strerror}"
        ) from exc
    except (ValueError, OverflowError) as exc:
        raise ConfigError(
            f"--tokens {args.tokens}, or --salt: {exc}; give integers there, and hex here"
        ) from exc
    if not pages:
        raise ConfigError(
            f"--tokens {args.tokens} has {len(tokens)} tokens, which is less than a page"
        )
    return join_hashes(pages)


def _page(text: str) -> PageHash:
    try:
        page = bytes.fromhex(text)
    except ValueError:
        page = b""
    if len(page) != PAGE_HASH_BYTES:
        raise ConfigError(f"--pages has {text!r}; a page hash is {2 * PAGE_HASH_BYTES} hex digits")
    return PageHash(page)
