"""Who listens where, from /proc: what a port is taken by, and whose socket answers.

Parsing is pure; `/proc/net/tcp` and `tcp6` print addresses as host-order 32-bit words in hex.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import re
import socket
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from bakehouse.errors import HostError
from bakehouse.redact import clean
from bakehouse.serve.processes import command_of

LISTEN = "0A"
_SOCKET = re.compile(r"socket:\[(\d+)\]")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True)
class Listener:
    """A listening TCP socket."""

    address: Address
    port: int
    inode: int

    def __str__(self) -> str:
        """As in a URL."""
        host = f"[{self.address}]" if self.address.version == 6 else str(self.address)
        return f"{host}:{self.port}"


def parse(table: str) -> tuple[Listener, ...]:
    """Read the listening sockets of one table; lines of another form are passed over."""
    found: list[Listener] = []
    for line in table.splitlines()[1:]:
        fields = line.split()
        if len(fields) < 10 or fields[3] != LISTEN:
            continue
        address, _, port = fields[1].partition(":")
        try:
            found.append(Listener(_address(address), int(port, 16), int(fields[9])))
        except ValueError:
            continue
    return tuple(found)


def _address(text: str) -> Address:
    words = [int(text[at : at + 8], 16) for at in range(0, len(text), 8)]
    raw = b"".join(word.to_bytes(4, sys.byteorder) for word in words)
    return ipaddress.ip_address(raw)


def listeners(net: Path = Path("/proc/net")) -> tuple[Listener, ...]:
    """Give all listening sockets of this network namespace."""
    found: tuple[Listener, ...] = ()
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            found += parse((net / name).read_text())
    return found


def overlapping(found: Iterable[Listener], host: str, port: int) -> tuple[Listener, ...]:
    """Those that a new listener at host and port may collide with.

    The same address does; so does any address of the same family on either side, and the IPv6
    any-address with IPv4, which it takes in unless it was told not to.
    """
    wanted = ipaddress.ip_address(host)
    return tuple(one for one in found if one.port == port and _meet(one.address, wanted))


def _meet(one: Address, other: Address) -> bool:
    one, other = _plain(one), _plain(other)
    if one.version != other.version:
        six = one if one.version == 6 else other
        return six.is_unspecified
    return one == other or one.is_unspecified or other.is_unspecified


def _plain(address: Address) -> Address:
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def sockets(pids: Iterable[int]) -> dict[int, int]:
    """Socket inode to process id, of all sockets that these processes hold and we may see."""
    found: dict[int, int] = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            for entry in os.scandir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    if held := _SOCKET.fullmatch(os.readlink(entry.path)):
                        found.setdefault(int(held[1]), pid)
    return found


def owned(pids: Iterable[int]) -> tuple[Listener, ...]:
    """Give the listening sockets that one of these processes holds."""
    mine = sockets(pids)
    return tuple(one for one in listeners() if one.inode in mine)


def holder(inodes: Iterable[int]) -> tuple[int, tuple[str, ...]] | None:
    """Give id and command of a process that holds one of the sockets; None where hidden."""
    wanted = set(inodes)
    pids = (int(name) for name in os.listdir("/proc") if name.isdigit())
    for pid in pids:
        if wanted & sockets([pid]).keys():
            return pid, command_of(pid)
    return None


def refuse_taken(host: str, port: int) -> None:
    """Raise HostError, naming the holder, where nothing can listen at host and port. 0 is free."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((host, port))
        except OSError as error:
            raise _refusal(host, port, error) from error


def _refusal(host: str, port: int, error: OSError) -> HostError:
    place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    if error.errno == errno.EADDRNOTAVAIL:
        return HostError(
            f"this machine has no address {host}", where="serve.host", id="no-such-address",
            hint="give an address of this machine, 127.0.0.1 or 0.0.0.0",
        )  # fmt: skip
    if error.errno == errno.EACCES:
        return HostError(
            f"port {port} may not be used without root", where="serve.port", id="port-forbidden",
            hint="choose a port from 1024 on",
        )  # fmt: skip
    if error.errno != errno.EADDRINUSE:
        return HostError(f"cannot listen at {place}: {error.strerror}", id="cannot-listen")
    met = overlapping(listeners(), host, port)
    found = holder(one.inode for one in met)
    who = "a process that this user may not see"
    if found:
        pid, command = found
        who = f"process {pid}: {clean(' '.join(command), one_line=True)[:200]}"
    return HostError(
        f"port {port} is taken", where=f"{', '.join(map(str, met)) or place}, held by {who}",
        hint="stop that process, or serve elsewhere: --port N, or --port 0 for any free one",
        id="port-taken",
    )  # fmt: skip
