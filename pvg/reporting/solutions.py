"""Solutions of a run from its committed shards: examples, scores by kind, and the page with all stored solutions.

Examples come from the newest round with scored solutions: the sneaky flaws with the highest scores, each with a helpful
solution of the same problem.
"""

from __future__ import annotations

import base64
import gzip
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from pvg.errors import StateError, counted
from pvg.records import BASE_SOURCE, Role, Rollout, flaw_kind, source_of_round
from pvg.reporting.formats import phase_label
from pvg.reporting.run_summary import RunSummary
from pvg.reporting.table import PageKind, TemplateMacros, elements, page, showable
from pvg.store.run_directory import RunDirectory
from pvg.store.shards import RolloutShards, ShardInfo
from pvg.store.state import FileStateStore

LONGEST_LINE = 400  # characters of an answer and of a grader's note, which a user's task may write
MOST_REASONS = 5  # why solutions are malformed
LONGEST = 4000  # characters of a solution; the rest can be read in the shard
STEP = re.compile(r"\bstep (\d+)\b")


@dataclass(frozen=True, slots=True)
class ShownSolution:
    """A solution as the page shows it: `pieces` of its text, the number `wrong` of the marked piece (-1: none), and the
    texts before and after it."""

    example: Example
    score: str
    grade: str
    pieces: list[str]
    wrong: int
    before: list[str]
    after: list[str]


def shown_solution(example: Example, threshold: float | None, longest: int = LONGEST) -> ShownSolution:
    """An example as a page shows it, with at most `longest` characters of each text."""
    score = "" if example.score is None else _scored_line(example.score, threshold)
    pieces, wrong = text_pieces(example.text, example.note, longest)
    verdict = "correct" if example.correct else ("wrong" if example.well_formed else "malformed")
    answer = f"answer {example.answer}" if example.answer is not None else "no answer"
    note = example.note.removeprefix("malformed: ")
    grade = f"{verdict}: {answer}" + (f", {note}" if note else "")
    before = [] if example.solver_text is None else [f"solver: {shortened(example.solver_text, longest)}"]
    after = [_turn_line(turn, threshold, longest) for turn in example.dialogue[1:]]
    if example.dialogue and example.dialogue[0][2] is not None:
        after.insert(0, f"after the solution: {_scored_line(example.dialogue[0][2], threshold)}")
    return ShownSolution(example, score, grade, pieces, wrong, before, after)


def _scored_line(score: float, threshold: float | None) -> str:
    return ", ".join(filter(None, [f"score {score:+.3f}", verdict_word(score, threshold)]))


def _turn_line(turn: tuple[str, str, float | None], threshold: float | None, longest: int) -> str:
    seat, text, score = turn
    return f"{seat}: {shortened(text, longest)}" + ("" if score is None else f" ({_scored_line(score, threshold)})")


def text_pieces(text: str, note: str, longest: int = LONGEST) -> tuple[list[str], int]:
    """The steps of a text, and the number of the step that the grader's note names: the last step if the note names
    the final answer, -1 if it names no step."""
    # Lines, or parts between semicolons if there is one line, each with its separator.
    pieces = re.findall(r"[^\n]*\n+|[^\n]+" if "\n" in text[:longest].strip() else r"[^;]*;|[^;]+", text[:longest])
    match = STEP.search(note)
    last = len(pieces) - 1 if "final answer" in note and "no final" not in note else -1
    place = int(match[1]) - 1 if match else last
    wrong = place if 0 <= place < len(pieces) else -1
    rest = [shortened(text, longest)[longest:]] if len(text) > longest else []
    return [*pieces, *rest], wrong


def shortened(text: str, longest: int) -> str:
    """The first `longest` characters, and how many more there are."""
    return text if len(text) <= longest else f"{text[:longest]} … and {len(text) - longest} more characters"


def _line(text: str, longest: int) -> str:
    return shortened(" ".join(text.split()), longest)


EVALUATION = "checkpoint"  # its samples are fresh, of both roles, and on problems that no model trained on


