"""Flags of a command against a server's own --help: removed, misspelled, or a text cut short."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bakehouse.context import Context
from bakehouse.cuda.toolkit import Requested, Toolkit
from bakehouse.engines.base import CudaExpected
from bakehouse.engines.llamacpp.command import check_flags, parse_help
from bakehouse.errors import HostError, RecipeError
from bakehouse.models import Verdict
from bakehouse.plan.types import BuildPlan, ServePlan
from bakehouse.recipe.types import Origin
from bakehouse.server.session import ask_help, check_flags_supported, check_gpu_visible
from bakehouse.system.process import Captured
from tests.support.small_engine import small_plan

TEXT = """\
----- common params -----

-h,    --help, --usage                  print usage and exit
-c,    --ctx-size N                     size of the prompt context (default: 0, 0 = from model)
                                        (env: LLAMA_ARG_CTX_SIZE)
-m,    --model FNAME                    model path to load
-ot,   --override-tensor <tensor name pattern>=<buffer type>,...
                                        override tensor buffer type
-kvo,  --kv-offload, -nkvo, --no-kv-offload
                                        whether to enable KV cache offloading (default: enabled)
--control-vector-layer-range START END
                                        layer range to apply the control vector(s) to, start and end
                                        inclusive


----- speculative params -----

--spec-draft-n-max N                    number of tokens to draft (default: 16)
--draft, --draft-n, --draft-max N       the argument has been removed. use --spec-draft-n-max or
                                        --spec-ngram-mod-n-max
                                        (env: LLAMA_ARG_DRAFT_MAX)


----- example-specific params -----

