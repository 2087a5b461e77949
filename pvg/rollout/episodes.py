"""Multi-turn episodes: the prover writes, an environment observes, the prover continues. Tokens in, tokens out.

    groups = await dispatcher.sample(orders, environment=environment, ...)

The prompt of a turn is the exact token ids of everything before it. Sampled text is never tokenized again, so log-probs
stay exact, and a server's prefix cache contains everything but the observation.

All episodes of a call move in lockstep: when the last one has finished a turn, the environment observes all of them at
once. So it can compute in one batch, and a synchronous run always submits the same requests in the same order. A
deadline applies to one turn: its clock starts with the turn's first request, and an episode that it cuts is dropped
entirely.

Invariants:
- The turns of a rollout, concatenated, are its completion.
- `Rollout.sampled_mask` is True exactly for tokens that the engine sampled.
- Each token's version is the engine's version when the token was sampled.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np

from pvg.config.game import ChallengeProtocol
from pvg.records import Float32, Grade, Group, Int32, Problem, Rollout, Timing, Turn, VersionSpan
from pvg.rollout.engine import Completion, Engine, GenerationRequest, Sampling
from pvg.rollout.gathering import (
    Deadline,
    Grader,
    GroupOrder,
    GroupSampling,
    SampleCall,
    all_or_none,
    gatherings_of,
    request_seed,
)

if TYPE_CHECKING:
    from pvg.config.experiment import Experiment


TAG_ROOM, QUOTED_ROOM = 16, 320  # most tokens of a question in the challenge protocol


def completion_room(experiment: Experiment) -> int:
    """The most tokens of a completion, including what the environment writes."""
    rollout, protocol = experiment.rollout, experiment.game.protocol
    if not isinstance(protocol, ChallengeProtocol):
        return rollout.max_tokens
    return rollout.max_tokens + (TAG_ROOM if experiment.prompts.kind == "tag" else QUOTED_ROOM) + protocol.tokens


@dataclass(frozen=True, slots=True)
class Observation:
    """The tokens that an environment adds for the prover: `token_ids` int32 [O], O >= 1, and their `text` for readers.
    The prover may answer with at most `max_tokens` tokens; 0: the episode ends with the observation."""

    token_ids: Int32
    text: str
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Transcript:
    """The part of an episode that an environment sees. The role is left out, because the verifier reads the
    observations.

    `prompt_ids` int32 [P]; `completion_ids` int32 [C] of all turns so far. `turn` is the number of the last turn, from
    0. `stopped`: the turn ended with a stop token.
    """

    id: str
    problem: Problem
    prompt_ids: Int32
    completion_ids: Int32
    turn: int
    stopped: bool


class Environment(Protocol):
    """Independent of tasks and engines. `graded_turn`: the prover turn that the task grades; 0 is the first, -1 the
    last."""

    @property
    def graded_turn(self) -> int: ...

    async def observe(self, transcripts: Sequence[Transcript]) -> list[Observation | None]:
        """The next observation of each episode; None ends it. Each may depend only on its own transcript."""
        ...


class EpisodeSampler(Protocol):
    """The part of the dispatcher that `play_episodes` needs (pvg.rollout.dispatcher.Dispatcher imports this module)."""

    engine: Engine
    grader: Grader
    sampling: Sampling

    def recorded(
        self,
        order: GroupOrder,
        call: SampleCall,
        rollout_id: str,
        completion: Completion,
        text: str,
        grade: Grade,
        turns: tuple[Turn, ...] = (),
    ) -> Rollout: ...


@dataclass(slots=True, eq=False)
class _Episode:
    order: GroupOrder
    index: int
    id: str
    completions: list[Completion] = field(default_factory=list)
    observations: list[Observation] = field(default_factory=list)

    def request(self, sampler: EpisodeSampler, seed: int, tell: Callable[[int], None] | None) -> GenerationRequest:
        turn, sampling = len(self.completions), sampler.sampling
        if not turn:
            return GenerationRequest(
                self.id, self.order.prompt_ids, sampling, seed, on_tokens=tell, group=self.order.group
            )
        sampling = replace(sampling, max_tokens=self.observations[-1].max_tokens)
        prompt_ids = np.concatenate([self.order.prompt_ids, *self.turn_tokens()])
        return GenerationRequest(
            f"{self.id}/{turn}", prompt_ids, sampling, seed, on_tokens=tell, group=self.order.group
        )

    def turn_tokens(self) -> list[Int32]:
        """The token ids of all turns so far, in order."""
        found: list[Int32] = []
        for turn, completion in enumerate(self.completions):
            found.append(completion.token_ids)
            if turn < len(self.observations):
                found.append(self.observations[turn].token_ids)
        return found

    def transcript(self) -> Transcript:
        completion_ids, last = np.concatenate(self.turn_tokens()), self.completions[-1]
        return Transcript(
            self.id,
            self.order.problem,
            self.order.prompt_ids,
            completion_ids,
            len(self.completions) - 1,
            last.finish_reason == "stop",
        )

    @property
    def tokens(self) -> int:
        return sum(len(completion.token_ids) for completion in self.completions)

    def joined(self, texts: Sequence[str]) -> tuple[Completion, tuple[Turn, ...]]:
        """All turns as one completion. `texts`: those of the prover's turns. An episode of one turn gets no turns."""
        tokens_by_turn, logprobs, spans, turns = self.turn_tokens(), list[Float32](), list[VersionSpan](), list[Turn]()
        start = 0
        for place, tokens in enumerate(tokens_by_turn):
            number, observed = divmod(place, 2)
            if observed:
                logprobs.append(np.zeros(len(tokens), dtype=np.float32))
                turns.append(Turn(start, False, self.observations[number].text))
            else:
                completion = self.completions[number]
                logprobs.append(completion.logprobs)
                shifted = [VersionSpan(start + span.start, span.version) for span in completion.spans]
                spans += [span for span in shifted if not spans or span.version != spans[-1].version]
                turns.append(Turn(start, True, texts[number]))
            start += len(tokens)
        whole = Completion(
            self.id,
            np.concatenate(tokens_by_turn),
            np.concatenate(logprobs),
            tuple(spans),
            self.completions[0].finish_reason,  # of the solution, which is graded
            Timing(
                sum(completion.timing.queued_s for completion in self.completions),
                sum(completion.timing.service_s for completion in self.completions),
            ),
            self.completions[0].routed_experts if len(self.completions) == 1 else None,
        )
        return whole, tuple(turns) if len(turns) > 1 else ()


