"""Images cannot be built here: hadolint reads the Dockerfiles, and what they copy is laid out and started as it is."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from builder.build import parse_arguments as builder_arguments
from perf import serve
from perf.server import REPO_ROOT

FILES = ("Dockerfile", "Dockerfile.cpu")
HOME = "/opt/commitkv"


def instructions(name: str) -> list[tuple[str, str]]:
    """(word, rest) of every instruction, continued lines joined."""
    text = re.sub(r"^\s*#.*\n", "", (REPO_ROOT / name).read_text(encoding="utf-8"), flags=re.MULTILINE)
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [tuple(line.split(maxsplit=1)) for line in lines if line.strip()]  # type: ignore[misc]


def only(name: str, word: str) -> str:
    [rest] = [rest for found, rest in instructions(name) if found == word]
    return rest


def command(name: str) -> tuple[list[str], list[str]]:
    """What CMD gives start.sh: arguments of the builder, and of perf.serve."""
    script, _, *rest = json.loads(only(name, "CMD"))
    assert script == f"{HOME}/runtime/deploy/start.sh"
    split = rest.index("--")
    return rest[:split], rest[split + 1 :]


def is_ignored(path: str) -> bool:
    """Docker's rule: the last pattern that matches the path or a folder above it decides."""
    ignored = False
    parents = [path, *(str(parent) for parent in Path(path).parents)][:-1]
    for line in (REPO_ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines():
        pattern = line.strip()
        if not pattern or pattern.startswith("#"):
            continue
        glob = pattern.removeprefix("!").rstrip("/").removeprefix("**/")
        anywhere = "**/" in pattern
        names = [Path(p).name if anywhere else p for p in parents]
        depth = glob.count("/")
        if any(fnmatch.fnmatchcase(n, glob) and (anywhere or n.count("/") == depth) for n in names):
            ignored = not pattern.startswith("!")
    return ignored


def context() -> Iterator[str]:
    """Every file that `docker build` sees, relative to the root."""
    kept = re.findall(r"^!([^/\n]+)", (REPO_ROOT / ".dockerignore").read_text(encoding="utf-8"), re.MULTILINE)
    for top in sorted(set(kept)):
        path = REPO_ROOT / top
        files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
        for file in files:
            relative = file.relative_to(REPO_ROOT).as_posix()
            if not is_ignored(relative):
                yield relative


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that COPY . . makes."""
    root = tmp_path_factory.mktemp("image")
    for relative in context():
        target = root / relative
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(REPO_ROOT / relative, target)
    return root


def start(image: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """start.sh with this Python first on PATH, from another folder."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(image)}
    script = str(image / "runtime" / "deploy" / "start.sh")
    return subprocess.run(
        [script, *arguments], cwd="/", env=environment, capture_output=True, text=True, check=False, timeout=120
    )


@pytest.mark.parametrize("name", FILES)
def test_hadolint_has_nothing_to_say(name: str) -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([str(hadolint), str(REPO_ROOT / name)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_context_holds_code_and_nothing_else() -> None:
    files = list(context())
    assert {"pyproject.toml", "constraints.txt", "runtime/deploy/start.sh", "perf/serve.py"} <= set(files)
    assert not [f for f in files if f.startswith(("tests/", ".", "engines/", "models/", "out/", "perf/results/"))]
    assert not [f for f in files if "__pycache__" in f or f.endswith((".pyc", ".gguf"))]
    assert sum((REPO_ROOT / file).stat().st_size for file in files) < 20 << 20


@pytest.mark.parametrize("name", FILES)
def test_what_is_copied_is_in_the_context(name: str) -> None:
    files = set(context())
    for word, rest in instructions(name):
        if word == "COPY":
            sources = [part for part in rest.split()[:-1] if not part.startswith("--")]
            assert all(source == "." or source in files for source in sources), rest


@pytest.mark.parametrize("name", FILES)
def test_extras_and_versions_are_those_of_the_project(name: str) -> None:
    project = tomllib.loads((REPO_ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    text = (REPO_ROOT / name).read_text(encoding="utf-8")
    [extras] = re.findall(r"'\.\[([a-z0-9,]+)\]'", text)
    assert set(extras.split(",")) <= set(project["optional-dependencies"])
    wheel = re.search(r"nvidia-pytriton==\S+", (REPO_ROOT / "Makefile").read_text(encoding="utf-8"))
    assert wheel is not None and (wheel.group() in text) == (name == "Dockerfile.cpu")
    assert f"commitkv-cpu:{project['version']}" in text or f"commitkv:{project['version']}" in text


@pytest.mark.parametrize("name", FILES)
def test_arguments_of_the_command_are_known(name: str) -> None:
    for_builder, for_server = command(name)
    built = builder_arguments(for_builder)
    options = serve._parser().parse_args(for_server)
    assert (built.target, options.device) in (("trt", "cuda"), ("cpu", "cpu"))
    assert options.host == "0.0.0.0", "a container that listens on its loopback serves nobody"
    assert options.checkpoints in json.loads(only(name, "VOLUME"))


@pytest.mark.parametrize("name", FILES)
def test_ports_are_the_servers(name: str) -> None:
    options = serve._parser().parse_args(command(name)[1])
    ports = [str(port) for port in (options.http_port, options.grpc_port, options.metrics_port)]
    assert only(name, "EXPOSE").split() == ports
    assert f"http://127.0.0.1:{ports[0]}/v2/health/ready" in only(name, "HEALTHCHECK")


@pytest.mark.parametrize("name", FILES)
def test_the_server_is_nobody_special_and_owns_its_volumes_only(name: str) -> None:
    assert [rest for word, rest in instructions(name) if word == "USER"][-1] == "1000:1000"
    [owned] = re.findall(r"chown 1000:1000 ([^&\n]+)", (REPO_ROOT / name).read_text(encoding="utf-8"))
    assert {*json.loads(only(name, "VOLUME")), f"{HOME}/models"} == set(owned.split())
    assert not [rest for word, rest in instructions(name) if word == "COPY" and "--chown" in rest]
    assert f"PYTHONPATH={HOME}" in only(name, "ENV") and only(name, "WORKDIR") == HOME


def test_without_an_engine_it_is_built_first(image: Path) -> None:
    done = start(image, "/nowhere/engine", "--help", "--", "--help")
    assert done.returncode == 0, done.stderr
    assert "build.py" in done.stdout and "perf.serve" in done.stdout
    refused = start(image, "/nowhere/engine", "--target=abacus", "--", "--help")
    assert refused.returncode == 2 and "abacus" in refused.stderr and "perf.serve" not in refused.stdout


def test_an_engine_that_is_there_is_served(image: Path, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").touch()
    done = start(image, str(tmp_path), "--target=abacus", "--", "--help")
    assert done.returncode == 0 and "perf.serve" in done.stdout and "build.py" not in done.stdout
    refused = start(image, str(tmp_path), "--", "--kv-mib", "0")
    assert refused.returncode == 1 and "--kv-mib: got 0" in refused.stderr
