"""What becomes of the layers of an image that an engine pulls, and which of them stopped coming."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bakehouse.errors import HostError
from bakehouse.ports.docker import OnLayer

DONE = ("Pull complete", "Already exists", "Download complete")
"""What is said of a layer that nothing is waited for."""
COMING = ("Downloading", "Verifying Checksum", "Extracting", "Retrying")


class Layers:
    """The layers of one pull, as the engine tells of them."""

    def __init__(self, on_layer: OnLayer | None) -> None:
        self._on_layer = on_layer
        self._last: dict[str, tuple[str, int, int]] = {}

    def take(self, line: Mapping[str, Any]) -> None:
        """Take one line of progress in, and pass it on."""
        layer, status = line.get("id"), str(line.get("status"))
        if not layer:
            return
        detail = line.get("progressDetail") or {}
        done, total = int(detail.get("current") or 0), int(detail.get("total") or 0)
        if status.startswith("Pulling from"):
            return
        self._last[layer] = (status, done, total)
        if self._on_layer:
            self._on_layer(layer, status, done, total)

    def stalled(self, where: str, seconds: float) -> HostError:
        """Make the error for a pull of which nothing more comes."""
        left = {n: one for n, one in self._last.items() if one[0] not in DONE}
        coming = {n: one for n, one in left.items() if one[0].startswith(COMING)} or left
        named = ", ".join(f"layer {name}{_amount(one)}" for name, one in coming.items())
        held = named or "its manifest, or what the engine does with its layers"
        return HostError(
            f"nothing has come for {seconds:.0f} s of {held}", where=where, id="pull-stalled",
            hint="see the network of the engine's machine, its proxy and the registry; what has "
            "come whole is kept where the engine keeps it, so try again",
        )  # fmt: skip


def _amount(one: tuple[str, int, int]) -> str:
    status, done, total = one
    said = f" ({status.lower()}"
    return said + (f", {done:,} of {total:,} bytes)" if total else ")")
