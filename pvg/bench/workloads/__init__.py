"""`Workload`, the protocol of the work behind a benchmark profile, and the table of workloads.

A profile names one of pvg's workloads, or one in a user's file:

    workload = make_workload(settings)      # settings.profile.profile: "rollout", or "my_bench.py:make"

Each of pvg's workloads has its own module, imported on demand, with one function

    def make(settings: BenchSettings) -> Workload

that validates the `[workload]` table with the workload's pydantic model (pvg.bench.workloads.workload_settings) and
raises errors in it. `make` is cheap and allocates nothing; `Workload.open` loads and allocates. A user's file has such
a function too. Its path is relative to the working directory, and it can import modules from there.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, TypeVar

from pydantic import BaseModel, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from pvg.config.base import Count, Section
from pvg.config.experiment import Experiment
from pvg.config.load import (
    assign,
    build_experiment,
    find_experiment,
    find_named,
    leaves,
    nearest,
    read_override,
    read_settings,
    read_toml,
    shipped_directories,
    valid_keys,
)
from pvg.errors import ConfigurationError
from pvg.extensions import called, is_reference, load, split_reference

OWN_KEYS = ("warmup", "repeats", "beside")  # keys of a profile that --set may change
ABSENT_IF_EMPTY = ("sweep", "on_servers", "beside")  # keys that a report has only with a value
WORKLOAD = "workload."

SettingsT = TypeVar("SettingsT", bound=BaseModel)


class Rung(Section):
    """One switch of the ablation ladder, with its slow and its fast value. `says`: what the fast value does."""

    switch: str
    slow: Any
    fast: Any
    says: str = ""

    @model_validator(mode="after")
    def _differs(self) -> Rung:
        if self.slow == self.fast:
            raise ValueError(f"the ladder's switch {self.switch!r} has the same slow and fast value")
        return self


class SweepValue(Section):
    """One variant of a profile's sweep: its settings and its label. The label begins with the first setting, KEY=VALUE;
    text after it distinguishes variants with the same value."""

    label: str
    says: str = ""
    changes: dict[str, Any] = Field(alias="set", min_length=1)

    @model_validator(mode="after")
    def _is_labelled(self) -> SweepValue:
        if "=" not in self.label:
            raise ValueError(f"the label {self.label!r} of a [[sweep]] must have the form KEY=VALUE")
        return self


class Profile(Section):
    """A validated profile file. `headline` is the measure that tables compare. `profile` is the workload: one of pvg's
    by name, or `FILE.py:NAME`, a function in a user's file (pvg.bench.workloads).

    `beside`: the number of other processes that keep cores busy during all samples. `sweep` is measured by default.
    `interleave`: variants take turns by default. `on_servers`: the profile that replaces this one for the vLLM engine.
    """

    profile: str
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]  # file names of reports begin with it
    about: str
    experiment: str = "modchain"
    headline: str = "wall_s"
    warmup: Annotated[int, Field(ge=0)] = 1
    repeats: Count = 5
    beside: Annotated[int, Field(ge=0)] = 0
    changes: dict[str, Any] = Field(default_factory=dict, alias="set")
    workload: dict[str, Any] = Field(default_factory=dict)
    ladder: tuple[Rung, ...] = Field(default=(), strict=False)
    sweep: tuple[SweepValue, ...] = Field(default=(), strict=False)
    interleave: bool = False
    on_servers: str = ""

    @property
    def workload_name(self) -> str:
        """How reports name the workload: the file's name without its suffix if it is a user's."""
        return split_reference(self.profile)[0].stem if is_reference(self.profile) else self.profile


@dataclass(frozen=True, slots=True)
class SettingChange:
    """One changed setting: by --set, by a sweep, or by a rung of the ladder. `origin` appears in error messages."""

    key: str
    value: Any
    origin: str


@dataclass(frozen=True)
class BenchSettings:
    """Everything that a workload needs. `origins`: where each changed key was set. `executor`: the workload's Players
    compute in it, unless it is None."""

    profile: Profile
    experiment: Experiment
    workload: Mapping[str, Any]
    origins: Mapping[str, str] = field(default_factory=dict)
    executor: Executor | None = None  # the compute thread that interleaved variants share

    def plain(self) -> dict[str, Any]:
        """The resolved configuration of the profile and of the experiment, as JSON data."""
        profile = self.profile.model_dump(mode="json", by_alias=True) | {"workload": dict(self.workload)}
        profile = {key: value for key, value in profile.items() if key not in ABSENT_IF_EMPTY or value}
        return {"profile": profile, "experiment": self.experiment.plain()}


def find_profile(name: str) -> Path:
    """The file of a profile: `name` is a path, a name in ./profiles, or the name of a profile that comes with pvg."""
    return find_named("profile", name, [Path("profiles"), *shipped_directories("profiles")])


def read_profile(path: Path) -> Profile:
    """The validated content of a profile's file, without overrides."""
    try:
        return Profile.model_validate(read_toml(path, "profile"))
    except ValidationError as error:
        known = [info.alias or name for name, info in Profile.model_fields.items()]
        raise _explained(error, known, "", lambda key: str(path)) from None


