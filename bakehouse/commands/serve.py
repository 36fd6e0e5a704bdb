"""The task `serve`: from a recipe to a verified server."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bakehouse import flags
from bakehouse.build.builder import ensure as ensure_build
from bakehouse.build.image import ImageArtifact
from bakehouse.build.image import ensure as ensure_image
from bakehouse.commands.plan import build_lines, serve_lines
from bakehouse.commands.servers import server_name
from bakehouse.context import Context, Outcome
from bakehouse.engines.base import Requirements
from bakehouse.engines.llamacpp.command import Features
from bakehouse.errors import HostError, NotHealthy, UsageError
from bakehouse.lock import Lock
from bakehouse.memory.fit import find_machine
from bakehouse.memory.machines import Machine
from bakehouse.models import digest, not_passed
from bakehouse.patch_review import overrides
from bakehouse.patches import pin as standing
from bakehouse.patches.pin import PatchRisk
from bakehouse.plan.planner import inspect_host, make_plan, provide_toolkit
from bakehouse.plan.types import BuildPlan, ImagePlan, ServePlan
from bakehouse.preflight import rules
from bakehouse.preflight.weights import admit, refuse_by_size
from bakehouse.probe.golden import known_of
from bakehouse.probe.models import Endpoint, Proof, ServedModel
from bakehouse.probe.runner import answer_lines, run_probe
from bakehouse.recipe.loader import LoadedRecipe, find
from bakehouse.recipe.models import MemoryGuard, Recipe
from bakehouse.runs.store import Run
from bakehouse.server.launcher import ServerSpec, SupervisorConnection, refuse_taken
from bakehouse.server.memory_guard import Bounds
from bakehouse.server.session import (
    VerifiedServer,
    check_flags_supported,
    check_gpu_visible,
    identity_digest,
    start_or_reuse,
)
from bakehouse.server.status import get_status
from bakehouse.server.supervisor import Tail
from bakehouse.sources.weights import ensure as ensure_weights
from bakehouse.sources.weights import locate, refuse_offline

TICK_S = 0.2

Asking = Callable[[Endpoint, ServedModel], Proof]
"""Asks a server everything that its recipe's `probe` asks."""


Options = flags.Serve


@dataclass(frozen=True)
class PlannedServer:
    """A planned server, before anything is built or run."""

    loaded: LoadedRecipe
    lock: Lock
    build: BuildPlan | ImagePlan
    plan: ServePlan
    asked: Requirements
    key: str | None
    folder: Path
    """Of the server's state and log."""
    image: ImageArtifact | None = None
    """The verified image, once it is verified."""

    @property
    def recipe(self) -> Recipe:
        """The loaded recipe."""
        return self.loaded.recipe

    def of(self, image: ImageArtifact) -> PlannedServer:
        """Use the id of the verified image: anybody can move the tag of a built one."""
        box, build = self.plan.container, self.build
        if box and isinstance(build, ImagePlan) and build.dockerfile:
            box = box.model_copy(update={"image": image.id})
        plan = self.plan.model_copy(update={"container": box})
        return replace(self, plan=plan, image=image)

    def knowing(self, unsound: Sequence[PatchRisk]) -> PlannedServer:
        """Expect the lost features that patches are known to cause: they are reported only."""
        losses = frozenset(loss for one in unsound for loss in one.losses)
        return replace(self, asked=self.asked.model_copy(update={"known_losses": losses}))


def run(ctx: Context, options: Options) -> Outcome:
    """Build, fetch, launch, prove. Raises every class of `errors`, each with its exit code."""
    asked = overrides.parse_overrides(options)
    path = find(options.recipe, ctx.recipes)
    loaded = rules.load_and_check(path, options.set_, asked.change(ctx))
    recipe = loaded.recipe
    key = api_key(ctx, loaded)
    parse_port(options.port)
    server_name(recipe.name, options.instance)
    if options.watch:
        from bakehouse.commands import watch  # it imports this module, to restart

        if options.foreground:
            raise UsageError("--watch cannot be combined with --foreground",
                             hint="serve it, then: invoke watch --recipe NAME")  # fmt: skip
        watch.parse_flags(watch.Options(recipe=options.recipe, every=options.watch), "--watch")
    if options.dry_run:
        lock = overrides.ensure(ctx, loaded, asked, options.set_, locked=True, fetch=False)
        wanted = plan_server(ctx, loaded, lock, options, key)
        lines = [*build_lines(wanted.build), "", *serve_lines(wanted.plan)]
        return Outcome({"build": wanted.build, "serve": wanted.plan}, "\n".join(lines))
    hidden = [recipe.serve.api_key.env] if recipe.serve.api_key and recipe.serve.api_key.env else []
    with Run.start(ctx, "serve", recipe.name, secrets=[*recipe.secrets, *hidden]) as record:
        if key:
            record.hide(key)
        lock = overrides.ensure(ctx, loaded, asked, options.set_, locked=options.locked)
        record.pin(lock=digest(lock))
        overrides.record_patches(asked, lock, record)
        unsound = _unsound(ctx, lock, recipe.name, record)
        wanted = plan_server(ctx, loaded, lock, options, key).knowing(unsound)
        wanted = prepare(ctx, wanted, options, record)
        ready = bring(
            ctx, wanted, options, record,
            lambda endpoint, known: run_probe(ctx, endpoint, recipe.effective_probe, known=known),
        )  # fmt: skip
        record.fact("loading_seconds", round(ready.loading, 3))
        record.fact("proving_seconds", round(ready.proving, 3))
        record.finish(f"READY at {ready.server.url}: {ready.evidence.summary}")
    outcome = _outcome(ctx, wanted, ready, record.record, [one.line() for one in unsound])
    return _watch(ctx, options, outcome) if options.watch else outcome


