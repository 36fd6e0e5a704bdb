"""A server runs the image that was verified, even if its tag has moved since."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bakehouse.commands import serve
from bakehouse.plan.types import ImagePlan
from tests.support.boxed import House, opened
from tests.support.docker_engine import Engine, make_image

pytestmark = [pytest.mark.integration, pytest.mark.docker, pytest.mark.timeout(120)]


@pytest.fixture
def house(
    tmp_path: Path, docker_engine: Engine, fake_vllm: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Iterator[House]:  # fmt: skip
    with opened(tmp_path, docker_engine, fake_vllm, monkeypatch, capsys) as made:
        yield made


def built(house: House, text: str) -> None:
    """Write a recipe whose image is changed by a mod."""
    mod = house.folder / "mods" / "own"
    mod.mkdir(parents=True, exist_ok=True)
    (mod / "run.sh").write_text(f"#!/bin/sh\necho {text} > /etc/own\n")
    house.write(image_more={"mods": [{"folder": str(mod)}]})


def test_image_tag_moved_after_verification_changes_nothing(
    house: House,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between build and launch somebody gives the built image's tag to another image."""
    built(house, "one")
    make_image(house.engine, "moved/other:1", "LABEL other=1")
    seen: list[str] = []
    bring = serve.bring

    def moved(ctx: Any, wanted: serve.PlannedServer, *rest: Any) -> Any:
        assert isinstance(wanted.build, ImagePlan)
        assert wanted.image
        seen.extend((wanted.build.image, wanted.image.id))
        house.engine.cli("tag", "moved/other:1", wanted.build.image)
        return bring(ctx, wanted, *rest)

    monkeypatch.setattr(serve, "bring", moved)
    code, document, _ = house.call("serve")

    assert code == 0, document["error"]
    tag, proven = seen
    box = house.docker.container("bakehouse-boxed")
    assert box
    assert box.image == proven
    now = house.docker.image(tag)
    assert now
    assert now.id != proven
    assert house.engine.cli("exec", "bakehouse-boxed", "cat", "/etc/own") == "one"


def test_image_rebuilt_is_another_server(
    house: House,
) -> None:
    built(house, "one")
    assert house.call("serve")[0] == 0
    built(house, "two")
    assert house.call("lock", update=True)[0] == 0
    code, document, _ = house.call("serve")
    assert code == 9
    assert "already runs with other settings" in document["error"]["what"]