@dataclass(slots=True)
class _EpisodeGroup:
    """The remaining episodes of one order."""

    order: GroupOrder
    episodes: list[_Episode]
    spread_s: float = 0.0
    cancelled: int = 0
    lost_tokens: int = 0


async def play_episodes(
    sampler: EpisodeSampler,
    orders: Sequence[GroupOrder],
    call: SampleCall,
    environment: Environment,
    *,
    bound: AbstractAsyncContextManager[None],
    deadline: Deadline | None = None,
    on_done: Callable[[int], None] | None = None,
) -> list[Group]:
    """See `Dispatcher.sample`. Each request holds `bound`."""
    groups = [
        _EpisodeGroup(order, [_Episode(order, index, call.rollout_id(order, index)) for index in range(order.size)])
        for order in orders
    ]
    waiting = {episode for group in groups for episode in group.episodes}
    turn = 0
    while waiting:
        await _take_turn(sampler, groups, waiting, call, turn, bound, deadline)
        written = [episode for group in groups for episode in group.episodes if episode in waiting]
        observed = await environment.observe([episode.transcript() for episode in written])
        waiting = set()
        for episode, observation in zip(written, observed, strict=True):
            if observation is not None:
                episode.observations.append(observation)
                if observation.max_tokens:
                    waiting.add(episode)
        turn += 1
    grading = [
        [asyncio.create_task(_finished(sampler, episode, call, environment)) for episode in group.episodes]
        for group in groups
    ]
    await all_or_none(grading)
    if on_done is not None:
        on_done(sum(len(group.episodes) for group in groups))
    return [
        Group(
            group.order.problem,
            group.order.role,
            tuple(task.result() for task in tasks),
            group.spread_s,
            cancelled=group.cancelled,
            lost_tokens=group.lost_tokens,
        )
        for group, tasks in zip(groups, grading, strict=True)
    ]


async def _take_turn(
    sampler: EpisodeSampler,
    groups: Sequence[_EpisodeGroup],
    waiting: set[_Episode],
    call: SampleCall,
    turn: int,
    bound: AbstractAsyncContextManager[None],
    deadline: Deadline | None,
) -> None:
    """Sample turn number `turn` of all `waiting` episodes. Removes those that the deadline cut from `groups`."""

    async def one(gathering: GroupSampling[Completion], place: int, episode: _Episode) -> Completion:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(bound)
            if gathering.watch is not None:
                gathering.watch.begin()
            tell = None if gathering.watch is None else partial(gathering.sampled_tokens.__setitem__, place)
            seed = request_seed(call.seed, episode.order.group, episode.index, turn)
            completion = await sampler.engine.generate(episode.request(sampler, seed, tell))
            await gathering.sampled(stack)
        gathering.finishes.append(time.perf_counter())
        return completion

    live = [[episode for episode in group.episodes if episode in waiting] for group in groups]
    gatherings: list[GroupSampling[Completion]] = gatherings_of([group.order for group in groups], deadline)
    for group, episodes, gathering in zip(groups, live, gatherings, strict=True):
        if gathering.watch is not None:
            gathering.watch.count(len(group.episodes) - len(episodes))
    try:
        await all_or_none(
            gathering.start([one(gathering, place, episode) for place, episode in enumerate(episodes)])
            for gathering, episodes in zip(gatherings, live, strict=True)
        )
    finally:
        for gathering in gatherings:
            gathering.stop()
    for group, episodes, gathering in zip(groups, live, gatherings, strict=True):
        cut = gathering.cut
        for place, episode in enumerate(episodes):
            if place not in cut:
                episode.completions.append(gathering.tasks[place].result())
                continue
            group.episodes.remove(episode)
            waiting.discard(episode)
            group.lost_tokens += episode.tokens + gathering.sampled_tokens.get(place, 0)
        group.cancelled += len(cut)
        group.spread_s += gathering.spread_s


async def _finished(sampler: EpisodeSampler, episode: _Episode, call: SampleCall, environment: Environment) -> Rollout:
    texts = [sampler.grader.text(completion) for completion in episode.completions]
    graded = episode.completions[environment.graded_turn]
    _, grade = await sampler.grader.grade(episode.order.problem, graded)
    completion, turns = episode.joined(texts)
    text = "".join(turn.text for turn in turns) if turns else texts[0]
    return sampler.recorded(episode.order, call, episode.id, completion, text, grade, turns)
