"""How a container came to its end, told apart by what the engine says of it. Pure."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from bakehouse.ports.docker import ContainerFacts, Happening
from bakehouse.serve.state import LOST

DEADLY = frozenset({2, 3, 6, 9, 15})
SOON_S = 60.0
"""An end so soon after such a signal, in seconds, is taken for its effect."""


@dataclass(frozen=True)
class Seen:
    """What is known once a container that was followed has ended."""

    facts: ContainerFacts | None
    befell: tuple[Happening, ...]
    gone: bool
    """Whether the engine no longer has it; without facts otherwise, the engine did not answer."""
    started: str
    """When the run that was followed began, as the engine writes it."""
    told: bool
    """Whether we were told to stop it."""
    cut: bool
    """Whether the engine went away meanwhile: it remembers nothing of before then."""
    lost: str | None
    """Why the engine could not be asked."""

    def verdict(self) -> tuple[int, str]:
        """Give the exit status, and what to say of the container."""
        facts = self.facts
        if self.gone or (facts and facts.state == "removing"):
            return 137, "was removed by somebody else (docker rm)"
        if facts is None:
            return 1, f"{LOST}: {self.lost}"
        if facts.running or (self.started and facts.started != self.started):
            return 1, "was restarted by somebody else: what runs now was never proven"
        code = facts.exit_code or 0
        if facts.oom_killed:
            return code or 137, "was ended by the kernel: the memory of its limit had run out"
        return code, (None if self.told else self._others(code)) or self._itself(code)

    def _others(self, code: int) -> str | None:
        if by := by_others(self.befell):
            return by
        return f"ended with {code} while the Docker Engine was away or restarted" * self.cut

    def _itself(self, code: int) -> str:
        if code <= 128:
            return f"exited by itself with {code}"
        by = "" if self.told else ": somebody ended it" * (code in (137, 143))
        return f"died of {_signal_name(code - 128)}{by}"


def by_others(befell: tuple[Happening, ...]) -> str | None:
    """Say who ended a container through the engine; None where nobody did.

    A signal counts where it ends processes and the end came soon after it.
    """
    if any(one.what == "stop" for one in befell):
        return "was stopped by somebody else (docker stop)"
    deaths = [one.at for one in befell if one.what == "die"]
    ended = deaths[-1] if deaths else float("inf")
    for one in reversed(befell):
        deadly = one.what == "kill" and one.signal in DEADLY
        if deadly and one.at <= ended and ended - one.at < SOON_S:
            return f"was killed by somebody else (docker kill, {_signal_name(one.signal or 0)})"
    return None


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
