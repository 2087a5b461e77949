"""The container file, without a builder: its instructions, what it copies, its pins, and the commands of the page."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCKERFILE = ROOT / "containers" / "Dockerfile"


def instructions() -> list[tuple[str, str]]:
    """(instruction, its arguments), with continued lines joined and comments left out."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in joined.splitlines() if line)]


def stages() -> dict[str, list[tuple[str, str]]]:
    """Stage -> its instructions, with those of the stage that it begins from."""
    found: dict[str, list[tuple[str, str]]] = {}
    for name, rest in instructions():
        if name == "FROM":
            image, _, stage = rest.partition(" AS ")
            current = found[stage] = list(found.get(image, [(name, rest)]))
        else:
            current.append((name, rest))
    return found


def test_what_is_copied_exists_and_is_sent_to_the_builder() -> None:
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {path for name, rest in instructions() if name == "COPY" for path in shlex.split(rest)[:-1]}
    assert copied == sent
    assert [path for path in copied if not (ROOT / path).exists()] == []


def test_the_wheel_stage_has_all_that_the_wheel_includes() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = {*(path.partition("/")[0] for path in wheel["packages"]), *wheel["force-include"]}
    needed |= {project["project"]["readme"], *project["project"]["license-files"], "pyproject.toml"}
    copied = {path for name, rest in stages()["wheel"] if name == "COPY" for path in shlex.split(rest)[:-1]}
    assert needed <= copied


def test_images_and_packages_are_pinned() -> None:
    images = [rest.split()[0] for name, rest in instructions() if name == "FROM"]
    outside = {image for image in images if image not in stages()}
    assert outside
    for image in outside:
        assert re.search(r":\d+\.\d+\.\d+-", image), image
    torch = re.search(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert torch is not None
    assert f" torch=={torch[1]}+cpu " in DOCKERFILE.read_text()
    hatchling = re.search(r"hatchling==(\d+)\.(\d+)", DOCKERFILE.read_text())
    assert hatchling is not None
    assert (int(hatchling[1]), int(hatchling[2])) >= (1, 27)


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_a_target_runs_pvg_as_a_user_in_work(target: str) -> None:
    stage = stages()[target]
    last = dict(stage)
    assert (last["USER"], last["WORKDIR"], json.loads(last["ENTRYPOINT"])) == ("pvg", "/work", ["pvg"])
    label = dict(word.split("=", 1) for word in shlex.split(last["LABEL"]))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert label["org.opencontainers.image.version"] == project["version"]
    assert label["org.opencontainers.image.licenses"] == project["license"]
    order = [name for name, _ in stage]
    assert order.index("USER") > max(place for place, name in enumerate(order) if name == "RUN")


def test_make_images_builds_both_targets_and_ci_calls_it() -> None:
    makefile = (ROOT / "Makefile").read_text()
    recipe = re.search(r"^images:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    assert recipe is not None
    assert re.findall(r"docker build -f containers/Dockerfile --target (\w+)", recipe[1]) == ["cpu", "cuda"]
    for place in (".ci/run", ".github/workflows/ci.yml"):
        assert "make images" in (ROOT / place).read_text()
    page = (ROOT / "docs" / "installation.md").read_text()
    assert set(re.findall(r"docker build -f containers/Dockerfile --target (\w+)", page)) <= stages().keys()
