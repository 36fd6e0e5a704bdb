"""The base of every type that is written to disk, and how such a value is hashed."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict


class Frozen(BaseModel):
    """An immutable value with no room for unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    def to_data(self) -> dict[str, Any]:
        """Plain data as it goes into JSON: keys under the names that files use."""
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
    """Give data that JSON can hold: no NaN or infinity, no types of ours, keys that are text."""
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
