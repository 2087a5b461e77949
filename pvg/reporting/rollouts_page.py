"""The pages that list the stored solutions of a run, and that show one of them with everything that is known of it.

They are plain HTML forms and links, so they need no script. All text of models goes through the templates' escaping.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import get_args
from urllib.parse import urlencode

from markupsafe import Markup

from pvg.config.experiment import Experiment
from pvg.config.hub_ids import is_hub_id, parse
from pvg.config.load import embedded_model
from pvg.errors import PvgError, counted
from pvg.inputs import expanded
from pvg.records import Int32, Rollout
from pvg.reporting.formats import phase_label, short_seconds
from pvg.reporting.rollouts import (
    FIELD_LABELS,
    ROLES,
    RolloutGrade,
    RolloutIndex,
    RolloutOrder,
    RolloutQuery,
    RolloutRow,
)
from pvg.reporting.run_summary import RunSummary
from pvg.reporting.shown_solutions import rollout_side
from pvg.reporting.solutions import threshold_of, verdict_word
from pvg.reporting.table import PageKind, PageSection, TemplateMacros, elements, page
from pvg.store.run_players import base_source

markup = TemplateMacros("rollouts.html.j2")

ROWS = 50  # of one page of a list
LINE = 400  # characters of a text in a list
ORDERS = {"highest": "highest score", "lowest": "lowest score"}
LONGEST = 1_000_000  # characters of a text on its own page
KIND = PageKind(
    policy="form-action 'self'; base-uri 'none'",
    sheets=("rollouts.css",),
    links=(("/", "Run"), ("/rollouts", "All rollouts")),
    footer="pvg watch serves this page from this machine. It loads nothing from elsewhere.",
)


@dataclass(frozen=True, slots=True)
class ListedRollout:
    """A row with its link, and whether the verifier accepted it ("" if that is not known)."""

    row: RolloutRow
    link: str
    verdict: str
    place: str


def rollouts_page(index: RolloutIndex, summary: RunSummary, fields: dict[str, str], unread: int) -> str:
    """One page of the list. `fields`: of the form; `unread`: shards that are not in the index yet."""
    query, problems = RolloutQuery.of(fields)
    found = index.find(query)
    pages = max(1, -(-len(found) // ROWS))
    number = min(pages, max(1, int(fields["page"]) if fields.get("page", "").isdecimal() else 1))
    listed = [_listed(row, summary) for row in index.rows(found[(number - 1) * ROWS : number * ROWS], LINE)]
    notes = [*problems, *index.problems]
    if unread:
        notes.append(f"{counted(unread, 'file')} of solutions are still being read. Load this page again to see more.")
    form = query_form(query, index.rounds, index.phases, action="/rollouts")
    first = (number - 1) * ROWS + 1
    count = f"{counted(len(found), 'solution')} of {len(index):,}"
    if listed:
        count += f"; shown: {first:,} to {first + len(listed) - 1:,}"
    title = elements.title("All rollouts", summary.name)
    body = [form, elements.notes(notes), markup.count(count), markup.listing(listed), _pages(query, number, pages)]
    return page(f"{summary.name}: rollouts", [title, *body], [], KIND)


def query_form(query: RolloutQuery, rounds: Sequence[int], phases: Sequence[str], action: str) -> Markup:
    """The fields of a query. `action`: the address that gets them; empty if the page's script reads them."""
    choices = {
        "role": ROLES,
        "grade": get_args(RolloutGrade),
        "round": rounds,
        "phase": [(phase, phase_label(phase)) for phase in phases],
        "order": [(order, ORDERS.get(order, order)) for order in get_args(RolloutOrder)],
    }
    return markup.form(query, choices, FIELD_LABELS, action)


def _listed(row: RolloutRow, summary: RunSummary) -> ListedRollout:
    verdict = verdict_word(row.score, threshold_of(summary, row.address[0]))
    place = f"round {row.address[0]}, {phase_label(row.phase)}, step {row.step}"
    return ListedRollout(row, link_to(row.address), verdict, place)


def link_to(address: tuple[int, str, int]) -> str:
    return f"/rollouts/{address[0]}/{address[1]}/{address[2]}"


def _pages(query: RolloutQuery, number: int, pages: int) -> object:
    """Links to the first, the last and the neighbouring pages."""
    near = [n for n in range(number - 2, number + 3) if 1 <= n <= pages]
    numbers = sorted({1, *near, pages})
    links: list[tuple[str, str, bool]] = []
    before = 0
    for n in numbers:
        if n > before + 1:
            links.append(("…", "", False))
        links.append((f"{n:,}", f"/rollouts?{urlencode({**query.fields(), 'page': n})}", n == number))
        before = n
    return markup.pages(links) if pages > 1 else ""


