"""Whole games of Diplomacy: a model decides for all seven powers of several games on the standard map.

    pvg bench --profile games                      # games per minute, and tokens per decision
    pvg bench --profile games --ablate             # all switches slow, then each one fast in turn

A sample plays `workload.games` games from the standard start to the end of `workload.last_year`, through the game
protocol and `play_games`: each decision is a prompt, a completion, and a rollout.

All variants play the same games. `open` plays them once with the game's greedy script and records its orders. In a
sample the engine really samples a completion for each prompt, of exactly rollout.max_tokens tokens. The recorded orders
then take the place of its text, and are read, checked and adjudicated. So the number of decisions, the tokens of a
completion and all positions are equal, although each form of the prompt makes the model write something else. The
figures leave out what a model does with a prompt, and that trained models write completions of different lengths.

The model is the experiment's embedded prover with a longer context. It does not know the language of these prompts. A
token is a piece of the text (`pieces`), about as long as a token of a usual vocabulary; its id is a checksum.

The switches, each with its slow side:

- `prompts`: "verbose" lists the whole board and all legal orders of the power as indented JSON.
- `together`: false plays one game after the other. The powers of one game still decide together.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, Literal, NamedTuple
from zlib import crc32

import numpy as np

from pvg.bench.profile import BenchSettings, workload_settings
from pvg.bench.runner import ChangedWorkError
from pvg.bench.workloads import BenchMetric, Workload
from pvg.bench.workloads.fixtures import digest_of, model_facts
from pvg.config.base import Count, Section
from pvg.config.experiment import Experiment
from pvg.errors import ConfigurationError
from pvg.games.diplomacy.game import Diplomacy, prompt_text, verbose_json
from pvg.games.diplomacy.position import Position
from pvg.games.game import Action
from pvg.models import open_model, pick_device
from pvg.models.compute import ComputeExecutor, compute_executor, width_of
from pvg.models.language_model import LanguageModel
from pvg.records import Int32, Problem, Role, Split
from pvg.rollout import EngineSetup, open_engine
from pvg.rollout.dispatcher import Dispatcher
from pvg.rollout.engine import Sampling
from pvg.rollout.games import GameStart, PlayedGame, play_games
from pvg.rollout.gathering import SampleCall
from pvg.seeds import seed_for
from pvg.tasks import open_task
from pvg.telemetry.events import SilentEvents
from pvg.telemetry.spans import span

CONTEXT = 16_384  # tokens; the longest verbose prompts have about 3,000
FIRST_PLAIN = 3  # lower ids are often special tokens

# A word's part with the space before it, digits, signs, or white space.
PIECE = re.compile(r" ?[A-Za-z]{1,4}|\d{1,2}|[^\sA-Za-z\d]{1,2}|\s+")

MEASURES: Mapping[str, BenchMetric] = {
    "games_per_min": BenchMetric("games/min", "higher", "whole games per minute"),
    "decisions_per_s": BenchMetric("decisions/s", "higher", "decisions of one power per second"),
    "tokens_per_decision": BenchMetric("tokens", "lower", "tokens of prompt and completion of a decision, mean"),
    "engine_batch": BenchMetric("rows", "higher", "unfinished rows per decoding step, mean over the steps"),
}


def pieces(text: str) -> list[str]:
    """The text in pieces of a few characters; joined they are the text."""
    return PIECE.findall(text)


class GamesSettings(Section):
    """The `[workload]` table; see the module. `seed` is that of the recorded orders and of the sampling."""

    games: Count = 16
    last_year: Count = 1902
    seed: int = 0
    prompts: Literal["verbose", "compact"] = "compact"
    together: bool = True


def make(settings: BenchSettings) -> Workload:
    workload, rollout = workload_settings(GamesSettings, settings), settings.experiment.rollout
    if rollout.engine.kind != "torch":
        raise ConfigurationError(
            "The games workload samples in this process, not on servers.", "Set rollout.engine to torch."
        )
    return Games(settings, workload)


# --- the games of the benchmark ---------------------------------------------------------------------------------------


class NumberedPosition(NamedTuple):
    """A position of game `number`."""

    number: int
    position: Position


Recorded = Mapping[tuple[int, str, str], str]  # number of the game, phase, seat -> the orders


class RecordedGame:
    """Diplomacy in which recorded orders replace the text of each completion."""

    def __init__(self, rules: Diplomacy, recorded: Recorded, workload: GamesSettings) -> None:
        self.rules, self._recorded, self._workload = rules, recorded, workload

    def opening(self, split: Split, number: int) -> Problem:
        return Problem(f"diplomacy-{number}", "", "", {"number": number})

    def start(self, problem: Problem) -> NumberedPosition:
        return NumberedPosition(problem.metadata["number"], self.rules.board.start)

    def seats(self, state: NumberedPosition) -> Sequence[str]:
        return self.rules.seats(state.position)

    def phase(self, state: NumberedPosition) -> str:
        return self.rules.phase(state.position)

    def prompt(self, state: NumberedPosition, seat: str, role: Role) -> str:
        form = verbose_json if self._workload.prompts == "verbose" else prompt_text
        with span("prompt"):
            return form(self.rules.board, state.position, self.rules.board.powers.index(seat))

    def parse(self, state: NumberedPosition, seat: str, text: str) -> Action:
        with span("parse"):
            return self.rules.parse(state.position, seat, self._recorded[state.number, state.position.phase, seat])

    def step(self, state: NumberedPosition, actions: Mapping[str, Action], seed: int) -> NumberedPosition:
        with span("adjudicate"):
            return NumberedPosition(state.number, self.rules.step(state.position, actions, seed))

    def values(self, state: NumberedPosition) -> Mapping[str, float]:
        return self.rules.values(state.position)

    def dump(self, state: NumberedPosition) -> bytes:
        return self.rules.dump(state.position)

    def load(self, data: bytes) -> NumberedPosition:
        raise NotImplementedError("the benchmark stores no state")


class Recording(NamedTuple):
    """Games played by a script. `ends`: the last position of each game, dumped."""

    orders: Recorded
    phases: int
    ends: tuple[bytes, ...]


def record(rules: Diplomacy, games: int, seed: int) -> Recording:
    """Play the games with the greedy script, each with its own draws."""
    orders: dict[tuple[int, str, str], str] = {}
    phases, ends = 0, []
    for number in range(games):
        state = rules.board.start
        while seats := rules.seats(state):
            place = (seed, "bench", "games", number, state.phase)
            texts = {seat: rules.scripted("greedy", state, seat, seed_for(*place, seat)) for seat in seats}
            orders |= {(number, state.phase, seat): text for seat, text in texts.items()}
            actions = {seat: rules.parse(state, seat, text) for seat, text in texts.items()}
            state, phases = rules.step(state, actions, 0), phases + 1
        ends.append(rules.dump(state))
    return Recording(orders, phases, tuple(ends))


# --- the workload -----------------------------------------------------------------------------------------------------


class Games:
    """See the module. One sample is all games."""

    measures = MEASURES

    def __init__(self, settings: BenchSettings, workload: GamesSettings) -> None:
        self._experiment, self._workload, self._executor = settings.experiment, workload, settings.executor
        self._rules = Diplomacy(last_year=workload.last_year)
        self._prompt_tokens = 0

    async def open(self) -> None:
        experiment, workload = self._experiment, self._workload
        self._recording = record(self._rules, workload.games, workload.seed)
        self._game = RecordedGame(self._rules, self._recording.orders, workload)
        async with AsyncExitStack() as stack:
            executor = self._executor
            if executor is None:
                executor = stack.enter_context(compute_executor(experiment.models.threads))
            device = pick_device(experiment.models.device)
            self._model = stack.enter_context(executor.submit(open_model, experiment.models.prover, device).result())
            self._model.module.config.max_position_embeddings = CONTEXT
            if isinstance(executor, ComputeExecutor):
                executor.settle(width_of(self._model.module))
            setup = EngineSetup(experiment, self._model, executor, SilentEvents(), "bench", list)
            self._engine = open_engine(setup)
            stack.push_async_callback(self._engine.close)
            await self._engine.ready()
            self._dispatcher = _dispatcher(experiment, self._model, self._engine)
            self._stack = stack.pop_all()  # opened; from now on `close` frees it

    def work(self) -> dict[str, Any]:
        recording, workload = self._recording, self._workload
        ends = (np.frombuffer(end, dtype=np.uint8).astype(np.int32) for end in recording.ends)
        return {
            **model_facts(self._model),
            "games": workload.games,
            "last_year": workload.last_year,
            "phases": recording.phases,
            "decisions": len(recording.orders),
            "completion_tokens": len(recording.orders) * self._experiment.rollout.max_tokens,
            "ends": digest_of(ends),
            "seed": workload.seed,
        }

    async def sample(self, index: int) -> dict[str, float]:
        before, started = self._engine.stats, time.perf_counter()
        with span("rollout"):
            played = await self._played()
        wall_s = time.perf_counter() - started
        self._check(played)
        rollouts = [each.rollout for game in played for each in game.decisions if each.rollout is not None]
        self._prompt_tokens = sum(len(rollout.prompt_ids) for rollout in rollouts)
        tokens = self._prompt_tokens + sum(len(rollout.completion_ids) for rollout in rollouts)
        return {
            "games_per_min": 60 * len(played) / wall_s,
            "decisions_per_s": len(rollouts) / wall_s,
            "tokens_per_decision": tokens / len(rollouts),
            "engine_batch": self._engine.stats.since(before).mean_batch,
        }

    async def _played(self) -> list[PlayedGame[NumberedPosition]]:
        game, workload = self._game, self._workload
        starts = [
            GameStart(problem, game.start(problem))
            for problem in (game.opening("train", number) for number in range(workload.games))
        ]
        call = SampleCall(0, "bench", 0, seed_for(workload.seed, "bench", "requests"), "bench")
        batches = [starts] if workload.together else [[start] for start in starts]
        played: list[PlayedGame[NumberedPosition]] = []
        for batch in batches:
            found = await play_games(self._dispatcher, batch, game, call, encode=self._encode)
            played += [each for group in found for each in group]
        return played

    def _encode(self, text: str) -> Int32:
        with span("tokenize"):
            plain = self._model.tokenizer.vocab_size - FIRST_PLAIN
            return np.array([FIRST_PLAIN + crc32(piece.encode()) % plain for piece in pieces(text)], dtype=np.int32)

    def _check(self, played: Sequence[PlayedGame[NumberedPosition]]) -> None:
        """Raises ChangedWorkError if the games ended elsewhere than the recorded ones."""
        if tuple(self._game.dump(game.states[-1]) for game in played) != self._recording.ends:
            raise ChangedWorkError("The games did not end in the positions in which the recorded games ended.")

    def derived(self) -> dict[str, float]:
        """Of a game: its phases and decisions. Of a decision: the tokens of the prompt."""
        games, decisions = self._workload.games, len(self._recording.orders)
        return {
            "phases_per_game": self._recording.phases / games,
            "decisions_per_game": decisions / games,
            "prompt_tokens": self._prompt_tokens / decisions,
        }

    async def close(self) -> None:
        await self._stack.aclose()


def _dispatcher(experiment: Experiment, model: LanguageModel, engine: Any) -> Dispatcher:
    """Nothing ends a completion before rollout.max_tokens. The dispatcher's task grades nothing here."""
    rollout = experiment.rollout
    sampling = Sampling(rollout.max_tokens, (), rollout.temperature, rollout.top_p, rollout.top_k)
    return Dispatcher(engine, open_task(experiment.task), model.tokenizer, sampling, rollout.concurrency)
