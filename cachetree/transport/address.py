"""Addresses of servers: parse them, look up their names, and open their ports."""

from __future__ import annotations

import ipaddress
import re
import socket
from dataclasses import dataclass
from urllib.parse import urlsplit

from cachetree.errors import ConfigError, FetchError

_EXAMPLE = "write it as tcp://HOST:PORT, for example tcp://127.0.0.1:7788"


@dataclass(frozen=True, slots=True)
class Address:
    """A TCP endpoint. `*` as host means every interface."""

    host: str
    port: int
    scheme: str = "tcp"

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if self.is_ipv6 else self.host
        return f"{self.scheme}://{host}:{self.port}"

    @property
    def is_ipv6(self) -> bool:
        return ":" in self.host

    @property
    def is_everywhere(self) -> bool:
        """Whether the host means every interface of a machine. A server can listen at such an
        address, but no client can connect to it."""
        return self.host in ("*", "0.0.0.0", "::")

    @property
    def is_loopback(self) -> bool:
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def without_password(text: str) -> str:
    """Return a URL, or a text with a URL, without user and password."""
    return re.sub("(?s)(/+).*@", r"\1", text)


def resolved(address: Address) -> Address:
    """Return the address with an IP address as host. Blocks for the look-up. Raises FetchError."""
    try:
        infos = socket.getaddrinfo(address.host, address.port, socket.AF_UNSPEC, socket.SOCK_STREAM)
    except OSError as exc:
        raise FetchError(f"{address.url} cannot be reached: {exc.strerror}") from exc
    # A worker that listens at 0.0.0.0 has only IPv4 addresses.
    *_, (host, *_) = min(infos, key=lambda it: it[0] != socket.AF_INET)
    return Address(str(host), address.port)


def open_port(address: Address, *, field: str, backlog: int = 1) -> socket.socket:
    """Open a socket that listens at `address`. At `[::]` it also accepts IPv4, as ZMQ does. Raises
    ConfigError, which names `field`, if the address cannot be bound."""
    at = "" if address.host == "*" else address.host, address.port
    family = socket.AF_INET6 if address.is_ipv6 else socket.AF_INET
    is_both = address.host == "::" and socket.has_dualstack_ipv6()
    try:
        return socket.create_server(at, family=family, backlog=backlog, dualstack_ipv6=is_both)
    except OSError as exc:
        raise cannot_bind(field, address, exc.strerror) from exc


def cannot_bind(field: str, address: Address, why: str | None) -> ConfigError:
    return ConfigError(
        f"{field} is {address.url!r}, which cannot be bound ({why}); choose another port, or port "
        "0 for a free one"
    )


def parse_address(value: str, *, field: str) -> Address:
    """Parse `tcp://HOST:PORT`, the value of the setting `field`. Raises ConfigError."""
    is_tcp = value.startswith("tcp:")
    shown = value if is_tcp else without_password(value)
    try:
        parts = urlsplit(value)
        host, port = parts.hostname, parts.port
        (host or "").encode("idna")  # The look-up encodes it in the same way.
    except ValueError as exc:
        # For other URLs the error of urlsplit may show a part of a password.
        why = f": {exc}" if is_tcp else ", which is not an address"
        raise ConfigError(f"{field} is {shown!r}{why}; {_EXAMPLE}") from None
    has_more = parts.path or parts.query or parts.fragment or "@" in parts.netloc
    if parts.scheme != "tcp" or not host or port is None or has_more:
        raise ConfigError(f"{field} is {shown!r}, which is not an address; {_EXAMPLE}")
    return Address("127.0.0.1" if host == "localhost" else host, port)


def parse_remote(value: str, *, field: str) -> Address:
    """Parse the address of one worker to connect to. Raises ConfigError."""
    address = parse_address(value, field=field)
    if address.port == 0 or address.host == "*":
        raise ConfigError(f"{field} is {value!r}, which names no single worker; {_EXAMPLE}")
    return address


def parse_listen(value: str, *, field: str, insecure: bool, key_file: str | None = None) -> Address:
    """Parse the address at which a worker listens; port 0 takes a free port.

    Raises ConfigError if other machines can reach the address, and there is neither a key nor
    `insecure`.
    """
    address = parse_address(value, field=field)
    if not (address.is_loopback or key_file or insecure):
        raise ConfigError(
            f"{field} is {value!r}, which other machines can reach, and nothing would be "
            "encrypted or authenticated; set key_file and allowed_peers (`cachetree keygen` makes "
            "keys), use a loopback address such as tcp://127.0.0.1:0, or set insecure: true on a "
            "network that you trust"
        )
    return address


def parse_http(value: str | int) -> Address:
    """Parse the setting `http`: `HOST:PORT`, or `PORT` for this machine only. Raises
    ConfigError."""
    host, _, port = str(value).rpartition(":")
    if not port.isdecimal() or int(port) > 65535:
        raise ConfigError(
            f"http is {value!r}; write HOST:PORT, for example 127.0.0.1:9464, which only this "
            "machine can reach"
        )
    return Address(host.strip("[]") or "127.0.0.1", int(port), "http")
