"""Base class of types that are written to disk, their JSON and their digest."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict


class Frozen(BaseModel):
    """An immutable value that refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    def to_data(self) -> dict[str, Any]:
        """Plain data for JSON, with the key names that files use."""
        return self.model_dump(mode="json", by_alias=True)


def to_json(data: Any) -> str:
    """Render JSON for people and for git: sorted keys, two spaces, UTF-8, one final newline."""
    if isinstance(data, Frozen):
        data = data.to_data()
    return json.dumps(data, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def digest(data: Any) -> str:
    """Give the sha256, in hex, of a value's canonical JSON (sorted keys, no spaces, ASCII)."""
    if isinstance(data, Frozen):
        data = data.to_data()
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def plain(value: Any) -> Any:
    """Convert to data that JSON can hold: no NaN or infinity, only plain types, keys as text."""
    if hasattr(value, "to_data"):
        return plain(value.to_data())
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, str | int | float | bool):
        return value
    return str(value)
