"""Play: the starts of a game (pvg.games) as problems. Training plays whole games from them (pvg.game.play_phase)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from queue import Queue
from typing import get_args

from pvg.config.task import OpenEnvTask, PlayTask
from pvg.errors import Closing, ConfigurationError, one_line
from pvg.games import open_game
from pvg.games.game import LostSessionError, PlaysByScript, Script
from pvg.games.openenv import EXECUTION_ERROR, OpenEnvClient, OpenEnvRefusal, OpenEnvReply, prompt_of
from pvg.records import Grade, Problem, Split


class Play(Closing):
    """A context manager: it closes the connections of a game of another project."""

    def __init__(self, section: PlayTask) -> None:
        """Raises ConfigurationError for an unknown game, and if a script should play a game that has none."""
        self.section = section
        self.game = open_game(section.game)
        scripts = sorted({section.opponent, *section.references} & {*get_args(Script)})
        if scripts and not isinstance(self.game, PlaysByScript):
            raise ConfigurationError(
                f"The game {section.game} has no scripts, so {scripts[0]!r} cannot play it.",
                'Set task.references to ["base"], and task.opponent to "self" or "base".',
            )

    def close(self) -> None:
        if (close := getattr(self.game, "close", None)) is not None:
            close()

    def problems(self, split: Split) -> Iterator[Problem]:
        count = self.section.problems if split == "train" else self.section.test_problems
        return (self.game.opening(split, number) for number in range(count))

    def grade(self, problem: Problem, completion: str) -> Grade:
        """Correct and well-formed: a legal first decision of the start's first seat."""
        state = self.game.start(problem)
        action = self.game.parse(state, self.game.seats(state)[0], completion)
        return Grade(action.legal, action.legal, action.text, action.note)


# Environments of an OpenEnv server as a task: a problem is the prompt of `reset`, a grade the reward of one `step`.

REPLY_S = 60.0  # longest wait for a reply
DRAWS_PER_PROBLEM = 2  # seeds that pvg tries per problem, to replace repeated prompts
FIRST_SEED: dict[Split, int] = {"test": 0, "train": 2**30}


class OpenEnv(Closing):
    """The task of one section. It is a context manager, which closes its connections."""

    def __init__(self, section: OpenEnvTask) -> None:
        self._section = section
        self._idle: Queue[OpenEnvClient] = Queue()
        self._clients = [OpenEnvClient(section.url, REPLY_S) for _ in range(section.sessions)]
        for client in self._clients:
            self._idle.put(client)
        self._made: dict[Split, list[Problem]] = {}

    def close(self) -> None:
        for client in self._clients:
            client.close()

    def problems(self, split: Split) -> Iterator[Problem]:
        """As many problems as the section sets, with distinct prompts, none of them in both splits.

        Raises ConfigurationError if the environment does not use its seed or has too few prompts.
        """
        if split not in self._made:
            taken = {problem.question for problem in self.problems("test")} if split == "train" else set()
            with self._client() as client:
                self._made[split] = self._distinct(client, split, taken)
        return iter(self._made[split])

    def grade(self, problem: Problem, completion: str) -> Grade:
        """Raises ServerUnavailableError if the server does not answer, ConfigurationError if the environment does not
        fit (see the module)."""
        if not completion.strip():
            return Grade(correct=False, well_formed=False, note="empty")
        with self._client() as client:
            try:
                return self._graded(client, problem, completion)
            except LostSessionError:
                return self._graded(client, problem, completion)

    def grade_many(self, solutions: Sequence[tuple[Problem, str]]) -> list[Grade]:
        """Uses all sessions at once."""
        if self._section.sessions == 1:
            return [self.grade(problem, completion) for problem, completion in solutions]
        with ThreadPoolExecutor(self._section.sessions) as threads:
            return list(threads.map(lambda solution: self.grade(*solution), solutions))

    @contextmanager
    def _client(self) -> Iterator[OpenEnvClient]:
        client = self._idle.get()
        try:
            yield client
        finally:
            self._idle.put(client)

    def _distinct(self, client: OpenEnvClient, split: Split, taken: set[str]) -> list[Problem]:
        section = self._section
        wanted = section.problems if split == "train" else section.test_problems
        first = FIRST_SEED[split]
        found: list[Problem] = []
        for seed in range(first, first + DRAWS_PER_PROBLEM * wanted):
            prompt = self._prompt(client, seed)
            if prompt not in taken:
                taken.add(prompt)
                digest = hashlib.sha256(prompt.encode(errors="replace")).hexdigest()[:8]
                found.append(Problem(f"openenv-{split}-{seed}-{digest}", prompt, "", {"seed": seed}))
            if len(found) == wanted:
                break
        if found and self._prompt(client, found[0].metadata["seed"]) != found[0].question:
            raise self._unseeded()
        if len(found) < wanted:
            setting = "task.problems" if split == "train" else "task.test_problems"
            raise ConfigurationError(
                f"The environment at {section.url} gave {len(found)} different prompts for "
                f"{DRAWS_PER_PROBLEM * wanted} seeds, but {setting} = {wanted}.",
                f"Set {setting} lower, or use an environment that has more problems.",
            )
        return found

    def _prompt(self, client: OpenEnvClient, seed: int) -> str:
        reply = client.reset(seed=seed)
        if reply.done:
            raise ConfigurationError(f"The environment at {self._section.url} is over before the first step.")
        return prompt_of(self._section.url, reply.observation, self._section.prompt_field)

    def _graded(self, client: OpenEnvClient, problem: Problem, completion: str) -> Grade:
        section = self._section
        if self._prompt(client, problem.metadata["seed"]) != problem.question:
            raise self._unseeded()
        text = completion.encode(errors="replace").decode()
        try:
            reply = client.step({section.action_field: text})
        except OpenEnvRefusal as error:
            if error.code == EXECUTION_ERROR:  # the environment failed on this text
                return Grade(correct=False, well_formed=False, note=error.message)
            if error.code == "VALIDATION_ERROR":
                raise ConfigurationError(
                    f"{error.message} pvg sent the completion in the field {section.action_field!r}.",
                    f"Name the right field of the action: task.action_field. {section.url}/schema lists the fields.",
                ) from None
            raise
        if not reply.done:
            raise ConfigurationError(
                f"An episode of the environment at {section.url} takes more than one step, so it is no task.",
                f'Play it as a game: game = "openenv:{section.url}"',
            )
        return _grade(reply, section.threshold)

    def _unseeded(self) -> ConfigurationError:
        return ConfigurationError(
            f"The environment at {self._section.url} gives another prompt for the same seed.",
            "Use an environment whose reset uses the seed. Otherwise pvg cannot grade it.",
        )


def _grade(reply: OpenEnvReply, threshold: float) -> Grade:
    """`well_formed`, `answer` and `note` come from the observation if it has them, as that of a server of pvg has."""
    reward = reply.reward
    seen = reply.observation
    well_formed, answer, note = seen.get("well_formed"), seen.get("answer"), seen.get("note")
    fallback = "the environment gave no reward" if reward is None else ""
    return Grade(
        correct=reward is not None and reward >= threshold,
        well_formed=well_formed if isinstance(well_formed, bool) else True,
        answer=answer if isinstance(answer, str) else None,
        note=one_line(note) if isinstance(note, str) and note else fallback,
    )
