"""`cachetree serve` in a process of its own."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys

import msgspec
from transport_parts import FAMILY

COMMAND = ("-m", "cachetree.cli")


@contextlib.contextmanager
def serving(folder, python=COMMAND, **settings):
    """Run `cachetree serve` with a file of these settings until the block ends. The process then
    has to end with status 0. The test may read its output."""
    config = folder / "serve.yaml"
    content = {"family": msgspec.to_builtins(FAMILY), "cache": {"host_bytes": 1 << 20}, **settings}
    config.write_text(json.dumps(content))
    command = [sys.executable, *python, "serve", "--config", str(config)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()
