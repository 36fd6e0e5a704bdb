"""Docker messages, endpoints, container requests; plans of images."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from bakehouse.build.image import ImageFile, tree_digest
from bakehouse.build.image_overlay import refuse_compiled
from bakehouse.engines.base import Configured
from bakehouse.errors import BuildFailed, HostError, UsageError
from bakehouse.lock import ImagePin, Lock
from bakehouse.plan.image import definitions_of, expected_of, plan_image_build, render
from bakehouse.recipe.models import Build, Container, Recipe
from bakehouse.recipe.types import parse
from bakehouse.system.docker.client import DEFAULT, find_endpoint, registry_of
from bakehouse.system.docker.errors import explain, unreachable
from bakehouse.system.docker.models import (
    ContainerSpec,
    Mount,
    Published,
    container_facts,
    create_body,
    engine_facts,
    gpu_request,
)
from tests.support.file_trees import differences
from tests.support.recipes import recipe_data
from tests.support.small_engine import FAKE_HOST, small_lock


def test_docker_messages_become_errors() -> None:
    rows = [
        (
            "manifest for ghcr.io/o/l:server-cuda-b10917 not found: manifest unknown",
            "manifest-unknown",
            4,
        ),
        (
            "no matching manifest for linux/arm64/v8 in the manifest list entries",
            "image-platform",
            9,
        ),
        (
            (
                "image with reference x was found but does not match the specified platform: "
                "wanted linux/arm64, actual: linux/amd64"
            ),
            "image-platform",
            9,
        ),
        ("toomanyrequests: You have reached your pull rate limit.", "registry-limit", 9),
        (
            (
                "pull access denied for x, repository does not exist or may require "
                "'docker login': denied: requested access to the resource is denied"
            ),
            "registry-unauthorised",
            9,
        ),
        ("unauthorized: authentication required", "registry-unauthorised", 9),
        ('Get "https://r.io/v2/": dial tcp: lookup r.io: no such host', "network", 9),
        ('Get "https://r.io/v2/": net/http: TLS handshake timeout', "network", 9),
        (
            'Get "https://r.io/v2/": x509: certificate signed by unknown authority',
            "registry-tls",
            9,
        ),
        ("failed to register layer: write /x: no space left on device", "disk-full", 9),
        ('Conflict. The container name "/x" is already in use by container "y".', "name-in-use", 9),
        (
            (
                "driver failed programming external connectivity on endpoint x: "
                "Bind for 127.0.0.1:8008 failed: port is already allocated"
            ),
            "port-in-use",
            9,
        ),
        ('could not select device driver "" with capabilities: [[gpu]]', "no-nvidia-runtime", 9),
        (
            "CDI device injection failed: unresolvable CDI devices nvidia.com/gpu=all",
            "no-nvidia-runtime",
            9,
        ),
        ("No such image: x", "image-missing", 3),
        ("something else", "docker", 9),
    ]
    errors = {said: explain(said, "here") for said, _, _ in rows}
    got = [(said, error.id, error.exit_code) for said, error in errors.items()]
    assert got == rows
    assert all(error.hint for error in errors.values())


def test_docker_message_hides_passwords() -> None:
    error = explain("Get https://user:secret-word@r.io/v2/: no such host", "here")
    assert "secret-word" not in error.what


def test_docker_unreachable_names_the_cause() -> None:
    rows = [
        (PermissionError(13, "Permission denied"), "docker-permission"),
        (FileNotFoundError(2, "No such file"), "docker-daemon"),
        (ConnectionRefusedError(111, "refused"), "docker-daemon"),
        (TimeoutError("timed out"), "docker-timeout"),
    ]
    for cause, id_ in rows:
        wrapped = RuntimeError("wrapped", cause)
        assert unreachable(wrapped, DEFAULT, "the default context").id == id_
        assert unreachable(cause, DEFAULT, "the default context").hint


def test_docker_endpoint_comes_from_environment_and_context(tmp_path: Path) -> None:
    home = {"HOME": str(tmp_path)}
    assert find_endpoint(home).host == DEFAULT
    assert find_endpoint({**home, "DOCKER_HOST": "tcp://h:1"}).tls is None
    secured = {"DOCKER_HOST": "tcp://h:1", "DOCKER_TLS_VERIFY": "1", "DOCKER_CERT_PATH": "/c"}
    found = find_endpoint({**home, **secured})
    assert (found.tls, found.verify) == (Path("/c"), True)
    folder = tmp_path / ".docker"
    meta = folder / "contexts/meta" / hashlib.sha256(b"far").hexdigest() / "meta.json"
    meta.parent.mkdir(parents=True)
    meta.write_text(json.dumps({"Endpoints": {"docker": {"Host": "tcp://far:2376"}}}))
    (folder / "config.json").write_text('{"currentContext": "far"}')
    assert find_endpoint(home).host == "tcp://far:2376"
    assert find_endpoint({**home, "DOCKER_CONTEXT": "default"}).host == DEFAULT
    assert find_endpoint({**home, "DOCKER_HOST": "unix:///x"}).host == "unix:///x"
    with pytest.raises(HostError):
        find_endpoint({**home, "DOCKER_CONTEXT": "gone"})
    (folder / "config.json").write_text("{")
    with pytest.raises(HostError):
        find_endpoint(home)


def test_image_reference_names_registry_and_tag() -> None:
    rows = [
        ("debian", "docker.io/library/debian", "latest"),
        ("vllm/vllm-openai:v1", "docker.io/vllm/vllm-openai", "v1"),
        ("ghcr.io/o/l:x", "ghcr.io/o/l", "x"),
        ("localhost:5000/a", "localhost:5000/a", "latest"),
        ("127.0.0.1:5000/a/b:t", "127.0.0.1:5000/a/b", "t"),
        (f"nvcr.io/a@sha256:{'1' * 64}", "nvcr.io/a", f"sha256:{'1' * 64}"),
        (f"a/b:t@sha256:{'1' * 64}", "docker.io/a/b", f"sha256:{'1' * 64}"),
    ]
    for text, name, wanted in rows:
        at = parse(text)
        assert (at.name, at.tag_or_digest) == (name, wanted)
        assert registry_of(text) == at.registry


def test_container_is_never_privileged() -> None:
    spec = ContainerSpec(
        image="i", argv=("a",), entrypoint=(), gpus="device=0,1", ipc="host", shm_size=2**30,
        mounts=(Mount(source="/m", target="/w"),), publish=(Published(port=8000, host_port=9),),
        memory=2**31, network="none",
    )  # fmt: skip
    body = create_body(spec)
    host = body["HostConfig"]
    assert (host["Privileged"], host["RestartPolicy"]) == (False, {"Name": "no"})
    assert host["SecurityOpt"] == ["no-new-privileges"]
    assert host["Mounts"][0]["ReadOnly"] is True
    assert host["PortBindings"] == {"8000/tcp": [{"HostIp": "127.0.0.1", "HostPort": "9"}]}
    assert host["DeviceRequests"][0]["DeviceIDs"] == ["0", "1"]
    assert (host["Memory"], host["MemorySwap"]) == (2**31, 2**31)
    assert body["Entrypoint"] == [""], "an empty entrypoint takes the image's away"
    assert "Entrypoint" not in create_body(ContainerSpec(image="i"))


def test_gpu_request() -> None:
    assert gpu_request("all")["Count"] == -1
    assert gpu_request("2")["Count"] == 2
    for odd in ("", "0", "some", "device=", "-1", "9" * 5000):
        for cdi in (False, True):
            with pytest.raises(UsageError):
                gpu_request(odd, cdi=cdi)


def test_gpus_as_cdi_devices() -> None:
    rows = [
        ("all", ["nvidia.com/gpu=all"]),
        ("2", ["nvidia.com/gpu=0", "nvidia.com/gpu=1"]),
        ("device=1, GPU-5f", ["nvidia.com/gpu=1", "nvidia.com/gpu=GPU-5f"]),
    ]
    for gpus, ids in rows:
        body = create_body(ContainerSpec(image="i", gpus=gpus), cdi=True)
        assert body["HostConfig"]["DeviceRequests"] == [{"Driver": "cdi", "DeviceIDs": ids}]


def test_engine_facts_gpu_access() -> None:
    version = {"ApiVersion": "1.41", "Version": "20.10", "Arch": "arm64"}
    plain = engine_facts({"Runtimes": {"runc": {}}}, version, "h")
    assert (plain.arch, plain.nvidia, plain.buildkit) == ("aarch64", False, True)
    assert engine_facts({"Runtimes": {"nvidia": {}}}, version, "h").nvidia
    cdi = {"DiscoveredDevices": [{"Source": "cdi", "ID": "nvidia.com/gpu=all"}]}
    assert engine_facts(cdi, version, "h").gpus == "cdi"
    both = {**cdi, "Runtimes": {"nvidia": {}}}
    assert engine_facts(both, version, "h").gpus == "runtime"
    folders = {"CDISpecDirs": ["/etc/cdi"]}
    assert engine_facts(folders, {**version, "ApiVersion": "1.45"}, "h").gpus == "cdi-unlisted"
    assert engine_facts(folders, {**version, "ApiVersion": "1.50"}, "h").gpus == "none"
    assert engine_facts({"CDISpecDirs": []}, version, "h").gpus == "none"
    assert not engine_facts({}, {"ApiVersion": "1.38"}, "h").buildkit


def test_container_facts_of_an_ended_container() -> None:
    facts = container_facts(
        {"Id": "c", "State": {"Status": "exited", "ExitCode": 137, "OOMKilled": True},
         "RestartCount": 2, "NetworkSettings": {"Ports": {"80/tcp": None, "9/udp": None}}}
    )  # fmt: skip
    assert (facts.exit_code, facts.oom_killed, facts.restarts, facts.ports) == (137, True, 2, {})


def test_overlay_refuses_compiled_files() -> None:
    rows = [
        "csrc/a.txt",
        "cmake/x.cmake",
        "CMakeLists.txt",
        "setup.py",
        "vllm/k.cu",
        "vllm/x.so",
        "a/b.hpp",
    ]
    for path in rows:
        with pytest.raises(BuildFailed) as caught:
            refuse_compiled(["vllm/ok.py", path], "here")
        assert (caught.value.id, caught.value.exit_code) == ("overlay-compiled", 6)
        refuse_compiled(["vllm/a.py", "docs/x.md", "tests/test_c.py", "vllm/csrc.py"], "here")


def test_image_files_differences() -> None:
    one = ImageFile(path="a", kind="file", mode="0644", owner="0:0", size=1, sha256="x")
    other = one.model_copy(update={"mode": "0755"})
    assert differences([one], [one]) == ()
    assert differences([one], [other]) == ("a: mode 0644 and 0755",)
    assert differences([one], []) == ("a: only in the first",)
    assert tree_digest([one]) != tree_digest([other])


def configured(*lines: str) -> Configured:
    return Configured(lines, "log", {}, "cache", "Ninja", {})


def image_recipe(**build: object) -> Recipe:
    bases = {role: {"x86_64": f"base/{role}:1"} for role in ("builder", "runtime")}
    data = recipe_data(
        build={"where": "docker", "bases": bases, **build}, container={"gpus": "all"}
    )
    return Recipe.model_validate(data)


def image_lock() -> Lock:
    pins = {
        role: {"x86_64": ImagePin(reference=f"base/{role}:1", name=f"docker.io/base/{role}",
                                  digest=f"sha256:{number * 64}", id="sha256:0", size=1)}
        for role, number in (("builder", "1"), ("runtime", "2"))
    }  # fmt: skip
    return small_lock().model_copy(update={"images": pins})


def test_image_build_plan() -> None:
    recipe = image_recipe(cmake={"SMALL_GREETING": 'it\'s $HOME; "x"'})
    plan = plan_image_build(recipe, image_lock(), FAKE_HOST, jobs=3)
    text = str(plan.dockerfile)
    assert f"FROM docker.io/base/builder@sha256:{'1' * 64} AS configured" in text
    assert f"FROM docker.io/base/runtime@sha256:{'2' * 64}\n" in text
    assert "USER 10001:10001" in text
    line = next(ln for ln in text.splitlines() if "SMALL_GREETING" in ln)
    assert '-DSMALL_GREETING=it\'s $HOME; "x"' in json.loads(line.removeprefix("RUN "))
    assert plan.image == f"bakehouse/test:{plan.digest[:16]}"
    assert plan.args == {"JOBS": "3"}
    again = plan_image_build(recipe, image_lock(), FAKE_HOST, jobs=1)
    assert again.digest == plan.digest, "jobs change nothing that is built"
    other = plan_image_build(image_recipe(), image_lock(), FAKE_HOST)
    assert other.digest != plan.digest


def test_image_build_forces_both_halves_of_cuda() -> None:
    recipe = image_recipe(cuda={"version": "13.0"}, cmake={"GGML_CUDA": True})
    expected = expected_of(recipe.build or Build(), image_lock(), "x86_64")
    assert expected.forced["CMAKE_CUDA_COMPILER"] == "/usr/local/cuda/bin/nvcc"
    assert expected.forced["CUDAToolkit_ROOT"] == "/usr/local/cuda"


def test_image_build_links_without_a_driver() -> None:
    """NVIDIA's development images have a stub named libcuda.so, and no libcuda.so.1 for ld."""
    flags = {"CMAKE_EXE_LINKER_FLAGS": "-Wl,-z,now"}
    for cuda in (None, {"version": "13.0"}):
        build = image_recipe(cuda=cuda, cmake=flags).build or Build()
        passed = definitions_of(build, image_lock(), "x86_64")["CMAKE_EXE_LINKER_FLAGS"]
        assert passed.split()[0] == "-Wl,-z,now"
        assert ("-Wl,--allow-shlib-undefined" in passed.split()) is (cuda is not None)


def test_dockerfile_refuses_instructions_from_an_image() -> None:
    rows = ["root\nRUN curl x", "a b", "x\x00", "\u2028"]
    for user in rows:
        with pytest.raises(BuildFailed) as error:
            render("vllm.Dockerfile.j2", base="b@sha256:1", user=user, overlay=False, mods=())
        assert error.value.id == "image-odd"
        assert "\n" not in str(error.value.where)
        text = render(
            "vllm.Dockerfile.j2", base="b@sha256:1", user="1000:1000", overlay=False, mods=()
        )
        assert text.splitlines()[-1] == "USER 1000:1000"


def test_container_user() -> None:
    rows = [
        ("1000", True),
        ("1000:100", True),
        ("vllm", True),
        ("a:b:c", False),
        ("-1", False),
        ("root --privileged", False),
        ("", False),
        ("a\nb", False),
    ]
    for user, good in rows:
        if good:
            assert Container(user=user).user == user
            continue
        with pytest.raises(ValidationError):
            Container(user=user)
