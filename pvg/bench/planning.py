"""Plans one call of `pvg bench`: resolves and checks all variants before anything runs.

A plain bench has one variant and a sweep has one per value. An ablation has one per rung of the profile's ladder: first
all optimizations off, then each one enabled in turn, cumulatively. A profile may define a sweep. A plain bench then
measures that sweep, unless the user gives one of its settings.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal

import orjson

from pvg.bench.compare import word
from pvg.bench.workloads import (
    OWN_KEYS,
    SERVED,
    WALL,
    WORKLOADS,
    BenchSettings,
    Profile,
    SettingChange,
    find_profile,
    flattened,
    make_workload,
    parse_overrides,
    read_profile,
    settings_of,
)
from pvg.config.experiment import TABLES, Experiment
from pvg.config.load import did_you_mean, parse_list
from pvg.errors import ConfigurationError, ServerUnavailableError, UsageError
from pvg.extensions import is_reference
from pvg.servers.command import LOOPBACK, find_interpreter, model_folder, server_spec
from pvg.servers.control import ControlClient, ServerInfo, control_key
from pvg.servers.pool import HttpPool, ServerFault
from pvg.servers.process import VllmServer, free_port

# --- the vLLM servers of a benchmark: running ones (`--server URL`), or one that pvg starts (`--serve`) ---------------

# Settings that `pvg serve` reads and a running server cannot change.
FIXED_AT_START = frozenset(
    {
        "serving.max_num_seqs",
        "serving.gpu_memory_utilization",
        "serving.tensor_parallel",
        "serving.extra_args",
        "models.prover.source",
        "models.dtype",
        "models.precision",
        "weights.root",
        "weights.transport.kind",
        "training.adapters.rank",
    }
)
# Fields of `ServerInfo` that a report contains.
REPORTED = ("model", "dtype", "max_model_len", "max_num_seqs", "prefix_caching", "logprobs_mode", "max_lora_rank")

OnServer = Callable[[str], None]


async def look(experiment: Experiment) -> list[ServerInfo]:
    """The descriptions of the experiment's servers. Raises ServerUnavailableError for a server that does not answer,
    MissingRequirementError for one without pvg's routes, ConfigurationError for a wrong key."""
    serving, weights = experiment.serving, experiment.weights
    pool = HttpPool(len(serving.servers), key=control_key(weights.root), fresh=True)
    controls = [
        ControlClient(url, pool, timeout_s=weights.timeout_s, probe_timeout_s=serving.probe_timeout_s)
        for url in serving.servers
    ]
    try:
        return list(await asyncio.gather(*(control.info() for control in controls)))
    except ServerFault as fault:
        raise ServerUnavailableError(
            f"No server answers: {fault}.", "Start one with `pvg serve EXPERIMENT`, or use --serve."
        ) from None
    finally:
        await pool.close()


def described(infos: Sequence[ServerInfo]) -> dict[str, Any]:
    """For a report: the number of servers and their fields; a field that differs has one value per server."""
    found: dict[str, Any] = {"count": len(infos)}
    for name in REPORTED:
        values = [asdict(info)[name] for info in infos]
        found[name] = values[0] if len(set(values)) == 1 else values
    return found


def versions(infos: Iterable[ServerInfo]) -> str | None:
    """The servers' vLLM versions; None without servers."""
    return ", ".join(sorted({info.vllm for info in infos})) or None


def start_settings(experiment: Experiment) -> bytes:
    """Equal for variants that can share a server."""
    changes = flattened(experiment.plain(), "the experiment")
    return orjson.dumps({change.key: change.value for change in changes if change.key in FIXED_AT_START})


@asynccontextmanager
async def own_server(experiment: Experiment, on_server: OnServer | None = None) -> AsyncIterator[Experiment]:
    """Start a server for the experiment on a free port and yield the experiment that uses it; stop the server at the
    end. Raises the errors of `find_interpreter`, `model_folder` and `VllmServer.start`."""
    tell = on_server or (lambda line: None)
    interpreter, port = find_interpreter(), free_port(LOOPBACK)
    log = experiment.weights.root / "logs" / f"bench-{port}.log"
    spec = server_spec(experiment, "prover", interpreter, model_folder(experiment, "prover"), log=log, port=port)
    tell(f"starting a server (vLLM {interpreter.vllm}); its log: {log}")
    began = time.monotonic()
    async with VllmServer.start(spec) as server:
        tell(f"{server.url} is ready after {time.monotonic() - began:.0f} s")
        yield with_servers(experiment, (server.url,))


