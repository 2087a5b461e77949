"""A study's file: its arms, seeds, measures and evaluation, validated before anything runs; loads no torch.

pvg looks up a name in ./studies first, then among its own studies. An arm's settings come from these places, each
overriding the one before: its experiment's file, `[common]`, the arm's `set`, its point in the `[grid]`, and `--set`.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError, field_validator

from pvg import hub
from pvg.bench.workloads import validation_mistake
from pvg.config.base import Count, Section, parse
from pvg.config.experiment import FITTED, Experiment
from pvg.config.load import (
    assign,
    build_experiment,
    chooses_task,
    did_you_mean,
    find_experiment,
    find_named,
    fitted_as,
    kinds_first,
    leaves,
    override_settings,
    read_settings,
    read_toml,
    refuse_unknown,
    shipped_directories,
    switch_note,
)
from pvg.errors import ConfigurationError, PvgError
from pvg.evaluation.report import PARTS, attack_kinds, check_attacks, check_protocol, default_parts
from pvg.inputs import read_text
from pvg.store.run_directory import RUN_NAME, RunDirectory, as_run_name
from pvg.store.run_players import run_sources
from pvg.study.measures import DEFAULT_MEASURES, StudyMeasure, measures_named
from pvg.telemetry.waits import usable_cores

if TYPE_CHECKING:
    from pvg.hub import Say

OF_AN_EVALUATION = ("evaluate", "serving", "telemetry")  # sections that `pvg evaluate` may set for a complete run


def as_evaluated(
    experiment: Experiment, changes: Mapping[str, Any], path: str, overrides: Sequence[str] = ()
) -> Experiment:
    """The settings for evaluating an arm's games; the command line wins over the study's file. Raises
    ConfigurationError."""
    where, data = f"[evaluate] set of {path}", experiment.plain()
    flat = dict(leaves(dict(changes)))
    for key, value in flat.items():
        if key.split(".")[0] not in OF_AN_EVALUATION or "." not in key:
            allowed = ", ".join(f"{section}.*" for section in OF_AN_EVALUATION)
            raise ConfigurationError(
                f"{key} cannot be set here ({where}): it is a setting of the games, and only {allowed} are allowed.",
                "Set it in [common] or in an arm.",
            )
        assign(data, key, value)
    origins = dict.fromkeys(flat, where)
    for key, value, origin in override_settings(overrides):
        if key.split(".")[0] in OF_AN_EVALUATION:
            assign(data, key, value)
            origins[key] = origin
    return build_experiment(data, where, origins)


def check_measures(
    measures: Sequence[StudyMeasure], evaluate: StudyEvaluation | None, arms: Sequence[Arm], path: str
) -> None:
    """Raises ConfigurationError for unknown parts and rounds, for evaluations that `pvg evaluate` would refuse, and for
    measures that would stay empty."""
    if evaluate is None:
        if measure := next((measure for measure in measures if measure.parts), None):
            raise ConfigurationError(
                f"The measure {measure.name!r} needs an evaluation, but {path} has none.",
                "Set evaluate = true, or leave the measure out.",
            )
        return
    for part in evaluate.parts:
        refuse_unknown(f"part {{}} of an evaluation ({path})", part, PARTS, ConfigurationError)
    for arm in arms:
        assert arm.evaluated is not None, "each arm has the settings of the evaluation"
        requested, rounds = evaluate.parts or default_parts(arm.evaluated), arm.evaluated.game.rounds
        try:
            check_protocol(arm.evaluated, requested)
            if "exploit" in requested:
                check_attacks(arm.evaluated)
        except PvgError as error:
            raise ConfigurationError(f"Arm {arm.name!r} of {path}: {error.message}", error.remedy) from None
        if unplayed := [number for number in evaluate.numbers(rounds) if number >= rounds]:
            raise ConfigurationError(
                f"The evaluation of {path} names round {unplayed[0]}, but the games of arm {arm.name!r} have the "
                f"rounds 0 to {rounds - 1}.",
                "Change evaluate.rounds, or game.rounds.",
            )
        for measure in measures:
            if needed := _needed(measure, requested, arm.evaluated):
                raise ConfigurationError(
                    f"The measure {measure.name!r} needs {needed}, which arm {arm.name!r} of {path} does not have.",
                    "Add it if the game has it, or leave the measure out.",
                )


def _needed(measure: StudyMeasure, requested: Sequence[str], experiment: Experiment) -> str:
    """What the evaluation of an arm lacks for the measure; otherwise ""."""
    if part := next((part for part in measure.parts if part not in requested), None):
        return f"the part {part!r} of an evaluation"
    if measure.attack and measure.attack not in attack_kinds(experiment):
        return f"an attack of the kind {measure.attack!r} (evaluate.attacks) whose reward the game can give"
    return f"evaluate.samples = {measure.samples} or more" if experiment.evaluate.samples < measure.samples else ""


# --- the file ---------------------------------------------------------------------------------------------------------

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]

# Settings that the study determines, and where to set them instead.
RESERVED = {
    "seed": "the study's `seeds`",
    "name": "the arm's `name`",
    "models.threads": "the study's `threads`",
    "store.root": "--runs FOLDER",
}


class ArmEntry(Section):
    name: Name
    experiment: str | None = None
    changes: dict[str, Any] = Field(default_factory=dict, alias="set")


def _rounds(value: Any) -> Any:
    if value in ("all", "last"):
        return value
    if not isinstance(value, list | tuple) or not value or not all(type(each) is int and each >= 0 for each in value):
        raise ValueError("rounds must be 'all', 'last' or a list of rounds, such as [0, 2]")
    return tuple(sorted(set(value)))


class StudyEvaluation(Section):
    """`pvg evaluate` for each finished game: its parts (empty: the default parts) and settings."""

    parts: Annotated[tuple[str, ...], Field(strict=False)] = ()
    rounds: Annotated[Literal["all", "last"] | tuple[int, ...], BeforeValidator(_rounds)] = "all"
    changes: dict[str, Any] = Field(default_factory=dict, alias="set")

    def numbers(self, rounds: int) -> list[int]:
        """The rounds to evaluate, of a game with `rounds` rounds."""
        if isinstance(self.rounds, tuple):
            return list(self.rounds)
        return list(range(rounds))[-1:] if self.rounds == "last" else list(range(rounds))


def _evaluate(value: Any) -> Any:
    """Converts `true`, a list of parts, or a table."""
    if isinstance(value, bool):
        return {} if value else None
    return {"parts": value} if isinstance(value, list) else value


def _seeds(value: Any) -> Any:
    """Converts a number of seeds, counted from 0, or a list."""
    if isinstance(value, int) and not isinstance(value, bool):
        if not 1 <= value <= MOST_SEEDS:
            raise ValueError(f"a study needs 1 to {MOST_SEEDS:,} seeds")
        return tuple(range(value))
    return tuple(value) if isinstance(value, list) else value


MOST_SEEDS = 10_000
LONGEST_LABEL, LONGEST_NAME = 60, 100  # of an arm; the name of a run has its seed, too, and at most 120 characters
Seed = Annotated[int, Field(ge=0, lt=2**63)]


class StudyFile(Section):
    """The validated content of a study's file."""

    name: Name
    about: str = ""
    experiment: str = "modchain"
    seeds: Annotated[tuple[Seed, ...], Field(min_length=1), BeforeValidator(_seeds)] = (0, 1, 2, 3, 4)
    measures: Annotated[tuple[str, ...], Field(strict=False, min_length=1)] = DEFAULT_MEASURES
    reference: str | None = None  # the arm with which the others are compared
    gpu: str | None = None  # that `--dry-run` plans for, as in `pvg plan --gpu`
    processes: Count = 1  # number of cells played at a time
    threads: Count | None = None  # per cell; None: the model's default, at most the cores divided by the processes
    common: dict[str, Any] = Field(default_factory=dict)
    arm: tuple[ArmEntry, ...] = Field(default=(), strict=False)
    grid: dict[str, Any] = Field(default_factory=dict)
    evaluate: Annotated[StudyEvaluation | None, BeforeValidator(_evaluate)] = None

    @field_validator("seeds")
    @classmethod
    def _each_once(cls, seeds: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(seeds)) < len(seeds):
            raise ValueError(f"seeds has a seed twice: {list(seeds)}")
        return seeds