def _unsound(ctx: Context, lock: Lock, recipe: str, record: Run) -> tuple[PatchRisk, ...]:
    """Report and record which patches are known to be unsound."""
    found = standing.known_risks(ctx, lock, recipe)
    for one in found:
        ctx.progress.say(one.line())
    if found:
        record.fact("unsound_patches", [
            {"patch": one.patch, "word": one.word, "why": one.why,
             "verdict": one.verdict.to_data() if one.verdict else None}
            for one in found
        ])  # fmt: skip
    return found


def _watch(ctx: Context, options: Options, ready: Outcome) -> Outcome:
    """Watch the new server; a failure of it is this task's failure."""
    from bakehouse.commands import watch

    ctx.progress.say(f"READY   {ready.result['url']}, watched every {options.watch}")
    asked = watch.Options(
        recipe=options.recipe, set_=options.set_, instance=options.instance, every=options.watch,
        patch=options.patch, no_patch=options.no_patch, allow=options.allow,
    )  # fmt: skip
    seen = watch.run(ctx, asked)
    return Outcome(
        {**ready.result, "watch": seen.result}, f"{ready.text}\n{seen.text}", ready.checks,
        error=seen.error,
    )  # fmt: skip


def plan_server(
    ctx: Context, loaded: LoadedRecipe, lock: Lock, options: Options, key: str | None
) -> PlannedServer:
    """Plan build and server, so that errors are found before anything is fetched."""
    here = inspect_host(ctx, loaded.recipe, lock)
    port = parse_port(options.port)
    plan, asked = make_plan(loaded, lock, here, ctx.places, host=options.host or None, port=port)
    folder = ctx.places.servers / server_name(loaded.recipe.name, options.instance)
    return PlannedServer(loaded, lock, plan.build, plan.serve, asked, key, folder)


def prepare(ctx: Context, wanted: PlannedServer, options: Options, record: Run) -> PlannedServer:
    """Fetch and build; return what can be launched. Raises as `run` does.

    What cannot work is refused as early as it is known, since a fetch and a build may take hours.
    A server that runs already is not checked for memory, which would be counted twice.
    """
    plan, build, lock, recipe = wanted.plan, wanted.build, wanted.lock, wanted.recipe
    risk = options.accept_memory_risk
    cuda = build.expected.cuda if isinstance(build, BuildPlan) else None
    on_gpu = cuda or (plan.container and plan.container.gpus)
    gpus = list(ctx.compute_capabilities) if on_gpu else []

    def check_known_bad(types: frozenset[str] = frozenset()) -> None:
        """Refuse or warn about combinations; `types` come from the weights' headers."""
        toolkit = cuda.toolkit.version if cuda else None
        found = rules.known_bad(
            wanted.loaded, lock=lock, toolkit=toolkit, capabilities=gpus, types=types
        )
        rules.note(ctx, wanted.loaded, found, record)

    alive = get_status(wanted.folder).alive
    if not alive:
        refuse_taken(plan.host, plan.port)
    check_known_bad()
    refuse_offline(ctx, lock)
    if not alive and not risk:
        model = locate(ctx.places, wanted.loaded.folder, recipe, lock)["model"]
        refuse_by_size(ctx, recipe, lock, plan.argv, files=model.files)
    weights = ensure_weights(ctx, wanted.loaded, lock)
    if not get_status(wanted.folder).alive:
        files = {role: paths.files for role, paths in weights.items()}
        admission = admit(ctx, recipe, lock, files, plan.argv, risk_accepted=bool(risk))
        record.fact("preflight", [check.to_data() for check in admission.checks])
        record.fact("memory", admission.budget.to_data())
        check_known_bad(admission.types)
        if risk:
            record.fact("memory_risk_accepted", risk)
    if isinstance(build, ImagePlan):
        return wanted.of(ensure_image(ctx, wanted.loaded, lock, build, record))
    provide_toolkit(ctx, recipe, lock)
    ensure_build(ctx, lock, build, record)
    if not get_status(wanted.folder).alive:
        layers = wanted.asked.gpu_layers if isinstance(wanted.asked, Features) else None
        checks = (
            *check_flags_supported(ctx, build, plan, wanted.loaded.origin("serve", "command")),
            *check_gpu_visible(ctx, build, plan, layers),
        )
        record.fact("able", [check.to_data() for check in checks])
        for one in not_passed(checks):
            ctx.progress.say(f"not known before launch: {one.id}: {one.observed}")
    return wanted


