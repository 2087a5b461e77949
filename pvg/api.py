"""pvg as a Python library: play a game, evaluate it, and score texts with the verifier that it trained.

    import pvg

    run = pvg.play("modchain", {"game.rounds": 1}, name="first")          # -> pvg.Run
    print(run.rounds[-1]["helpful_accuracy"])
    with pvg.VerifierScorer.load(run) as scorer:
        print(scorer.score_texts("7+5+8+3+6?", ["7+5=2;2+8=0;0+3=3;3+6=9;A9"]))

`import pvg` loads no torch; playing, evaluating and scoring do. Settings are dotted
keys with their values: what `pvg train -s KEY=VALUE` takes. The calls also work in a notebook.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from fractions import Fraction
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import tomli_w

from pvg.config.experiment import FITTED, Experiment
from pvg.config.load import find_experiment
from pvg.config.load import load_experiment as read_experiment
from pvg.errors import ConfigurationError, UsageError
from pvg.extensions import check_references
from pvg.store.run_directory import RunDirectory, free_name, refuse_name
from pvg.store.state import JsonLinesReader
from pvg.telemetry.events import Observer, SilentObserver
from pvg.telemetry.waits import run_to_end
from pvg.torch_environment import set_torch_environment

if TYPE_CHECKING:
    from pvg.evaluation.report import EvaluationReport
    from pvg.reporting.solutions import Example
    from pvg.verifier.scorer import VerifierScorer

set_torch_environment()

RUNS = Path("runs")
Settings = Mapping[str, Any]


def load_experiment(name: str | Path = "modchain", settings: Settings | None = None) -> Experiment:
    """The experiment `name` with `settings`, validated.

    `name` is a name in ./experiments, a name of an experiment that comes with pvg, or the path of a TOML file.
    `settings` are dotted keys: {"game.rounds": 1}. Raises UsageError for an unknown name and ConfigurationError for a
    setting that is unknown or cannot work; both name the nearest valid one.
    """
    experiment = read_experiment(find_experiment(str(name)), _overrides(settings or {}))
    check_references(experiment.own_code())
    return experiment


def play(
    experiment: str | Path | Experiment = "modchain",
    settings: Settings | None = None,
    *,
    name: str | None = None,
    observer: Observer | None = None,
) -> Run:
    """Play a whole game and return its run.

    `experiment` and `settings` are those of `load_experiment`; an `Experiment` is played as it is. `name` is the name
    of the run's folder. Without one it is the experiment's name, with a number if that folder exists. `observer`
    receives every phase, step and alert. A call that is stopped or killed loses nothing that was committed: continue
    with `Run(path).resume()`.

    Raises UsageError if the run exists or another thread plays a game, ConfigurationError for settings that cannot
    work, MissingRequirementError for what this machine lacks, TrainingDivergedError for weights that are not finite.
    """
    from pvg.hub import fetch_all, pinned
    from pvg.planning.plan import fitted_here
    from pvg.store.run_players import pinned_players
    from pvg.telemetry.cpu import precision_warnings
    from pvg.workers.choice import with_workers

    watching = observer or SilentObserver()
    if not isinstance(experiment, Experiment):
        chosen = load_experiment(experiment, settings)
    elif settings:
        raise UsageError("Settings cannot be changed in an Experiment.", "Give its name or its file instead.")
    else:
        chosen = experiment
    for line in precision_warnings(chosen):
        watching.noticed(line)
    sources = pinned_players(pinned(chosen.sources(), watching.noticed))
    chosen = with_workers(chosen.with_sources(sources))
    fetch_all(sources, watching.noticed)
    kept = FITTED if isinstance(experiment, Experiment) else settings or ()
    chosen, line = fitted_here(chosen, watching.noticed, chosen=kept, force=True)
    if line:
        watching.noticed(line)
    root = chosen.store.root.absolute()
    if name is not None:
        refuse_name(name)
    directory = RunDirectory.create(root, free_name(root, chosen.name) if name is None else name, chosen)
    return _played(directory, chosen, watching, resume=False)


def evaluate(
    run: Run,
    *,
    parts: Sequence[str] | None = None,
    rounds: Sequence[int] | None = None,
    settings: Settings | None = None,
    observer: Observer | None = None,
) -> EvaluationReport:
    """Measure finished rounds of `run` with fresh samples and fresh attackers: what `pvg evaluate` does.

    `parts`: of "exploit", "best-of-n", "detection", "separability", "calibration", "localisation", "cross",
    "legibility", "tax"; None: all that fit the game, without legibility. `rounds`: their numbers; None: all finished
    ones. Finished parts are kept in the run's folder and are not computed again.

    Raises UsageError for a part or a round that does not exist, StateError for other settings than those
    that the run was played with; `evaluate.*`, `serving.*`, `telemetry.*` and those that bound memory may differ.
    """
    from pvg.evaluation.report import default_parts, parse_parts, settings_to_evaluate
    from pvg.evaluation.runner import evaluate as measure

    experiment = settings_to_evaluate(run.directory, _overrides(settings or {}))
    wanted = default_parts(experiment) if parts is None else parse_parts(",".join(parts))
    watching = observer or SilentObserver()
    with _alone(), run.directory.lock(work="evaluate"):
        outcome = run_to_end(
            lambda: measure(experiment, run.directory, wanted, rounds, observer=watching, stop=asyncio.Event())
        )
    return outcome.report


class Run:
    """A run on the disk: what `play` returns, and what `Run("runs/NAME")` opens. Reading it needs no torch.

    Each access reads the files again, so you can watch a run that another process plays. `path` is absolute, so a
    change of the working directory does not matter.
    """

    def __init__(self, run: str | Path) -> None:
        """`run`: a path, or the name of a run in ./runs. Otherwise raises UsageError that names the nearest."""
        self.directory = RunDirectory(RunDirectory.open(run, RUNS).path.absolute())

    def __repr__(self) -> str:
        return f"Run({self.directory.argument!r})"

    def _repr_html_(self) -> str:
        """In a notebook: state, rounds, solutions of both roles, and the evaluation."""
        from pvg.reporting.run_page import run_html

        return run_html(self.directory)

    @property
    def name(self) -> str:
        return self.directory.name

    @property
    def path(self) -> Path:
        return self.directory.path

    @property
    def experiment(self) -> Experiment:
        """The settings that the run was created with."""
        return self.directory.experiment()

    @property
    def status(self) -> str:
        """ "empty", "samples", "unfinished" or "complete"."""
        from pvg.reporting.run_summary import status_of

        return status_of(self._state())

    @property
    def rounds(self) -> list[dict[str, float | None]]:
        """The metrics of each finished round, from fresh samples on test problems. None: a mean of no values."""
        return [dict(metrics) for metrics in self._state().get("rounds", ())]

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """All records of metrics.jsonl: dicts with `kind` ("step", "phase", "round", ...) and `metrics`."""
        return list(JsonLinesReader(self.directory.metrics)) if self.directory.metrics.is_file() else []

    @property
    def weights(self) -> dict[str, Path]:
        """The folders of the committed weights (safetensors), by name: "round-000-prover", "round-000-verifier"."""
        return {name: self.directory.weights / name for name in self._state().get("weights", ())}

    def examples(self, each: int = 2) -> list[Example]:
        """Sample solutions of the newest prover: `each` sneaky flaws with the highest scores, and `each`
        typical correct solutions."""
        from pvg.reporting.solutions import choose_examples

        return choose_examples(self.directory, each)

    def resume(self, observer: Observer | None = None) -> Run:
        """Play on from the last commit to the end. Raises UsageError if the run is complete."""
        from pvg.reporting.run_summary import has_ended

        if has_ended(self._state(), self.experiment):
            raise UsageError(
                f"The run {self.name!r} is complete.",
                "Play a new run with pvg.play, or give this one another round: "
                f"pvg train --resume {self.directory.argument} -s game.rounds={self.experiment.game.rounds + 1}",
            )
        return _played(self.directory, self.experiment, observer or SilentObserver(), resume=True)

    def open_scorer(self, round: int = -1) -> VerifierScorer:
        """The scorer of a round's verifier; see `VerifierScorer.load`."""
        from pvg.export.finished import FinishedRound

        return FinishedRound.open(self.directory, round).scorer()

    def _state(self) -> dict[str, Any]:
        return self.directory.load_state().state or {}