@dataclass(frozen=True, slots=True)
class Arm:
    """An arm: one set of settings. `settings`: what it sets itself. `experiment`: all settings without seed and folder.
    `evaluated`: the same with the settings of [evaluate]; None without one. `note`: one line if
    another task drops settings, otherwise empty. `sizes`: the keys of FITTED that the study sets."""

    name: str
    source: str
    settings: dict[str, Any]
    experiment: Experiment
    evaluated: Experiment | None = None
    note: str = ""
    sizes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Cell:
    """One arm with one seed: one run. `evaluated`: settings of its evaluation; None without one. `sizes`: as in Arm."""

    arm: str
    seed: int
    experiment: Experiment
    run: RunDirectory
    evaluated: Experiment | None = None
    sizes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.run.path.name

    def as_played(self, experiment: Experiment) -> Experiment:
        """`experiment` with the sizes that `pvg train` lowered to fit the memory, not those that the study sets."""
        return fitted_as(self.run.experiment(), experiment, self.sizes)

    @property
    def steps(self) -> int:
        """The maximum optimizer steps of the whole game."""
        return self.experiment.arithmetic().optimizer_steps


@dataclass(frozen=True)
class StudyPlan:
    """A study that is ready to play. `text`: the file's content. `overrides`: the changes by --set. `threads`: the
    `models.threads` of all games; 0: the model's default, at most `most_threads`."""

    name: str
    about: str
    file: Path
    text: str
    arms: tuple[Arm, ...]
    seeds: tuple[int, ...]
    measures: tuple[StudyMeasure, ...]
    reference: str | None
    processes: int
    threads: int
    evaluate: StudyEvaluation | None
    folder: Path
    overrides: tuple[str, ...] = ()
    gpu: str | None = None

    @property
    def most_threads(self) -> int:
        """The cores divided by the processes, at least 1."""
        return max(1, usable_cores() // self.processes)

    @property
    def notes(self) -> list[str]:
        """One line for each choice of another task that drops settings."""
        arms: dict[str, list[str]] = {}
        for arm in self.arms:
            if arm.note:
                arms.setdefault(arm.note, []).append(arm.name)
        return [f"{'Arms' if len(names) > 1 else 'Arm'} {', '.join(names)}: {note}" for note, names in arms.items()]

    @property
    def cells(self) -> list[Cell]:
        return [self.cell(arm, seed) for seed in self.seeds for arm in self.arms]

    def cell(self, arm: Arm, seed: int) -> Cell:
        own = self._own(arm.experiment, seed)
        evaluated = None if arm.evaluated is None else self._own(arm.evaluated, seed)
        run = RunDirectory(self.folder / f"{arm.name}-seed-{seed:03d}")
        return Cell(arm.name, seed, own, run, evaluated, arm.sizes)

    def _own(self, experiment: Experiment, seed: int) -> Experiment:
        store = experiment.store.model_copy(update={"root": self.folder})
        models = experiment.models.model_copy(update={"threads": self.threads})
        return experiment.model_copy(update={"seed": seed, "store": store, "models": models})

    @property
    def steps(self) -> int:
        """The maximum optimizer steps of all cells."""
        return sum(cell.steps for cell in self.cells)


# --- reading -----------------------------------------------------------------------------------------------------


def find_study(name: str) -> Path:
    """The file of a study: `name` is a path, a name in ./studies, or the name of a study that comes with pvg."""
    return find_named("study", name, [Path("studies"), *shipped_directories("studies")])


def load_study(
    name_or_file: str,
    overrides: Sequence[str] = (),
    *,
    runs: Path = Path("runs"),
    seeds: int | None = None,
    processes: int | None = None,
    threads: int | None = None,
) -> StudyPlan:
    """Read a study and resolve every arm; the arguments override the file.

    Raises UsageError for an unknown name, ConfigurationError (with the nearest valid key or name) for mistakes in the
    file; it lists the mistakes of all arms.
    """
    path = find_study(name_or_file)
    file = read_study(path)
    arms = resolve_arms(file, str(path), overrides)
    names = [arm.name for arm in arms]
    if file.reference is not None and file.reference not in names:
        raise ConfigurationError(
            f"reference = {file.reference!r} is not an arm of {path}.{did_you_mean(file.reference, names)}",
            f"Arms: {', '.join(names)}.",
        )
    measures = measures_named(file.measures)
    check_measures(measures, file.evaluate, arms, str(path))
    at_a_time = processes or file.processes
    plan = StudyPlan(
        name=file.name,
        about=file.about,
        file=path,
        text=read_text(path),
        arms=tuple(arms),
        seeds=file.seeds if seeds is None else tuple(range(seeds)),
        measures=tuple(measures),
        reference=file.reference,
        processes=at_a_time,
        threads=threads or file.threads or 0,
        evaluate=file.evaluate,
        folder=runs / file.name,
        overrides=tuple(overrides),
        gpu=file.gpu,
    )
    if threads is not None or file.threads is not None:
        return plan
    games = (_first_game(plan, arm) for arm in plan.arms)  # a study keeps the setting of its first games
    return replace(plan, threads=next((game.models.threads for game in games if game is not None), 0))


def read_study(path: Path) -> StudyFile:
    """The validated content of a study's file, without overrides."""
    data = read_toml(path, "study")
    try:
        return StudyFile.model_validate(data)
    except ValidationError as error:
        raise _explained(error, path) from None


def resolve_arms(file: StudyFile, origin: str, overrides: Sequence[str] = ()) -> list[Arm]:
    """Every arm with its whole experiment. Raises ConfigurationError with all mistakes, each with its arm."""
    alone = None if file.grid else ArmEntry(name=as_run_name(Path(file.experiment).stem, LONGEST_LABEL) or "game")
    entries: Sequence[ArmEntry | None] = file.arm or (alone,)
    arms: list[Arm] = []
    mistakes: dict[str, None] = {}
    for entry, (label, point) in itertools.product(entries, _points(file.grid, origin)):
        name = "-".join(part for part in (entry.name if entry else "", label) if part)
        try:
            arms.append(_resolve(name, entry, point, file, origin, overrides))
        except PvgError as error:
            mistakes[str(error)] = None
    if mistakes:
        head = f"{len(mistakes)} mistakes in {origin}: " if len(mistakes) > 1 else ""
        raise ConfigurationError(head + " | ".join(mistakes))
    _refuse_doubles(arms, origin)
    return arms


def _resolve(
    name: str, entry: ArmEntry | None, point: Mapping[str, Any], file: StudyFile, origin: str, overrides: Sequence[str]
) -> Arm:
    if not RUN_NAME.fullmatch(name) or len(name) > LONGEST_NAME:
        raise ConfigurationError(
            f"{name!r} cannot be the name of an arm ({origin}).", "Write an [[arm]] with a shorter name."
        )
    source = entry.experiment if entry and entry.experiment else file.experiment
    data = read_settings(find_experiment(source))
    settings = {**dict(leaves(entry.changes if entry else {})), **point}
    given = kinds_first([(key, value, f"[common] of {origin}") for key, value in leaves(file.common)])
    given += kinds_first([(key, value, f"arm {name!r} of {origin}") for key, value in settings.items()])
    given += override_settings(overrides)
    note = ""
    for key, value, where in given:
        if key in RESERVED:
            raise ConfigurationError(f"{key} cannot be set here ({where}): use {RESERVED[key]}.")
        before = copy.deepcopy(data) if chooses_task(key) else {}
        assign(data, key, value)
        note = switch_note(before, data) or note if chooses_task(key) else note
    origins = {key: where for key, _, where in given}
    experiment = build_experiment(data, f"arm {name!r} of {origin}", origins)
    for key, named in _unpinned(experiment.sources()).items():
        raise ConfigurationError(
            f"{key} = {named!r} has no commit or digest, so two games could use different files (arm {name!r} of "
            f"{origin}).",
            f"`pvg train {source} -s {key}={named} --dry-run` prints it with one.",
        )
    evaluated = None if file.evaluate is None else as_evaluated(experiment, file.evaluate.changes, origin, overrides)
    return Arm(name, source, settings, experiment, evaluated, note, tuple(key for key in FITTED if key in origins))


def _unpinned(sources: Mapping[str, str]) -> dict[str, str]:
    """The sources that may mean other files later: of the hub without a commit, of a run without a digest."""
    found = {key: named for key, named in hub.hub_ids(sources).items() if not parse(named).is_pinned}
    players = run_sources(sources).items()
    return found | {key: str(run_id) for key, run_id in players if run_id.digest is None}


def _points(grid: Mapping[str, Any], origin: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every combination of the grid's values with its label; only ("", {}) without a grid."""
    axes = dict(leaves(dict(grid)))
    for key, values in axes.items():
        if not isinstance(values, list) or not values:
            raise ConfigurationError(f"[grid] {key} must be a list of values ({origin}), not {str(values)[:60]!r}.")
    for values in itertools.product(*axes.values()):
        point = dict(zip(axes, values, strict=True))
        yield "-".join(_label(key, value) for key, value in point.items()), point


def _label(key: str, value: Any) -> str:
    """The label of a value in an arm's name: for text its last part, otherwise the key and the value."""
    if isinstance(value, str):
        return as_run_name(value.replace("\\", "/").replace(":", "/").rstrip("/").rsplit("/", 1)[-1], LONGEST_LABEL)
    return f"{key.rsplit('.', 1)[-1]}-{as_run_name(str(value).lower(), LONGEST_LABEL)}"


def _refuse_doubles(arms: Sequence[Arm], origin: str) -> None:
    games: dict[tuple[str, str], str] = {}
    for arm in arms:
        if arm.name in games.values():
            raise ConfigurationError(f"Two arms of {origin} have the name {arm.name!r}.", "Give each a different name.")
        # The hash leaves out the workers, but they are worth a comparison: they change the last bits of results.
        same = games.setdefault((arm.experiment.hash(), arm.experiment.cluster.model_dump_json()), arm.name)
        if same != arm.name:
            raise ConfigurationError(
                f"The arms {same!r} and {arm.name!r} of {origin} are the same game.",
                "Leave one out: both set the same, or one sets what the other has by default.",
            )


TABLES: dict[str, type[Section]] = {"arm": ArmEntry, "evaluate": StudyEvaluation}


def _explained(error: ValidationError, path: Path) -> ConfigurationError:
    """Pydantic's first error in one line, with the nearest valid key. An unknown key is reported before a missing
    one."""
    first = min(error.errors(), key=lambda found: found["type"] != "extra_forbidden")
    place = [str(part) for part in first["loc"]]
    model: type[Section] = TABLES.get(place[0], StudyFile) if len(place) > 1 else StudyFile
    known = [info.alias or name for name, info in model.model_fields.items()]
    return validation_mistake(first, ".".join(place), known, str(path))


def _first_game(plan: StudyPlan, arm: Arm) -> Experiment | None:
    """The settings of the arm's first game that exists and can be read."""
    for run in (plan.cell(arm, seed).run for seed in plan.seeds):
        try:
            if run.experiment_file.is_file():
                return run.experiment()
        except PvgError:  # damaged: playing or reading the cell reports it
            continue
    return None


# --- what a study costs on a GPU --------------------------------------------------------------------------------------


def costs_of(plan: StudyPlan, gpu: str, price: float | None, say: Say) -> list[dict[str, Any]]:
    """For each arm: estimated hours of all its seeds on a GPU that `pvg plan` knows, if no attack ends early; money at
    a `price` per hour; the peak of memory. Raises UsageError for another GPU, and the errors of `read_shape`."""
    from pvg.planning.evaluation import evaluation_s
    from pvg.planning.plan import plan_here

    found: list[dict[str, Any]] = []
    for arm in plan.arms:
        made, seeds = plan_here(arm.experiment, say, gpu=gpu), len(plan.seeds)
        evaluation = 0.0
        if plan.evaluate is not None and arm.evaluated is not None:
            parts = plan.evaluate.parts or default_parts(arm.evaluated)
            numbers = plan.evaluate.numbers(arm.experiment.game.rounds)
            evaluation = seeds * evaluation_s(arm.evaluated, parts, numbers, made) / 3600
        game = seeds * made.run_s / 3600
        hours: dict[str, Any] = {
            "arm": arm.name,
            "game_hours": game,
            "evaluation_hours": evaluation,
            "hours": game + evaluation,
        }
        peak_gb, fits = max(stage.total for stage in made.memory) / 1e9, all(map(made.fits, made.memory))
        notes, money = [*made.notes, *made.memory_advice], None if price is None else (game + evaluation) * price
        found.append(hours | {"money": money, "peak_gb": peak_gb, "fits": fits, "notes": notes})
    return found