# --- one solution ------------------------------------------------------------------------------------------------


def rollout_page(index: RolloutIndex, place: int, summary: RunSummary, experiment: Experiment) -> str:
    """The transcript of one solution: problem, prompt, solution, grade, score, and the group beside it."""
    rollout, (row,) = index.rollout(place), index.rows([place], LINE)  # type: ignore[arg-type]
    threshold = threshold_of(summary, rollout.round)
    group, others = ([_listed(mate, summary) for mate in index.rows(places, LINE)] for places in index.mates(place))
    prompt, why = prompt_text(experiment, rollout.prompt_ids)
    transcript = markup.transcript(rollout, prompt, why, rollout_side(rollout, threshold, LONGEST))
    beside = markup.mates(group, others)
    sections = [
        PageSection("transcript", "Transcript", [markup.columns(transcript, beside)]),
        PageSection("facts", "Facts", [elements.facts(_facts(rollout, row, threshold))]),
    ]
    header = [elements.title(f"{rollout.role.value} solution", rollout.id, row.grade, _colour(row.grade))]
    return page(f"{summary.name}: {rollout.id}", header, sections, KIND)


def _colour(grade: str) -> str:
    return {"correct": "good", "wrong": "bad", "flaw": "bad"}.get(grade, "warn")


def _facts(rollout: Rollout, row: RolloutRow, threshold: float | None) -> list[tuple[str, str | None]]:
    checks = rollout.grade.checks
    versions = sorted({span.version for span in rollout.spans})
    return [
        ("score", None if rollout.score is None else f"{rollout.score:+.4f}"),
        ("threshold", None if threshold is None else f"{threshold:+.4f}"),
        ("reward", None if rollout.reward is None else f"{rollout.reward:+.4f}"),
        ("round", str(rollout.round)),
        ("phase", phase_label(row.phase)),
        ("step", str(rollout.step)),
        ("group", str(rollout.group)),
        ("prover", rollout.source),
        ("policy version", ", ".join(map(str, versions))),
        ("tokens", f"{len(rollout.prompt_ids)} prompt, {rollout.sampled_tokens} sampled"),
        ("finished by", rollout.finish_reason),
        ("mean log-prob", _mean_logprob(rollout)),
        ("decoding", short_seconds(rollout.timing.service_s)),
        ("visible tests passed", None if checks is None else f"{checks.visible:.0%}"),
        ("tests passed", None if checks is None else f"{checks.passed:.0%}"),
        ("certified", None if checks is None else ("yes" if checks.certified else "no")),
        ("problem id", rollout.problem_id),
        ("verifier", rollout.verifier_version),
    ]


def _mean_logprob(rollout: Rollout) -> str | None:
    mask_C = rollout.sampled_mask
    return f"{float(rollout.logprobs[mask_C].mean()):.4f}" if mask_C.any() else None


# --- prompts -----------------------------------------------------------------------------------------------------


def prompt_text(experiment: Experiment, ids: Int32) -> tuple[str | None, str]:
    """The prompt as text, special tokens included; or None and a sentence that says why not. The run stores token ids,
    so the tokenizer of the prover has to be on this machine."""
    source = experiment.models.prover.source
    file = tokenizer_file(source)
    if file is None:
        return None, f"The run stores {len(ids)} token ids. The tokenizer of {source} is not on this machine."
    try:
        return str(_tokenizer(file).decode(ids.tolist(), skip_special_tokens=False)), ""
    except Exception as error:  # noqa: BLE001 (the tokenizers library raises plain exceptions for a damaged file)
        return None, f"{file} cannot be opened: {error}"


def tokenizer_file(source: str) -> Path | None:
    """The tokenizer.json of a model's source; None if it is not on this machine. Downloads nothing."""
    try:
        source = base_source(source)
        if source.startswith("embedded:"):
            folder = embedded_model(source.removeprefix("embedded:"))
        elif is_hub_id(source):
            return _cached_file(source)
        else:
            folder = expanded(source, "models")
    except PvgError:
        return None
    file = folder / "tokenizer.json"
    return file if file.is_file() else None


def _cached_file(source: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    hub_id = parse(source)
    found = try_to_load_from_cache(hub_id.repository, "tokenizer.json", revision=hub_id.revision)
    return Path(found) if isinstance(found, str) else None


@lru_cache(maxsize=4)
def _tokenizer(file: Path):  # type: ignore[no-untyped-def]
    from tokenizers import Tokenizer as FastTokenizer

    return FastTokenizer.from_file(str(file))