def with_servers(experiment: Experiment, urls: tuple[str, ...]) -> Experiment:
    serving = experiment.serving.model_copy(update={"servers": urls})
    return experiment.model_copy(update={"serving": serving})


# --- the plan ---------------------------------------------------------------------------------------------------------

Kind = Literal["bench", "sweep", "ablation"]

# Settings of the whole process: variants with different values cannot be open at once.
PROCESS_WIDE = frozenset({"models.threads"})
ALL_SLOW = "all slow"


@dataclass(frozen=True)
class PlannedVariant:
    label: str
    overrides: dict[str, Any]
    settings: BenchSettings


@dataclass(frozen=True)
class BenchPlan:
    """What one call measures. `base`: the settings common to all variants. `serve`: pvg starts the servers."""

    kind: Kind
    base: BenchSettings
    choices: tuple[PlannedVariant, ...]
    interleave: bool
    serve: bool = False


def plan_bench(
    name: str,
    overrides: Sequence[str] = (),
    *,
    sweep: str | None = None,
    ablate: bool = False,
    interleave: bool | None = None,
    server_urls: Sequence[str] = (),
    serve: bool = False,
) -> BenchPlan:
    """Resolve every variant, and construct each workload once to find errors before any of them runs.

    `interleave`: None chooses (see pvg.bench.runner). `server_urls`: vLLM servers to measure on. `serve`: start
    servers. Raises UsageError and ConfigurationError.
    """
    settings = parse_overrides(overrides)
    given = [*_on_servers(server_urls, serve, settings), *settings]
    profile, origin = _profile(name, given)
    _check_workload(profile.profile, origin, bool(server_urls) or serve)
    if sweep is not None and ablate:
        raise UsageError("--sweep and --ablate cannot be used together.", "Call pvg bench once for each.")
    settle = partial(settings_of, profile, origin)
    base = settle(given)
    kind: Kind = "bench"
    variants: list[tuple[str, list[SettingChange]]] = [("", [])]
    if sweep is not None:
        kind, variants = "sweep", [(_label(change), [change]) for change in _swept(sweep, given)]
    elif ablate:
        kind, variants = "ablation", _ladder(base, origin, given)
    elif own := _own_sweep(profile, origin, given):
        kind, variants = "sweep", own
    choices = [
        PlannedVariant(label, {change.key: change.value for change in changes}, settle([*given, *changes]))
        for label, changes in variants
    ]
    for choice in choices:
        headline, known = profile.headline, [WALL, *make_workload(choice.settings).measures]
        if headline not in known:
            raise ConfigurationError(
                f"The headline {headline!r} of profile {profile.name!r} is not a measure of its workload.",
                f"It measures {', '.join(known)}.",
            )
    swept = {f"{key}.kind" if key in TABLES else key for choice in choices for key in choice.overrides}
    if not serve and any(map(is_served, choices)) and (fixed := sorted(swept & FIXED_AT_START)):
        raise UsageError(
            f"{fixed[0]} is fixed when a server starts, so it cannot be swept over running servers.",
            "Use --serve instead of --server: the benchmark then starts a server for each value.",
        )
    wanted = profile.interleave or None if interleave is None else interleave
    return BenchPlan(kind, base, tuple(choices), _interleaved(kind, choices, wanted), serve)


def _on_servers(urls: Sequence[str], serve: bool, given: Sequence[SettingChange]) -> list[SettingChange]:
    if urls and serve:
        raise UsageError("--server and --serve cannot be used together.", "Use one of them.")
    if not urls and not serve:
        return []
    origin = "--serve" if serve else f"--server {urls[0]}"
    changes = [SettingChange("rollout.engine", "vllm", origin)]
    changes += [SettingChange("serving.servers", list(urls), origin)] if urls else []
    for change in given:
        if change.key in ("rollout.engine", "serving.servers"):
            raise UsageError(f"{origin.split(maxsplit=1)[0]} already sets {change.key}.", f"Drop {change.origin}.")
        if urls and change.key in FIXED_AT_START and change.key.startswith("serving."):
            raise UsageError(
                f"{change.key} is fixed when a server starts.",
                f"Drop {change.origin}, or use --serve instead of --server.",
            )
    return changes


