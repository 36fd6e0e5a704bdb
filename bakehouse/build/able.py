"""A vLLM image asked by its own Python what it supports; answers are kept by content."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path

from bakehouse.base import to_json
from bakehouse.checks import Check, not_passed
from bakehouse.context import Context
from bakehouse.engines.vllm import question
from bakehouse.engines.vllm.able import Able, Unreadable, judge, parse
from bakehouse.errors import BuildFailed, HostError
from bakehouse.plan.types import Asks
from bakehouse.ports.docker import Answered, ContainerSpec
from bakehouse.redact import clean
from bakehouse.util.files import write_atomic

TIMEOUT_S = 300.0
"""Importing vLLM takes about 10 s from a warm disk, and minutes from a cold network disk."""
MAX_ANSWER = 4 * 2**20
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
}  # fmt: skip
SHOWN_LINES = 12


def question_spec(image: str, sentinel: str, names: Sequence[str] = ()) -> ContainerSpec:
    """The container that answers: entrypoint overridden, no network, no GPU, the image's user."""
    return ContainerSpec(
        image=image,
        entrypoint=("python3",),
        argv=("-c", Path(question.__file__).read_text(), sentinel, *names),
        network="none",
        env=ENVIRONMENT,
    )


def ask_python(ctx: Context, spec: ContainerSpec, name: str, *, max_bytes: int) -> Answered:
    """Ask an image's Python. Raises BuildFailed where it has none, HostError."""
    try:
        return ctx.docker.ask(spec, timeout=TIMEOUT_S, max_bytes=max_bytes)
    except HostError as error:
        if error.id != "image-command":
            raise
        raise BuildFailed(
            "the image has no python3, so it is no vLLM image", where=name, id="image-silent",
            hint="see image.ref in the recipe",
        ) from None  # fmt: skip


def ask_able(ctx: Context, image: str, name: str, names: Sequence[str] = ()) -> tuple[Able, bool]:
    """What an image is able of, and whether that was known already.

    `image` is its id, which no tag can move away from; people are told its `name`. `names` are the
    architectures whose code has to be there.

    Raises BuildFailed (6) for an image that does not answer, HostError for an engine that cannot.
    """
    text = "\0".join((Path(question.__file__).read_text(), *sorted(names)))
    asked = hashlib.sha256(text.encode()).hexdigest()[:16]
    kept = ctx.places.images / f"{image.removeprefix('sha256:')[:64]}-{asked}.json"
    try:
        return Able.model_validate_json(kept.read_bytes()), True
    except (OSError, ValueError):
        pass  # not asked yet, or damaged: it is asked
    ctx.progress.say(f"asking {name} what it supports, which takes its Python a while")
    sentinel = f"BAKEHOUSE-{secrets.token_hex(16)}"
    said = ask_python(ctx, question_spec(image, sentinel, names), name, max_bytes=MAX_ANSWER)
    able = _read(said, sentinel, name)
    if able.architectures is not None:  # what failed once may go another time
        write_atomic(kept, to_json(able).encode())
    return able, False


def _read(said: Answered, sentinel: str, image: str) -> Able:
    try:
        return parse(said.out, sentinel)
    except Unreadable as error:
        why = str(error)
    if said.timed_out:
        why = f"it did not answer within {TIMEOUT_S:g} s"
    elif said.oom_killed:
        why = "the kernel's OOM killer ended it"
    elif said.code:
        why = f"{why} and ended with {said.code}"
    lines = [clean(line, one_line=True) for line in said.err.strip().splitlines()[-SHOWN_LINES:]]
    raise BuildFailed(
        f"the image could not be asked what it supports: {why}",
        where="\n".join([image, *lines]),
        hint="try its Python by hand: docker run --rm --entrypoint python3 IMAGE -c 'import vllm'",
        id="image-silent",
    )


def require_able(
    able: Able, asks: Asks, architectures: Mapping[str, Sequence[str]], image: str
) -> tuple[Check, ...]:
    """Judge an answer; raise BuildFailed (6) unless everything that is needed is there."""
    checks = judge(able, asks, architectures, image)
    if missing := not_passed(checks):
        first = missing[0]
        hint = (
            "take an image that has that package too, or add it with image.mods"
            if any(why in str(one.observed) for one in missing for why in able.lacking.values())
            else f"take an image that carries the support, whatever its version (this one claims "
            f"{clean(able.claimed)}): support for a new model is often in a branch's own tag; or "
            "lay the branch over it with image.source"
        )
        wanted = "; ".join(f"{one.id}: {one.expected}: {one.observed}" for one in missing)
        raise BuildFailed(
            f"the image lacks what the recipe needs: {first.expected}",
            where=f"{image}\n{wanted}",
            hint=hint,
            id="image-unable",
            checks=checks,
        )
    return checks


def summary(able: Able) -> str:
    """What an image is, in a line."""
    cuda = f"CUDA {able.cuda.version}" if able.cuda.version else "no CUDA"
    parts = [f"vLLM {able.claimed}", f"torch {able.versions.get('torch', 'unknown')}", cuda,
             f"Python {able.versions.get('python', 'unknown')}"]  # fmt: skip
    return clean(", ".join(parts), one_line=True)


def as_facts(able: Able) -> dict[str, object]:
    """What a record keeps: all but the long tables."""
    data = able.to_data()
    tables = ("architectures", "reasoning_parsers", "tool_parsers", "speculation", "fallbacks")
    counts = {name: len(data.pop(name) or ()) for name in tables}
    return json.loads(json.dumps({**data, "counts": counts}))  # type: ignore[no-any-return]
