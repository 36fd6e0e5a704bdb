"""Query a vLLM image's own Python for what it supports; answers are kept by image content."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

from bakehouse.base import to_json
from bakehouse.checks import Check, not_passed
from bakehouse.context import Context
from bakehouse.engines.vllm import question
from bakehouse.engines.vllm.able import (
    ImageCapabilities,
    RequiredCapabilities,
    Unreadable,
    check_image,
    parse,
)
from bakehouse.errors import BuildFailed, HostError
from bakehouse.ports.docker import Answered, ContainerSpec
from bakehouse.redact import clean
from bakehouse.util.files import write_atomic

QUERY_TIMEOUT_S = 300.0
"""Importing vLLM takes about 10 s from a warm disk, and minutes from a cold network disk."""
MAX_ANSWER = 4 * 2**20
"""Bytes."""
QUERY_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
}  # fmt: skip
_SHOWN_LINES = 12


def run_script(
    ctx: Context,
    script: ModuleType,
    image: str,
    arguments: Sequence[str],
    *,
    name: str,
    max_bytes: int,
) -> tuple[Answered, str]:
    """Run a script in an image's Python; return the answer and the sentinel around its document.

    The container has no network and no GPU, and runs as the image's user. Raises BuildFailed for
    an image without python3, HostError.
    """
    sentinel = f"BAKEHOUSE-{secrets.token_hex(16)}"
    spec = ContainerSpec(
        image=image, entrypoint=("python3",), network="none", env=QUERY_ENVIRONMENT,
        argv=("-c", _text(script), sentinel, *arguments),
    )  # fmt: skip
    try:
        return ctx.docker.ask(spec, timeout=QUERY_TIMEOUT_S, max_bytes=max_bytes), sentinel
    except HostError as error:
        if error.id != "image-command":
            raise
        raise BuildFailed(
            "the image has no python3, so it is not a vLLM image", where=name, id="image-silent",
            hint="see image.ref in the recipe",
        ) from None  # fmt: skip


def _text(script: ModuleType) -> str:
    return Path(str(script.__file__)).read_text()


def probe_image(
    ctx: Context, image: str, name: str, architectures: Sequence[str] = ()
) -> tuple[ImageCapabilities, bool]:
    """Return what an image supports, and whether a kept answer was used.

    `image` is its id, which no tag can change; `name` is shown to people. The query imports the
    code of `architectures`.

    Raises BuildFailed (6) for an image that does not answer, HostError for a Docker failure.
    """
    text = "\0".join((_text(question), *sorted(architectures)))
    query = hashlib.sha256(text.encode()).hexdigest()[:16]
    kept = ctx.places.images / f"{image.removeprefix('sha256:')[:64]}-{query}.json"
    try:
        return ImageCapabilities.model_validate_json(kept.read_bytes()), True
    except (OSError, ValueError):
        pass  # no answer yet, or a damaged one: query the image
    ctx.progress.say(f"querying {name} for supported models (may take a minute)")
    answer, sentinel = run_script(
        ctx, question, image, architectures, name=name, max_bytes=MAX_ANSWER
    )
    try:
        found = parse(answer.out, sentinel)
    except Unreadable as error:
        raise _silent(answer, str(error), name) from error
    if found.architectures is not None:  # an import that failed may succeed next time
        write_atomic(kept, to_json(found).encode())
    return found, False


def _silent(answer: Answered, why: str, name: str) -> BuildFailed:
    if answer.timed_out:
        why = f"no answer within {QUERY_TIMEOUT_S:g} s"
    elif answer.oom_killed:
        why = "the kernel's OOM killer stopped it"
    elif answer.code:
        why = f"{why} and ended with {answer.code}"
    lines = [clean(line, one_line=True) for line in answer.err.strip().splitlines()[-_SHOWN_LINES:]]
    return BuildFailed(
        f"the image did not report what it supports: {why}",
        where="\n".join([name, *lines]),
        hint="try its Python by hand: docker run --rm --entrypoint python3 IMAGE -c 'import vllm'",
        id="image-silent",
    )


def require_capabilities(
    found: ImageCapabilities,
    needs: RequiredCapabilities,
    architectures: Mapping[str, Sequence[str]],
    image: str,
) -> tuple[Check, ...]:
    """Check an image's answer. Raises BuildFailed (6) unless it supports all that is needed."""
    checks = check_image(found, needs, architectures, image)
    if missing := not_passed(checks):
        hint = (
            "use an image that has that package, or add it with image.mods"
            if any(why in str(one.observed) for one in missing for why in found.lacking.values())
            else f"use an image with the support, whatever its version (this one is "
            f"{clean(found.version)}): support for a new model is often in a branch's own tag; or "
            "add the branch with image.source"
        )
        lines = "; ".join(f"{one.id}: {one.expected}: {one.observed}" for one in missing)
        raise BuildFailed(
            f"the image does not support what the recipe needs: {missing[0].expected}",
            where=f"{image}\n{lines}",
            hint=hint,
            id="image-unable",
            checks=checks,
        )
    return checks


def summary(found: ImageCapabilities) -> str:
    """Return the versions in an image, as one line."""
    cuda = f"CUDA {found.cuda.version}" if found.cuda.version else "no CUDA"
    parts = [f"vLLM {found.version}", f"torch {found.versions.get('torch', 'unknown')}", cuda,
             f"Python {found.versions.get('python', 'unknown')}"]  # fmt: skip
    return clean(", ".join(parts), one_line=True)


def as_facts(found: ImageCapabilities) -> dict[str, object]:
    """Return what a record keeps: lengths instead of the long tables."""
    data = found.to_data()
    tables = ("architectures", "reasoning_parsers", "tool_parsers", "speculation", "fallbacks")
    counts = {name: len(data.pop(name) or ()) for name in tables}
    return {**data, "counts": counts}
