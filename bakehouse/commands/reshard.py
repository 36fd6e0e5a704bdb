"""`reshard`: rewrite a safetensors checkpoint into small shards, verified tensor by tensor."""

from __future__ import annotations

from pathlib import Path

from bakehouse import flags
from bakehouse.context import Context, Outcome
from bakehouse.errors import UsageError
from bakehouse.models import check

Options = flags.Reshard


def run(ctx: Context, options: Options) -> Outcome:
    """Reshard. Raises NotFound, CheckpointError, UsageError, HostError."""
    from bakehouse.checkpoints.reshard import reshard
    from bakehouse.recipe.types import parse_size

    try:
        most = parse_size(options.max_shard)
    except ValueError as error:
        raise UsageError(
            f"--max-shard {options.max_shard}: expected a size with its unit",
            hint="such as 4GB (10^9 bytes each) or 4GiB (2^30)",
        ) from error
    if most < 1:
        raise UsageError("--max-shard must be more than 0", hint="4GB suits most loaders")
    folder, out = Path(options.checkpoint).absolute(), Path(options.out).absolute()
    made = reshard(folder, out, most, ctx.progress)
    shards = made.cut.shards
    largest = max(shards, key=lambda shard: shard.size)
    same = check(
        "reshard-verified",
        "every tensor has the same sha256 in input and output",
        f"{made.verified} tensors are the same",
        str(out),
        ok=made.verified == sum(len(shard.tensors) for shard in shards),
    )
    lines = [
        f"{len(shards)} shards in {out}, the largest {largest.size / 1e9:.2f} GB",
        f"{made.verified} tensors verified by sha256; {len(made.carried)} other files copied",
    ]
    if made.duplicates:
        lines.append(f"{made.duplicates} identical duplicate tensors: kept once")
    if made.cut.oversized:
        many = ", ".join(made.cut.oversized[:3])
        lines.append(f"larger than --max-shard alone, each in a file of its own: {many}")
    result = {
        "out": str(out),
        "shards": [{"name": shard.name, "size": shard.size} for shard in shards],
        "largest": largest.size,
        "tensors": made.verified,
        "carried": list(made.carried),
        "duplicates": made.duplicates,
        "oversized": list(made.cut.oversized),
        "reused": made.reused,
    }
    return Outcome(result, "\n".join(lines), (same,))
