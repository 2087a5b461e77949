"""The JSON Schemas of the documents that commands print with --json, and of pvg's files.

A command prints a plain dictionary, and `boundary.emit` adds its `schema_version`. The shapes come from pvg's own
dataclasses, and this module names only the fields that a command adds. The tests of the command line check every
document against its schema.

Rules for a change: a new field is no new version. A field that is removed, renamed or gets another meaning raises
`schema_version` of that document by one, here and in the dictionary that the command prints.
"""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from typing import Any, Literal, get_type_hints

from pydantic import BaseModel, ConfigDict, TypeAdapter, create_model
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from pvg.bench.compare import ReportComparison
from pvg.bench.profiling import ProfileResult
from pvg.bench.report import BenchReport
from pvg.config.experiment import BatchArithmetic
from pvg.evaluation.report import EvaluationReport
from pvg.game.task_check import ShownInput
from pvg.hub import Download
from pvg.reporting.diagnosis import Diagnosis
from pvg.reporting.follow import RunGlance
from pvg.reporting.run_summary import AlertRecord, RunSummary
from pvg.reporting.solutions import Example
from pvg.study.results import StudyResults
from pvg_cli.doctor import CheckResult

Metrics = dict[str, float]
Settings = dict[str, Any]  # an experiment as in its TOML file; `pvg config schema --json` is its schema
Ended = Literal["complete", "interrupted"]


_model: Any = create_model  # its own type does not know fields that are made at run time


def part(**of: Any) -> Any:
    """An object inside a document, with these fields and no others."""
    return _model("Part", __config__=ConfigDict(extra="forbid"), **{name: (kind, ...) for name, kind in of.items()})


def list_of(kind: Any) -> Any:
    return list[kind]


def by_name(kind: Any) -> Any:
    return dict[str, kind]


def document(about: str, *, more: bool = False, **of: Any) -> Any:
    """A whole document. `more`: it may have further fields. A field (TYPE, DEFAULT) may be missing."""
    config = ConfigDict(extra="allow" if more else "forbid")
    found = {name: kind if isinstance(kind, tuple) else (kind, ...) for name, kind in of.items()}
    return _model("Document", __config__=config, __doc__=about, schema_version=(Literal[1], ...), **found)


def fields_of(kind: type, **changed: Any) -> dict[str, Any]:
    """Field -> type of a dataclass, with changes."""
    hints = get_type_hints(kind)
    return {each.name: hints[each.name] for each in fields(kind)} | changed