def parse_overrides(overrides: Sequence[str]) -> list[SettingChange]:
    return [SettingChange(*found) for override in overrides for found in read_override(override)]


def settings_of(profile: Profile, origin: str, changes: Sequence[SettingChange]) -> BenchSettings:
    """The settings of one variant. `origin`: the profile's file."""
    own: dict[str, Any] = {}
    workload = dict(profile.workload)
    data = read_settings(find_experiment(profile.experiment))
    origins: dict[str, str] = {}
    for change in [*flattened(profile.changes, origin), *changes]:
        origins[change.key] = change.origin
        if change.key in OWN_KEYS:
            own[change.key] = change.value
        elif change.key.startswith(WORKLOAD):
            assign({WORKLOAD.rstrip("."): workload}, change.key, change.value)
        else:
            _refuse_unknown_section(change, profile)
            assign(data, change.key, change.value)
    try:
        changed = Profile.model_validate(profile.model_dump(by_alias=True) | own)
    except ValidationError as error:
        raise _explained(error, OWN_KEYS, "", lambda key: origins.get(key, origin)) from None
    return BenchSettings(changed, build_experiment(data, origin, origins), workload, origins)


def workload_settings(kind: type[SettingsT], settings: BenchSettings) -> SettingsT:
    """The `[workload]` table, validated as `kind`. Raises ConfigurationError with the nearest valid key."""
    try:
        return kind.model_validate(settings.workload)
    except ValidationError as error:
        known = [info.alias or name for name, info in kind.model_fields.items()]
        where = f"the [workload] table of profile {settings.profile.name!r}"
        raise _explained(error, known, WORKLOAD, lambda key: settings.origins.get(key, where)) from None


def flattened(table: Mapping[str, Any], origin: str) -> Iterator[SettingChange]:
    """Flatten a [set] table: `"rollout.engine.max_rows" = 8` and `rollout.engine.max_rows = 8` mean the same here."""
    return (SettingChange(key, value, f"[set] of {origin}") for key, value in leaves(table))


def _refuse_unknown_section(change: SettingChange, profile: Profile) -> None:
    """Refuse a key whose first part is neither a section of the experiment nor a key of a benchmark."""
    if change.key.split(".")[0] in Experiment.model_fields:
        return
    hint = nearest(change.key, [*OWN_KEYS, *(f"{WORKLOAD}{key}" for key in profile.workload), *valid_keys()])
    raise ConfigurationError(
        f"Unknown key {change.key!r} ({change.origin})." + (f" The nearest valid key is {hint!r}." if hint else ""),
        f"Known: keys of the experiment, {WORKLOAD}X, {', '.join(OWN_KEYS)}.",
    )


def _explained(
    error: ValidationError, known: Sequence[str], prefix: str, origin: Callable[[str], str]
) -> ConfigurationError:
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    return validation_mistake(first, key, known, origin(prefix + key), prefix)