@dataclass(frozen=True, slots=True)
class Example:
    """A solution to show; `why`: the reason for choosing it."""

    why: str
    id: str
    role: str
    round: int
    source: str
    question: str
    text: str
    reference: str
    answer: str | None
    correct: bool
    well_formed: bool
    note: str
    score: float | None
    reward: float | None
    solver_text: str | None = None  # what a translation was made of
    dialogue: tuple[tuple[str, str, float | None], ...] = ()  # the turns: writer, text, the score after it

    def plain(self) -> dict[str, Any]:
        return asdict(self)

    def _repr_html_(self) -> str:
        shown = TemplateMacros("run.html.j2")
        return str(shown.notebook([shown.pairing(self.question, self.reference, [shown_solution(self, None)])]))


def choose_examples(run: RunDirectory, each: int = 2) -> list[Example]:
    """The solutions of `solution_pairs`, one after the other, the sneaky ones first."""
    return [side for pair in solution_pairs(run, each) for side in reversed(pair)]


def solution_pairs(run: RunDirectory, each: int) -> list[list[Example]]:
    """At most `each` problems of the newest round with scores: the flaws with the highest scores, each with a helpful
    solution of the same problem. If no flaw has one: also helpful solutions with scores near the median. Without
    scores (`pvg rollout`), any solutions. Empty when nothing is committed. Each pair has the helpful solution first;
    either may be missing.

    Raises DamagedFileError when a committed shard that is looked at is damaged.
    """
    shards, infos = RolloutShards(run.path), _newest_first(committed_shards(run))
    rollouts = next(scored_rollouts(run), None) or next(filter(None, map(shards.read, infos)), [])
    helpful: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        if rollout.role is Role.HELPFUL:
            helpful.setdefault(rollout.problem_id, []).append(rollout)
    # Flaws with a helpful partner come first, because readers can compare them.
    flaws = sorted((r for r in rollouts if r.is_flaw), key=lambda r: (r.problem_id in helpful, _score(r)), reverse=True)
    pairs = []
    for flaw in _distinct(flaws, each):
        partners = sorted(helpful.get(flaw.problem_id, []), key=lambda r: not r.grade.correct)
        pair = [example_of(partner, "a solution of the same problem") for partner in partners[:1]]
        pairs.append([*pair, example_of(flaw, "a flaw" if flaw.score is None else "a flaw with a high score")])
    if any(len(pair) > 1 for pair in pairs):
        return pairs
    solutions = [r for r in rollouts if r.role is Role.HELPFUL]
    ranked = sorted([r for r in solutions if r.grade.correct] or solutions, key=_score)
    middle = _score(ranked[len(ranked) // 2]) if ranked else 0.0
    alone = _distinct(sorted(ranked, key=lambda r: abs(_score(r) - middle)), each)
    return pairs + [[example_of(r, "a solution")] for r in alone]


def scored_rollouts(run: RunDirectory) -> Iterator[list[Rollout]]:
    """The solutions of each round's prover, newest round first: of the evaluation, or of the last phase that has scored
    solutions. Rounds without scores are left out.

    Raises DamagedFileError when a committed shard that is looked at is damaged.
    """
    infos, shards = committed_shards(run), RolloutShards(run.path)
    for round_ in sorted({info.round for info in infos}, reverse=True):
        # The phases of one round, best first. Usually only the evaluation's shard is read.
        for info in _newest_first([info for info in infos if info.round == round_]):
            rollouts = shards.read(info)
            if any(rollout.score is not None for rollout in rollouts):
                sources = {rollout.source for rollout in rollouts if rollout.score is not None}
                newest = max(sources, key=lambda source: (source != BASE_SOURCE, source))  # the base prover is first
                yield [rollout for rollout in rollouts if rollout.source == newest]
                break


def what_was_sampled(run: RunDirectory) -> list[str]:
    """Sentences on the samples of `pvg rollout`: what a verifier could learn from, how each role did, and why solutions
    are malformed."""
    shards = RolloutShards(run.path)
    rollouts = [rollout for info in committed_shards(run) for rollout in shards.read(info)]
    seen: dict[str, set[bool]] = {}
    for rollout in rollouts:
        seen.setdefault(rollout.problem_id, set()).add(rollout.grade.correct)
    both = sum(len(kinds) == 2 for kinds in seen.values())
    says = [f"{both} of {counted(len(seen), 'problem')} have both correct and wrong solutions, which a verifier needs."]
    for role in Role:
        if own := [rollout for rollout in rollouts if rollout.role is role]:
            correct = sum(rollout.grade.correct for rollout in own)
            malformed = sum(not rollout.grade.well_formed for rollout in own)
            cut = sum(rollout.finish_reason == "length" for rollout in own)
            of = f"{correct} of {counted(len(own), 'solution')} correct"
            says.append(f"{role.value}: {of}, {malformed} malformed, {cut} cut off at rollout.max_tokens.")
    kinds = Counter(flaw_kind(r.grade.note) or "no reason given" for r in rollouts if not r.grade.well_formed)
    if kinds:
        reasons = (f"{count} {kind}" for kind, count in kinds.most_common(MOST_REASONS))
        says.append(f"Malformed: {', '.join(reasons)}.")
    return says


def committed_shards(run: RunDirectory) -> list[ShardInfo]:
    """The shards of the last commit; empty if there is none."""
    try:
        state = FileStateStore(run.state).load().state or {}
    except StateError:  # no commit is valid; the run's summary notes it
        return []
    return [ShardInfo.from_plain(plain) for plain in state.get("shards", ())]


def _newest_first(infos: Sequence[ShardInfo]) -> list[ShardInfo]:
    """The last shard of every phase: newest round first, within a round the evaluation first."""
    last: dict[tuple[int, str], tuple[int, ShardInfo]] = {}
    for place, info in enumerate(infos):
        last[info.round, phase_of(info)] = (place, info)
    ranked = sorted(last, key=lambda key: (key[0], key[1] == EVALUATION, last[key][0]), reverse=True)
    return [last[key][1] for key in ranked]


def phase_of(info: ShardInfo) -> str:
    return info.label.rsplit("-", 1)[0]


def _score(rollout: Rollout) -> float:
    return rollout.score if rollout.score is not None else 0.0


def _distinct(rollouts: Sequence[Rollout], most: int) -> list[Rollout]:
    """The first `most` solutions of different problems."""
    found: dict[str, Rollout] = {}
    for rollout in rollouts:
        found.setdefault(rollout.problem_id, rollout)
    return list(found.values())[:most]


def example_of(rollout: Rollout, why: str, longest: int = LONGEST, line: int = LONGEST_LINE) -> Example:
    """A rollout as an example; `longest` and `line` bound what the task wrote, in characters."""
    return Example(
        why=why,
        id=rollout.id,
        role=rollout.role.value,
        round=rollout.round,
        source=rollout.source,
        question=shortened(rollout.question, longest),
        text=rollout.turns[0].text if rollout.turns else rollout.text,
        reference=_line(rollout.reference, line),
        answer=None if rollout.grade.answer is None else _line(rollout.grade.answer, line),
        correct=rollout.grade.correct,
        well_formed=rollout.grade.well_formed,
        note=_line(rollout.grade.note, line),
        score=rollout.score,
        reward=rollout.reward,
        solver_text=None if rollout.solver is None else rollout.solver.text,
        dialogue=tuple((turn.seat, turn.text.strip(), turn.score) for turn in rollout.turns),
    )


# The verifier's scores of each round's solutions, by kind. Those of a finished round come from the evaluation's samples
# (fresh, both roles, problems that no model trained on), those of an unfinished round from the prover's newest shard.

PROVER = "train_prover"
SCORED_KINDS = ("helpful correct", "helpful wrong", "sneaky flaw", "sneaky correct")


@dataclass(frozen=True, slots=True)
class RoundScores:
    """Scores by kind, float64 [n] each; `fresh`: from the evaluation, not from training. `threshold` may be unknown."""

    round: int
    fresh: bool
    threshold: float | None
    kinds: dict[str, NDArray[np.float64]]

    def accepted(self, kind: str) -> float | None:
        """The share of a kind at or above the threshold."""
        scores = self.kinds[kind]
        return float((scores >= self.threshold).mean()) if self.threshold is not None and len(scores) else None


def round_scores(run: RunDirectory, summary: RunSummary) -> list[RoundScores]:
    """The scores of every round with scored solutions, in order. Raises DamagedFileError for a damaged shard."""
    shards, infos = RolloutShards(run.path), committed_shards(run)
    found = []
    for round_ in sorted({info.round for info in infos}):
        own = [info for info in infos if info.round == round_]
        evaluated = [info for info in own if phase_of(info) == EVALUATION]
        trained = [info for info in own if phase_of(info) == PROVER][-1:]
        kinds: dict[str, list[float]] = {kind: [] for kind in SCORED_KINDS}
        for info in evaluated or trained:
            for rollout in shards.read(info):
                kind = _kind(rollout)
                if rollout.score is not None and kind and rollout.source == source_of_round(round_):
                    kinds[kind].append(rollout.score)
        if any(kinds.values()):
            scores = {kind: np.array(values, dtype=np.float64) for kind, values in kinds.items()}
            found.append(RoundScores(round_, bool(evaluated), threshold_of(summary, round_), scores))
    return found


def _kind(rollout: Rollout) -> str:
    """Of wrong sneaky solutions only flaws count: a malformed text is not a solution, and one without the certificate
    that its task requires may be wrong by accident."""
    if rollout.role is Role.HELPFUL:
        return "helpful correct" if rollout.grade.correct else "helpful wrong"
    return "sneaky correct" if rollout.grade.correct else "sneaky flaw" if rollout.is_flaw else ""


def threshold_of(summary: RunSummary, round_: int) -> float | None:
    """The verifier's acceptance threshold in a round; None if it is not known."""
    found = [summary.rounds.get(round_, {}), *(phase.metrics for phase in summary.phases if phase.round == round_)]
    return next((metrics["threshold"] for metrics in found if "threshold" in metrics), None)


def verdict_word(score: float | None, threshold: float | None) -> str:
    """What the verifier decides; empty without a score or a threshold."""
    return "" if score is None or threshold is None else "accepted" if score >= threshold else "refused"


# --- the page with all stored solutions: a browser searches and filters them without a server ----------------------

MOST_CHARACTERS = 60_000_000  # 25,000 solutions of 2,000 characters; a browser unpacks them in about a second
LONGEST_STORED = 100_000  # characters of one text
LEVEL = 5  # of gzip
PAGE = 50  # solutions of one page of the list
markup = TemplateMacros("rollouts.html.j2")


@dataclass
class StoredRollouts:
    """Solutions, the newest first. `rows`: each as JSON. `problems`: (id, question, reference), to which the rows refer
    by number. `left_out`: older solutions that do not fit. `notes`: sentences about shards that cannot be read."""

    rows: list[bytes] = field(default_factory=list)
    problems: dict[tuple[str, str, str], int] = field(default_factory=dict)
    rounds: set[int] = field(default_factory=set)
    phases: dict[str, str] = field(default_factory=dict)
    left_out: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def count(self) -> int:
        return len(self.rows)


def stored_rollouts(run: RunDirectory, summary: RunSummary, most: int = MOST_CHARACTERS) -> StoredRollouts:
    """The solutions of the last commit, from the newest on, until they have `most` characters."""
    stored, shards, room = StoredRollouts(), RolloutShards(run.path), most
    for info in reversed(committed_shards(run)):
        if room <= 0:
            stored.left_out += info.rows
            continue
        try:
            rollouts = shards.read(info)
        except StateError as error:
            stored.notes.append(str(error))
            continue
        for rollout in reversed(rollouts):
            row = _row(stored, rollout, phase_of(info), threshold_of(summary, rollout.round))
            room -= len(row)
            if room > 0:
                stored.rows.append(row)
            else:
                stored.left_out += 1
    return stored


def _row(stored: StoredRollouts, rollout: Rollout, phase: str, threshold: float | None) -> bytes:
    """`text`: what comes before the wrong step, the wrong step, and what follows it."""
    side = shown_solution(example_of(rollout, "", LONGEST_STORED, LONGEST_STORED), threshold, LONGEST_STORED)
    wrong = side.wrong if side.wrong >= 0 else len(side.pieces)
    pieces = (side.pieces[:wrong], side.pieces[wrong : wrong + 1], side.pieces[wrong + 1 :])
    question, reference = (_shown(shortened(text, LONGEST_STORED)) for text in (rollout.question, rollout.reference))
    problem = (_shown(rollout.problem_id), question, reference)
    read = (("SR", rollout.sr), ("CIR", rollout.cir))
    stored.rounds.add(rollout.round)
    stored.phases[phase] = phase_label(phase)
    return orjson.dumps(
        {
            "problem": stored.problems.setdefault(problem, len(stored.problems)),
            "role": rollout.role.value,
            "grade": _grade_word(rollout),
            "verdict": verdict_word(rollout.score, threshold),
            "phase": phase,
            "label": phase_label(phase),
            "round": rollout.round,
            "step": rollout.step,
            "tokens": rollout.sampled_tokens,
            "score": None if rollout.score is None else round(rollout.score, 6),
            "reward": None if rollout.reward is None else round(rollout.reward, 6),
            "read": ", ".join(f"{name} {value:.2f}" for name, value in read if value is not None),
            "id": _shown(rollout.id),
            "text": [_shown("".join(part)) for part in pieces],
            "said": _shown(shortened(side.grade, LONGEST_STORED)),
            "before": [_shown(text) for text in side.before],
            "after": [_shown(text) for text in side.after],
        }
    )


def _grade_word(rollout: Rollout) -> str:
    """The narrowest that fits. "flaw": a wrong sneaky solution that is well formed (and proven, if the task requires
    that)."""
    if not rollout.grade.well_formed:
        return "malformed"
    return "correct" if rollout.grade.correct else "flaw" if rollout.is_flaw else "wrong"


def _shown(text: str) -> str:
    return str(showable(text))


def rollouts_file(stored: StoredRollouts, run: RunDirectory, summary: RunSummary, report: str) -> str:
    """The whole page. `report`: the file name of the run's page, which is beside it."""
    title = elements.title("All rollouts", summary.name)
    browser = markup.browser(markup.form(sorted(stored.rounds), stored.phases))
    body = [elements.notes(_notes(stored, run)), browser, markup.packed(_packed(stored))]
    return page(f"{summary.name}: rollouts", [title, *body], [], rollouts_kind(report))


def _packed(stored: StoredRollouts) -> str:
    """All solutions as JSON, compressed, as base64."""
    head = orjson.dumps({"page": PAGE, "problems": list(stored.problems)})
    found = head[:-1] + b',"rows":[' + b",".join(stored.rows) + b"]}"
    return base64.b64encode(gzip.compress(found, LEVEL, mtime=0)).decode()


def rollouts_kind(report: str) -> PageKind:
    """What the page may do. `report`: the address of the run's page."""
    policy, links = "form-action 'none'; base-uri 'none'", ((report, "Report"),)
    return PageKind(("page.js", "rollouts.js"), policy, ("rollouts.css",), links)


def _notes(stored: StoredRollouts, run: RunDirectory) -> list[str]:
    if not stored.left_out:
        return stored.notes
    newest = f"the newest {counted(stored.count, 'solution')} of {stored.count + stored.left_out:,}"
    says = f"This page has {newest}, so that a browser can open it. {run.argument}/rollouts has all of them."
    return [says, *stored.notes]