@cache
def documents() -> dict[str, tuple[str, Any]]:
    """Name -> the command that prints the document, and its type."""
    round_ = part(round=int, metrics=Metrics)
    question = part(question=str, answer=str, answered_by=Literal["prover", "task"], max_tokens=int | None)
    known = part(
        solution=str, text=str, expected_correct=bool, correct=bool, well_formed=bool, answer=str | None, note=str
    )
    preview = part(
        problem=str,
        question=str,
        prompts=dict[str, ShownInput],
        challenge=question | None,
        verifier_input=ShownInput | None,
        graded=list_of(known),
    )
    warm = part(demonstrations=int, held_out=int, epochs=float)
    run = fields_of(RunGlance, path=str)
    ranges = by_name(part(mean=float, min=float, max=float, last=float))
    summary = fields_of(
        RunSummary,
        path=str,
        rounds=list_of(round_),
        device=ranges,
        loop=Metrics,
        workers=ranges,
        hidden=Metrics,
        seconds=float,
    )
    setting = {"kinds": list[str], "meaning": str, "range": str, "default": str}
    cell = part(
        arm=str,
        seed=int,
        run=str,
        status=Literal["new", "unfinished", "played", "complete", "damaged"],
        reason=str,
        steps=int,
        steps_done=int,
        hash=str,
    )
    planned = part(stage=str, place=str, parts=Metrics, total=float, fits=bool | None)
    named = part(name=str, path=str, about=str)
    server: dict[str, Any] = {"for": Literal["prover", "verifier", "reference"], "pid": int, "server_pid": int}
    words = ("url", "experiment", "model", "runner", "log", "weights_root", "python", "vllm", "device")
    server |= dict.fromkeys(words, str)
    return {
        "error": (
            "any command",
            document(
                "Any command that cannot do its work prints this document instead.",
                error=part(type=str, message=str, remedy=str, exit_code=Literal[2, 3, 70, 130]),
            ),
        ),
        "train": (
            "pvg train",
            document(
                "A run that is complete or was stopped. `seconds`: of this call. `resume`: the command to type.",
                status=Ended,
                run=str,
                path=str,
                experiment=str,
                seconds=float,
                rounds=list_of(round_),
                alerts=list[AlertRecord],
                resume=str | None,
            ),
        ),
        "train-dry-run": (
            "pvg train --dry-run",
            document(
                "What a run would be. `hash`: of what affects the result. `preview`: null before downloads.",
                experiment=Settings,
                arithmetic=BatchArithmetic,
                hash=str,
                run=str,
                resume=bool,
                downloads=dict[str, Download],
                preview=preview | None,
                warmup=(warm | None, None),
            ),
        ),
        "rollout": (
            "pvg rollout",
            document("Samples and their metrics.", status=Ended, run=str, path=str, seconds=float, metrics=Metrics),
        ),
        "task-check": (
            "pvg task check NAME",
            document(
                "Checks of a task, its prompts and its grader. `passed`: null if a check could not be made.",
                task=str,
                passed=bool,
                checks=list_of(part(check=str, passed=bool | None, detail=str, warning=bool)),
                preview=preview | None,
                notice=str,
            ),
        ),
        "runs-list": ("pvg runs list", document("The newest activity first.", runs=list_of(part(**run)))),
        "runs-show": (
            "pvg runs show RUN",
            document("`sizes`: bytes by part of the folder.", **run, sizes=dict[str, int], commands=list[str]),
        ),
        "runs-tag": ("pvg runs tag RUN", document("The tags after the command.", run=str, tags=list[str])),
        "runs-remove": ("pvg runs remove RUN", document("What was deleted.", removed=list[str], bytes=int)),
        "report": (
            "pvg report RUN",
            document(
                "One run. Times in seconds, `began` since 1970. `notes`: remarks on incomplete or damaged files.",
                **summary,
                evaluation=EvaluationReport | None,
                examples=list[Example],
                html=str | None,
                rollouts_html=str | None,
            ),
        ),
        "report-runs": (
            "pvg report RUN RUN",
            document(
                "Several runs. `settings`: by key, the value of every run, for the keys in which two runs differ.",
                runs=list_of(part(**summary, final=Metrics)),
                settings=dict[str, list[str]],
                html=str | None,
            ),
        ),
        "report-benchmarks": (
            "pvg report FILE",
            document("Reports of `pvg bench`.", reports=list[BenchReport], html=str | None),
        ),
        "evaluate": (
            "pvg evaluate RUN",
            document(
                "`evaluation`: the content of `path`. `resume`: the command that resumes a stopped evaluation.",
                status=Ended,
                run=str,
                path=str,
                seconds=float,
                evaluation=EvaluationReport,
                resume=str | None,
            ),
        ),
        "score": (
            "pvg score RUN FILE.jsonl --out FILE",
            document(
                "The summary. The scores are in the file `out`, one object per line.",
                run=str,
                round=int,
                rows=int,
                accepted=int,
                threshold=float,
                calibrated=bool,
                verifier_version=str,
                out=str | None,
            ),
        ),
        "export": (
            "pvg export RUN --player prover --out DIR",
            document(
                "The facts of an export, which are also in its pvg.json. A verifier has more facts than a prover.",
                more=True,
                out=str,
                url=str | None,
                player=Literal["prover", "verifier"],
                run=str,
                round=int,
            ),
        ),
        "bench": ("pvg bench --profile NAME", BenchReport),
        "bench-profiles": (
            "pvg bench",
            document("The profiles.", profiles=list_of(part(name=str, workload=str, about=str, path=str))),
        ),
        "compare": (
            "pvg compare A B",
            document(
                "`failed`: a metric is worse than --fail-above, and the exit code is 1.",
                **fields_of(ReportComparison),
                joint_confidence=float,
                counts=dict[str, int],
                failed=bool,
            ),
        ),
        "profile": (
            "pvg profile",
            document(
                "`slower_by`: how much longer a pass took than the first one. `missing`: by tool.",
                **fields_of(
                    ProfileResult, folder=str, passes=list_of(part(name=str, walls_s=list[float])), slower_by=Metrics
                ),
            ),
        ),
        "plan": (
            "pvg plan",
            document(
                "Times in seconds; `step_s`: of an optimizer step, at least. `fits`: null without a GPU.",
                experiment=str,
                machine=str,
                workers=int,
                slots=int,
                concurrency=int,
                inputs=by_name(part(value=float | None, unit=str, source=str)),
                step_s=float,
                bounds=dict[str, float | str | None],
                memory=list_of(planned),
                gpu_gb=float | None,
                advice=list[str],
                notes=list[str],
            ),
        ),
        "study": (
            "pvg study NAME",
            _model(
                "Study", __base__=StudyResults, status=(Literal["complete", "failed", "stopped"], ...), html=(str, ...)
            ),
        ),
        "study-list": ("pvg study", document("The studies.", studies=list_of(named))),
        "study-plan": (
            "pvg study NAME --dry-run",
            document(
                "The work of a study. `warnings`: what its seeds cannot show.",
                study=str,
                warnings=list[str],
                folder=str,
                processes=int,
                threads=int,
                steps=int,
                cells=list_of(cell),
            ),
        ),
        "diagnose": (
            "pvg diagnose RUN",
            document("The causes, the costliest first.", **fields_of(Diagnosis), nothing_stands_out=bool),
        ),
        "doctor": (
            "pvg doctor",
            document("If `healthy` is false, the exit code is 1.", healthy=bool, checks=list[CheckResult]),
        ),
        "config-show": (
            "pvg config show",
            document("All settings. `pvg config schema --json` is their schema.", more=True, name=str, seed=int),
        ),
        "config-explain": (
            "pvg config explain KEY",
            document(
                "A setting has `forms`; a table `kinds` and `settings`. `experiments`: the value that each sets.",
                key=str,
                forms=(list_of(part(**setting, type=str)), []),
                meaning=(str, ""),
                default=(str, ""),
                kinds=(dict[str, str], {}),
                settings=(list_of(part(**setting, key=str)), []),
                experiments=(dict[str, str], {}),
            ),
        ),
        "config-validate": (
            "pvg config validate",
            document("A valid experiment.", valid=Literal[True], name=str, hash=str, warnings=list[str]),
        ),
        "init": ("pvg init", document("`next`: by command, its purpose.", files=list[str], next=dict[str, str])),
        "schemas": (
            "pvg schemas",
            document("The schemas that pvg makes.", schemas=list_of(part(name=str, version=int, about=str))),
        ),
        "serve": (
            "pvg serve EXPERIMENT",
            document(
                "Printed when the server is ready. `pid`: end this process to stop the server.",
                **server,
            ),
        ),
        "serve-verifier": (
            "pvg serve RUN --player verifier",
            document("Printed when the server is ready.", url=str, run=str, round=int),
        ),
        "watch": (
            "pvg watch RUN",
            document(
                "Printed when the page is ready. `forward`: an ssh command that shows it on another machine.",
                url=str,
                run=str,
                path=str,
                forward=str,
            ),
        ),
    }