def validation_mistake(
    found: ErrorDetails, key: str, known: Sequence[str], where: str, prefix: str = ""
) -> ConfigurationError:
    """An error of pydantic in one line. `key` and the valid keys `known` follow `prefix`; `where`: the file or the
    override."""
    if found["type"] == "extra_forbidden":
        hint = nearest(str(found["loc"][-1]), known)
        return ConfigurationError(
            f"Unknown key {prefix + key!r} ({where})."
            + (f" The nearest valid key is {prefix + hint!r}." if hint else ""),
            f"Known: {', '.join(prefix + name for name in known)}.",
        )
    if found["type"] == "missing":
        return ConfigurationError(f"The key {prefix + key!r} is missing ({where}).")
    if found["type"] == "value_error":
        message = str(found["msg"]).removeprefix("Value error, ")
        return ConfigurationError(f"{message[0].upper()}{message[1:]} ({where}).")
    return ConfigurationError(f"{prefix}{key}: {found['msg']}, not {repr(found['input'])[:60]} ({where}).")


Better = Literal["lower", "higher"]


@dataclass(frozen=True, slots=True)
class BenchMetric:
    """A metric of a benchmark: its unit ("s", "tokens/s", "MB", "1" for a ratio), and which direction is better."""

    unit: str
    better: Better


class Workload(Protocol):
    """One variant of one profile. The runner opens it, samples it (warm-up first), reads `work`, and closes it.

    It runs in the task that drives a `pvg.telemetry.spans.Tracer`: time in a `span` appears in the report's budget, and
    each sample is one step.
    """

    measures: Mapping[str, BenchMetric]  # of everything that `sample` returns; the runner adds wall_s

    async def open(self) -> None: ...

    def work(self) -> Mapping[str, Any]:
        """What one sample does, as JSON data (models, counts, lengths, seeds). Reports can be compared only if it is
        equal. How the work is done, such as batch sizes and switches, does not belong here."""

    async def sample(self, index: int) -> Mapping[str, float]:
        """Do the work once; returns one value per measure. The work is the same for every index. If its duration is
        random, each index has its own draw, which is the same in all variants."""

    def derived(self) -> Mapping[str, float]:
        """Figures that are not raw samples: shares, ratios, utilisation. Called after the last sample."""

    async def close(self) -> None: ...


WALL = "wall_s"


# --- the table of workloads -------------------------------------------------------------------------------------------

MakeWorkload = Callable[["BenchSettings"], "Workload"]
MEMBERS = ("measures", "open", "work", "sample", "derived", "close")  # of a Workload


def _made(module: str, settings: BenchSettings) -> Workload:
    """By the module's `make`, imported at the call, because most workloads need torch."""
    found: Workload = importlib.import_module(f"{__name__}.{module}").make(settings)
    return found


NAMES = ("rollout", "trainer", "e2e", "verifier", "reading", "sync")
WORKLOADS: dict[str, MakeWorkload] = {name: partial(_made, name) for name in NAMES}
# Workloads that can run on vLLM servers (`--server URL`, `--serve`).
SERVED = frozenset({"rollout", "sync", "e2e"})


def make_workload(settings: BenchSettings) -> Workload:
    """The workload that the profile names. Raises ConfigurationError if a user's file does not make one."""
    name = settings.profile.profile
    if not is_reference(name):
        return WORKLOADS[name](settings)
    with _importing_from_here():
        found: Workload = called("profile", name, load("profile", name), settings)
    if missing := [member for member in MEMBERS if not hasattr(found, member)]:
        raise ConfigurationError(
            f"profile = {name!r} made a {type(found).__name__} without {', '.join(missing)}.",
            "It must return a Workload (pvg/bench/workloads/__init__.py).",
        )
    return found


@contextmanager
def _importing_from_here() -> Iterator[None]:
    """Modules in the working directory can be imported, as with `python -m`."""
    here = str(Path.cwd())
    sys.path.append(here)
    try:
        yield
    finally:
        sys.path.remove(here)
