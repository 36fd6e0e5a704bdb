"""The address that a server may listen on."""

from __future__ import annotations

import ipaddress

from bakehouse.errors import UsageError


def bind_address(host: str, *, has_key: bool) -> str:
    """Return the IP address to listen on.

    Raises UsageError for anything else, and for an address other than loopback without API key.
    """
    literal = "127.0.0.1" if host == "localhost" else host.strip("[]")
    try:
        address = ipaddress.ip_address(literal)
    except ValueError:
        raise UsageError(
            f"'{host}' is not an IP address", where="serve.host",
            hint="write one address, such as 127.0.0.1, ::1 or 0.0.0.0", id="bad-host",
        ) from None  # fmt: skip
    if not address.is_loopback and not has_key:
        raise UsageError(
            f"{address} can be reached from other machines, and the recipe sets no API key",
            where="serve.host", id="key-needed",
            hint="set serve.api_key.env (or .file), or listen on 127.0.0.1",
        )  # fmt: skip
    return str(address)