# Files of pvg that other programs read: name -> the file, and its class.
FILES: dict[str, tuple[str, type[BaseModel]]] = {
    "evaluation.json": ("the file runs/NAME/evaluation/evaluation.json", EvaluationReport),
    "study.json": ("the file runs/STUDY/study.json", StudyResults),
    "benchmark-report": ("the files that pvg bench writes, and pvg compare reads", BenchReport),
}


class DocumentSchema(GenerateJsonSchema):
    """A number may be null: JSON has no other word for one that is not finite, such as a mean of no values. A dataclass
    is written with all its fields, and no others."""

    def float_schema(self, schema: core_schema.FloatSchema) -> JsonSchemaValue:
        return {"type": ["number", "null"]}

    def dataclass_schema(self, schema: core_schema.DataclassSchema) -> JsonSchemaValue:
        found = super().dataclass_schema(schema)
        return {**found, "required": sorted(found["properties"]), "additionalProperties": False}


def schemas() -> dict[str, JsonSchemaValue]:
    """Name -> JSON Schema: first of the files that pvg writes, then of the documents that commands print."""
    found = {name: _schema(kind, about) for name, (about, kind) in FILES.items()}
    return found | {
        name: _schema(kind, command if name == "error" else f"{command} --json")
        for name, (command, kind) in documents().items()
    }


def _schema(kind: type[BaseModel], title: str) -> JsonSchemaValue:
    made = TypeAdapter(kind).json_schema(mode="serialization", schema_generator=DocumentSchema)
    return {"$schema": GenerateJsonSchema.schema_dialect, **made, "title": title}
