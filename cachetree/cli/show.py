"""Output of the commands, for people and for programs."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from cachetree.errors import CacheTreeError, printable


def escape_output() -> None:
    """Let standard output print escapes for characters that its encoding lacks, instead of raising
    UnicodeEncodeError."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def status_of(program: str, run: Callable[[], int | None]) -> int:
    """Run a command and return its exit status. Print an expected error in one line."""
    try:
        return run() or 0
    except BrokenPipeError:  # The reader of this output has closed it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        complain(program, "interrupted")
        return 130
    except (CacheTreeError, OSError) as exc:
        complain(program, exc)
        return 1


def complain(program: str, what: object) -> None:
    """Print one line on standard error."""
    line = printable(str(what))
    print(f"{program}: {line}", file=sys.stderr, flush=True)  # noqa: T201


def show(line: str) -> None:
    print(line, flush=True)  # noqa: T201


def show_json(value: object) -> None:
    """Print a value as one line of JSON."""
    show(msgspec.json.encode(value).decode())


def show_fields(value: msgspec.Struct) -> None:
    """Print one line per field. A dict becomes indented lines, a list of structs a table."""
    for line in _lines(msgspec.to_builtins(value)):
        show(printable(line))


def _lines(fields: Mapping[str, Any]) -> Iterator[str]:
    for name, content in fields.items():
        words = name.removeprefix("num_").replace("_", " ")
        match content:
            case dict() if content:
                yield words
                yield from (f"  {line}" for line in _lines(content))
            case [dict(), *_] as rows:
                yield words
                yield from (f"  {line}" for line in _table(rows))
            case _ if name != "type":
                yield f"{words:22} {_text(name, content)}"


def _table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    columns = list(rows[0])
    cells = [columns, *([_text(name, row[name]) for name in columns] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        yield "  ".join(map(str.ljust, row, widths)).rstrip()


def _text(name: str, content: Any) -> str:
    match content:
        case dict() if content:
            return " ".join(f"{key}:{value}" for key, value in content.items())
        case bool():
            return "yes" if content else "no"
        case None | "" | [] | {}:
            return "none"
        case [*parts]:
            return ", ".join(map(str, parts))
        case int() if name.endswith("bytes"):
            return _size(content)
    return str(content)


def _size(num_bytes: int) -> str:
    power = min(3, max(0, num_bytes.bit_length() - 1) // 10)
    size = num_bytes / (1 << 10 * power)
    return f"{size:.1f} {('bytes', 'KiB', 'MiB', 'GiB')[power]}" if power else f"{num_bytes} bytes"