def bring(
    ctx: Context, wanted: PlannedServer, options: Options, record: Run, questions: Asking
) -> VerifiedServer:
    """Launch what was prepared, and verify it. Raises as `run` does."""
    serve, image = wanted.recipe.serve, wanted.image
    sizes = [file.size for pin in wanted.lock.weights.values() for file in pin.files]
    spec = ServerSpec(
        plan=wanted.plan,
        asked=wanted.asked,
        folder=wanted.folder,
        cwd=wanted.loaded.folder.absolute(),
        digest=identity_digest(wanted.plan, wanted.build.digest, digest(wanted.lock)),
        engine=wanted.recipe.engine,
        stop_timeout=serve.stop_timeout,
        ready_timeout=serve.ready_timeout,
        stall_timeout=serve.stall_timeout,
        guard=guard_bounds(serve.guard, find_machine(ctx)),
        key=wanted.key,
        image=image.id if image else None,
        version=image.version or None if image else None,
        weights_size=sum(sizes),
        largest_file=max(sizes, default=0),
        foreground=options.foreground,
    )
    known = known_of(wanted.recipe, wanted.lock, wanted.loaded.folder, spec.digest)
    return start_or_reuse(ctx, spec, lambda endpoint: questions(endpoint, known), record)


def guard_bounds(guard: MemoryGuard, machine: Machine) -> Bounds | None:
    """Return the memory guard's limits on a machine; None if the recipe switches it off."""
    if not guard.enabled:
        return None
    usual = Bounds.usual(machine.total, unified=machine.unified)
    return usual.changed(guard.warn, guard.stop, guard.stall, guard.swap)


def parse_port(text: str) -> int | None:
    """Parse --port; None if it is empty. Raises UsageError."""
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and int(text) <= 65535):
        raise UsageError(f"--port takes a number from 0 to 65535, not '{text}'")
    return int(text)


def api_key(ctx: Context, loaded: LoadedRecipe) -> str | None:
    """Read the recipe's API key; None if it has none. Raises HostError."""
    source = loaded.recipe.serve.api_key
    if source is None:
        return None
    if source.env:
        key, where = ctx.environment.get(source.env, "").strip(), f"${source.env}"
    else:
        path = loaded.folder / Path(os.path.expanduser(source.file or ""))
        try:
            key, where = path.read_text().strip(), str(path)
        except (OSError, UnicodeDecodeError) as error:
            raise HostError(
                f"cannot read the API key: {getattr(error, 'strerror', None) or 'not text'}",
                where=str(path), hint="put only the key into that file", id="no-key",
            ) from error  # fmt: skip
    if not key or not key.isprintable() or " " in key or "," in key or key.startswith("#"):
        raise HostError(
            "the API key is empty" if not key else "the API key is not one word", where=where,
            hint="a key is one word without spaces or commas, and does not begin with #",
            id="no-key",
        )  # fmt: skip
    return key


def _outcome(
    ctx: Context, wanted: PlannedServer, ready: VerifiedServer, record: Path, unsound: list[str]
) -> Outcome:
    server, evidence = ready.server, ready.evidence
    stop = f"invoke stop --recipe {wanted.folder.name}"
    how = "proven again" if ready.again else f"loaded in {ready.loading:.1f} s, proven"
    text = [
        *answer_lines(evidence.answers),
        evidence.summary,
        *unsound,
        "",
        f"READY   {server.url}  ({how} in {ready.proving:.1f} s)",
        f"model   {wanted.asked.name}",
        f"record  {record}",
        f"log     {server.log}",
        "stop    Ctrl-C" if ready.connection else f"stop    {stop}",
    ]
    result: dict[str, Any] = {
        "url": server.url, "model": wanted.asked.name, "pid": server.process.pid,
        "again": ready.again, "loading_seconds": round(ready.loading, 3),
        "proving_seconds": round(ready.proving, 3), "record": str(record),
        "log": str(server.log), "stop": stop, "summary": evidence.summary,
        "answers": [a.to_data() for a in evidence.answers],
        "suites": [s.record().to_data() for s in evidence.suites],
        "unsound_patches": unsound,
    }  # fmt: skip
    lines = _stay(ctx, ready.connection) if ready.connection else ()
    return Outcome(result, "\n".join(text), tuple(evidence.checks), lines=lines)


def _stay(ctx: Context, connection: SupervisorConnection) -> Iterator[str]:
    """Show the log until the server ends or we are interrupted, then end it."""
    tail = Tail(connection.folder / "server.log")
    try:
        while connection.poll() is None:
            yield from tail.lines()
            ctx.clock.sleep(TICK_S)
        yield from tail.lines()
        says = (connection.ended or {}).get("says")
    finally:
        connection.close()
    if (connection.ended or {}).get("why") != "stopped":
        raise NotHealthy(f"the server {says}", where=str(connection.folder / "server.log"))