def _overrides(settings: Settings) -> list[str]:
    """Settings as the strings that `-s` takes, so that both mean the same."""
    found = []
    for key, value in settings.items():
        plain = _plain(value)
        if plain is None or isinstance(plain, Mapping):
            raise UsageError(f"The setting {key!r} is {plain!r}.", "Give each setting as a dotted key with a value.")
        try:
            found.append(f"{key}={tomli_w.dumps({'value': plain}).removeprefix('value = ').rstrip()}")
        except (TypeError, ValueError):
            raise ConfigurationError(
                f"{key}: the value is a {type(value).__name__}, which no setting can have.",
                "Give a number, a text, True, False, or a list of these.",
            ) from None
    return found


def _plain(value: Any) -> Any:
    """Python's own value of a path, an enum, a fraction, or an array or scalar of numpy or torch; others as they are. A
    float of 16 or 32 bits becomes the shortest one that means it: 0.1 instead of 0.10000000149011612."""
    if isinstance(value, Enum):
        return _plain(value.value)
    if isinstance(value, Path | Fraction):
        return str(value) if isinstance(value, Path) else value.numerator if value.denominator == 1 else float(value)
    if isinstance(value, list | tuple) or (hasattr(value, "ndim") and value.ndim):
        return [_plain(item) for item in value]
    plain = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(plain, float) and plain is not value:
        shorter = (float(f"{plain:.{digits}g}") for digits in range(1, 18))
        return next((short for short in shorter if value == short), plain)
    return plain


_PLAYING = Lock()


@contextmanager
def _alone() -> Iterator[None]:
    """Raises UsageError while another thread plays or evaluates a game: both would draw from torch's generator."""
    if not _PLAYING.acquire(blocking=False):
        raise UsageError(
            "Another thread of this process plays or evaluates a game.",
            "Wait for it, or use processes: concurrent.futures.ProcessPoolExecutor",
        )
    try:
        yield
    finally:
        _PLAYING.release()


def _played(directory: RunDirectory, experiment: Experiment, observer: Observer, *, resume: bool) -> Run:
    with directory.lock(discard=lambda: not resume and not directory.has_state), _alone():
        from pvg.game.run import play as play_run

        run_to_end(lambda: play_run(experiment, directory, observer=observer, stop=asyncio.Event(), resume=resume))
    return Run(directory.path)
