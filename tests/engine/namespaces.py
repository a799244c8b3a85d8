"""Network namespaces that stand for machines, joined by a bridge.

test ── bridge 10.231.77.1 ──┬── one  10.231.77.2
                             └── two  10.231.77.3
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence

import pytest

_BRIDGE = "dsbr0"
_NETWORK = "10.231.77"


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


class Namespaces:
    """Namespaces that are made on entering and removed on leaving. The test is skipped if the
    system does not allow this."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)

    def address(self, name: str) -> str:
        return f"{_NETWORK}.{2 + self.names.index(name)}"

    def command(self, name: str) -> tuple[str, ...]:
        """Return the words before a command that run it in a namespace."""
        return ("ip", "netns", "exec", f"ds-{name}")

    def cut(self, name: str) -> None:
        """Cut the namespace's cable: nothing arrives, and no side gets an error."""
        _ip("link", "set", self._cable(name), "down")

    def join(self, name: str) -> None:
        _ip("link", "set", self._cable(name), "up")

    def __enter__(self) -> Namespaces:
        if os.geteuid() != 0 or shutil.which("ip") is None:
            pytest.skip("network namespaces need root and the ip command")
        self._remove()
        try:
            _ip("link", "add", _BRIDGE, "type", "bridge")
            _ip("addr", "add", f"{_NETWORK}.1/24", "dev", _BRIDGE)
            _ip("link", "set", _BRIDGE, "up")
            for name in self.names:
                self._add(name)
        except subprocess.CalledProcessError as exc:
            self._remove()
            pytest.skip(f"no network namespaces here: {exc.stderr.strip()}")
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def _add(self, name: str) -> None:
        space, cable = f"ds-{name}", self._cable(name)
        _ip("netns", "add", space)
        _ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", space)
        _ip("link", "set", cable, "master", _BRIDGE, "up")
        _ip("-n", space, "addr", "add", f"{self.address(name)}/24", "dev", "eth0")
        _ip("-n", space, "link", "set", "eth0", "up")
        _ip("-n", space, "link", "set", "lo", "up")

    def _cable(self, name: str) -> str:
        return f"dsv{self.names.index(name)}"

    def _remove(self) -> None:
        commands = [["netns", "del", f"ds-{name}"] for name in self.names]
        commands += [["link", "del", self._cable(name)] for name in self.names]
        for words in (*commands, ["link", "del", _BRIDGE]):
            subprocess.run(["ip", *words], check=False, capture_output=True)