--metrics                               enable prometheus compatible metrics endpoint
--chat-template JINJA_TEMPLATE          set custom jinja chat template
--spec-default                          enable default speculative decoding config
"""
HELP = parse_help(TEXT)


def verdicts(*arguments: str, text: str = TEXT) -> dict[str, tuple[Verdict, str]]:
    checks = check_flags(("server", *arguments), parse_help(text), "server --help")
    return {c.id: (c.verdict, c.observed) for c in checks}


def test_help_entries_of_every_form() -> None:
    assert HELP.complete
    assert HELP.entries["--usage"].values == 0
    assert HELP.entries["-m"].flags == ("-m", "--model")
    assert HELP.entries["--override-tensor"].values == 1
    assert HELP.entries["--no-kv-offload"].flags[0] == "-kvo"
    assert HELP.entries["--control-vector-layer-range"].values == 2
    assert HELP.entries["--draft-n"].removed == "use --spec-draft-n-max or --spec-ngram-mod-n-max"
    assert HELP.entries["--metrics"].removed is None


def test_help_check_passes_known_flags_with_any_values() -> None:
    found = verdicts(
        "-m", "-odd-name.gguf", "--ctx_size", "-1", "--chat-template", "--draft-max",
        "--control-vector-layer-range", "-1", "-x", "-ot", "a=CPU", "--metrics", "-2",
    )  # fmt: skip
    assert list(found) == ["flags"]
    assert found["flags"][0] is Verdict.PASSED


def test_help_check_fails_for_a_removed_flag() -> None:
    verdict, observed = verdicts("--draft-max", "3")["flag.draft-max"]
    assert verdict is Verdict.FAILED
    assert observed.endswith("has been removed: use --spec-draft-n-max or --spec-ngram-mod-n-max")


def test_help_check_suggests_the_nearest_flag() -> None:
    verdict, observed = verdicts("--draft-n-max", "2")["flag.draft-n-max"]
    assert verdict is Verdict.FAILED
    assert observed == "unknown flag --draft-n-max (did you mean --spec-draft-n-max?)"
    assert "next argument, --ctx-size 4" in verdicts("--ctx-size=4")["flag.ctx-size"][1]


def test_help_that_stops_early_does_not_prove_a_flag_missing() -> None:
    for cut in (len(TEXT) - 1, TEXT.index("--metrics"), TEXT.index("-kvo"), 0):
        text = TEXT[:cut]
        found = verdicts("--nowhere", "--draft-max", text=text)
        assert found["flag.nowhere"][0] is Verdict.UNKNOWN
        assert "stopped before its end" in found["flag.nowhere"][1]
        removed = "the argument has been removed" in text
        expected = Verdict.FAILED if removed else Verdict.UNKNOWN
        assert found["flag.draft-max"][0] is expected


class Server:
    """A server that answers --help; fails where it is not asked without a GPU."""

    def __init__(self, out: str, code: int = 0) -> None:
        self.out, self.code, self.asked = out, code, 0

    def capture(self, argv: tuple[str, ...], **how: object) -> Captured:
        self.asked += 1
        env = how["env"]
        assert isinstance(env, dict)
        assert env["CUDA_VISIBLE_DEVICES"] == "-1"
        return Captured(argv, self.code, self.out, "")


def test_help_is_cached_only_if_complete(tmp_path: Path, context: Context) -> None:
    kept = tmp_path / "x" / "help.txt"
    cut = Server(TEXT[:300])
    assert not ask_help(replace(context, processes=cut), "s", kept).complete  # type: ignore[arg-type]
    assert not kept.exists()
    died = Server(TEXT, code=134)
    assert not ask_help(replace(context, processes=died), "s", kept).complete  # type: ignore[arg-type]
    whole = Server(TEXT)
    for _ in range(2):
        assert ask_help(replace(context, processes=whole), "s", kept).complete  # type: ignore[arg-type]
    assert whole.asked == 1
    kept.write_text(TEXT[:300])
    assert ask_help(replace(context, processes=whole), "s", kept).complete  # type: ignore[arg-type]
    assert whole.asked == 2


def test_help_check_reports_a_wrong_flag_at_the_command(tmp_path: Path, context: Context) -> None:
    build = small_plan(context)
    argv = ("numactl", "--interleave", "all", build.server, "-m", "x", "--draft-max", "3")
    plan = ServePlan(
        name="r", argv=argv, late=(), env={}, host="127.0.0.1", port=0, expects=(), suites=()
    )
    ctx = replace(context, processes=Server(TEXT))  # type: ignore[arg-type]
    with pytest.raises(RecipeError, match="does not support the command") as error:
        check_flags_supported(ctx, build, plan, Origin("r.yaml", 9, 3))
    assert str(error.value.faults[0]).startswith("r.yaml:9:3: serve.command: --draft-max has been")
    assert len(error.value.faults) == 1
    assert error.value.exit_code == 2


def device_plan(context: Context) -> tuple[BuildPlan, ServePlan]:
    """A build with CUDA expected of it, and a server of it."""
    build = small_plan(context)
    toolkit = Toolkit(root="/t", version="13.0.88", nvcc="/t/n", include="/t/i", library="/t/l")
    requested = Requested(version="13.0", architectures=("90-real",))
    cuda = CudaExpected(toolkit=toolkit, requested=requested)
    build = build.model_copy(update={"expected": build.expected.model_copy(update={"cuda": cuda})})
    plan = ServePlan(
        name="r", argv=(build.server,), env={}, host="127.0.0.1", port=0, expects=(), suites=()
    )
    return build, plan


@pytest.mark.parametrize(
    ("listed", "gpus", "verdict"),
    [
        ("Available devices:\n  (none)\n", "", "(none)"),
        ("", "0, NVIDIA H200, 9.0, 580.1, [N/A], [N/A]\n", "(none)"),
        (
            "Available devices:\n  CUDA0: NVIDIA H200 (143155 MiB, 141829 MiB free)\n",
            "0, NVIDIA H200, 9.0, 580.1, [N/A], [N/A]\n1, NVIDIA H200, 9.0, 580.1, [N/A], [N/A]\n",
            "CUDA0: NVIDIA H200",
        ),
    ],
)
def test_gpu_check_stops_the_launch_if_a_gpu_is_not_seen(
    listed: str, gpus: str, verdict: str, context: Context
) -> None:
    class Machine:
        def capture(self, argv: tuple[str, ...], **_: object) -> Captured:
            return Captured(tuple(argv), 0, gpus if argv[0] == "nvidia-smi" else listed, "")

    build, plan = device_plan(context)
    ctx = replace(context, processes=Machine())  # type: ignore[arg-type]
    with pytest.raises(HostError, match="cannot use this machine's GPU") as error:
        check_gpu_visible(ctx, build, plan, 99)
    assert verdict in error.value.what
    assert error.value.exit_code == 9
    assert check_gpu_visible(ctx, build, plan, 0) == ()
    assert check_gpu_visible(ctx, build, plan, None) == ()


def test_gpu_check_is_unknown_without_a_driver_tool(context: Context) -> None:
    listed = "Available devices:\n  CUDA0: NVIDIA GB10 (124000 MiB, 100000 MiB free)\n"

    class Machine:
        def capture(self, argv: tuple[str, ...], **_: object) -> Captured:
            no_tool = argv[0] == "nvidia-smi"
            return Captured(tuple(argv), 127 if no_tool else 0, "" if no_tool else listed, "")

    build, plan = device_plan(context)
    ctx = replace(context, processes=Machine())  # type: ignore[arg-type]
    (one,) = check_gpu_visible(ctx, build, plan, 99)
    assert one.verdict is Verdict.UNKNOWN