def _profile(name: str, given: Sequence[SettingChange]) -> tuple[Profile, str]:
    """The profile and its file. If the engine is vLLM, the profile that replaces it (`on_servers`)."""
    path = find_profile(name)
    profile = read_profile(path)
    engine = {change.key: change.value for change in given}.get("rollout.engine")
    if engine == "vllm" and profile.on_servers:
        path = find_profile(profile.on_servers)
        profile = read_profile(path)
    return profile, str(path)


def _check_workload(workload: str, origin: str, on_servers: bool) -> None:
    if workload not in WORKLOADS and not is_reference(workload):
        raise ConfigurationError(
            f"There is no workload {workload!r} ({origin}).{did_you_mean(workload, list(WORKLOADS))}",
            f"Known: {', '.join(WORKLOADS)}. A workload of your own: profile = 'FILE.py:NAME'.",
        )
    if on_servers and workload not in SERVED:
        raise UsageError(
            f"The workload {workload!r} does not use servers.",
            f"--server and --serve go with {', '.join(sorted(SERVED))}.",
        )


def _swept(sweep: str, given: Sequence[SettingChange]) -> list[SettingChange]:
    """`key=a,b,c` -> one change for each value."""
    key, values = parse_list(sweep)
    if key in OWN_KEYS:
        raise UsageError(f"--sweep {key}: all variants of a report need the same {key}.", f"Use --set {key}=...")
    if any(change.key == key for change in given):
        raise UsageError(f"{key} is both set and swept.", "Leave out one of --set and --sweep.")
    changes = [SettingChange(key, value, f"--sweep {sweep}") for value in values]
    labels = [_label(change) for change in changes]
    repeated = next((label for label in labels if labels.count(label) > 1), None)
    if repeated:
        raise UsageError(f"--sweep {sweep!r} contains {repeated} twice.")
    return changes


def _own_sweep(profile: Profile, origin: str, given: Sequence[SettingChange]) -> list[tuple[str, list[SettingChange]]]:
    """The profile's sweep: per variant its label and its changes. Empty if the profile has none, or if the user gives
    one of its settings."""
    found = [(value.label, list(flattened(value.changes, f"[[sweep]] of {origin}"))) for value in profile.sweep]
    varied = {change.key for _, changes in found for change in changes}
    return [] if varied & {change.key for change in given} else found


def _ladder(base: BenchSettings, origin: str, given: Sequence[SettingChange]) -> list[tuple[str, list[SettingChange]]]:
    """Per variant, slowest first: its label and the state of all switches."""
    rungs = base.profile.ladder
    if not rungs:
        raise UsageError(f"The profile {base.profile.name!r} has no ladder.", "Add [[ladder]] to its file.")
    for change in given:
        if any(change.key == rung.switch for rung in rungs):
            raise UsageError(f"--ablate sets {change.key}, a switch of the ladder.", f"Drop {change.origin}.")
    state: dict[str, SettingChange] = {}
    for rung in rungs:
        state.setdefault(rung.switch, SettingChange(rung.switch, rung.slow, f"[[ladder]] of {origin}"))
    variants = [(ALL_SLOW, list(state.values()))]
    for rung in rungs:
        fast = SettingChange(rung.switch, rung.fast, f"[[ladder]] of {origin}")
        state[rung.switch] = fast
        variants.append((_label(fast), list(state.values())))
    return variants


def _label(change: SettingChange) -> str:
    return f"{change.key}={word(change.value)}"


def _interleaved(kind: Kind, choices: Sequence[PlannedVariant], wanted: bool | None) -> bool:
    tied = sorted({key for choice in choices for key in choice.overrides} & PROCESS_WIDE)
    if wanted and tied:
        raise UsageError(
            f"{' and '.join(tied)} applies to the whole process: variants that differ in it cannot be interleaved.",
            "Drop --interleave.",
        )
    if wanted and any(map(is_served, choices)):
        raise UsageError(
            "Variants on vLLM servers cannot be interleaved: a server has one set of weights.", "Drop --interleave."
        )
    if kind == "bench" or tied or any(map(is_served, choices)):
        return False
    if wanted is not None:
        return wanted
    models = choices[0].settings.experiment.models
    small = all(model.source.startswith("embedded:") for model in (models.prover, models.verifier))
    return kind == "ablation" and small


def is_served(choice: PlannedVariant) -> bool:
    return choice.settings.experiment.rollout.engine.kind == "vllm"
