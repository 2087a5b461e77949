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


def each(kind: Any, *names: str) -> dict[str, Any]:
    """Several fields of one type."""
    return dict.fromkeys(names, kind)


def document(command: str, about: str, *, more: bool = False, **of: Any) -> tuple[str, Any]:
    """A whole document of a command. `more`: it may have further fields. A field (TYPE, DEFAULT) may be missing."""
    config = ConfigDict(extra="allow" if more else "forbid")
    found = {name: kind if isinstance(kind, tuple) else (kind, ...) for name, kind in of.items()}
    return command, _model("Document", __config__=config, __doc__=about, schema_version=(Literal[1], ...), **found)


def fields_of(kind: type, **changed: Any) -> dict[str, Any]:
    """Field -> type of a dataclass, with changes."""
    hints = get_type_hints(kind)
    return {each.name: hints[each.name] for each in fields(kind)} | changed


@cache
def documents() -> dict[str, tuple[str, Any]]:
    """Name -> the command that prints the document, and its type."""
    round_ = part(round=int, metrics=Metrics)
    question = part(**each(str, "question", "answer"), answered_by=Literal["prover", "task"], max_tokens=int | None)
    known = part(
        **each(str, "solution", "text", "note"),
        **each(bool, "expected_correct", "correct", "well_formed"),
        answer=str | None,
    )
    shown: Any = part(text=str, tokens=int | None)
    preview = part(
        **each(str, "problem", "question"),
        prompts=dict[str, shown],
        challenge=question | None,
        verifier_input=shown | None,
        graded=list_of(known),
    )
    warm = part(**each(int, "demonstrations", "held_out"), epochs=float)
    run = fields_of(RunGlance, path=str)
    ranges = by_name(part(**each(float, "mean", "min", "max", "last")))
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
        **each(str, "arm", "run", "reason", "hash"),
        **each(int, "seed", "steps", "steps_done"),
        status=Literal["new", "unfinished", "played", "complete", "damaged"],
    )
    planned = part(**each(str, "stage", "place"), total=float, parts=Metrics, fits=bool | None)
    named = part(**each(str, "name", "path", "about"))
    server: dict[str, Any] = {"for": Literal["prover", "verifier", "reference"], "pid": int, "server_pid": int}
    words = ("url", "experiment", "model", "runner", "log", "weights_root", "python", "vllm", "device")
    server |= dict.fromkeys(words, str)
    return {
        "error": document(
            "any command",
            "Any command that cannot do its work prints this document instead.",
            error=part(**each(str, "type", "message", "remedy"), exit_code=Literal[2, 3, 70, 130]),
        ),
        "train": document(
            "pvg train",
            "A run that is complete or was stopped. `seconds`: of this call. `resume`: the command to type.",
            **each(str, "run", "path", "experiment"),
            seconds=float,
            status=Ended,
            rounds=list_of(round_),
            alerts=list[AlertRecord],
            resume=str | None,
        ),
        "train-dry-run": document(
            "pvg train --dry-run",
            "What a run would be. `hash`: of what affects the result. `preview`: null before downloads.",
            **each(str, "hash", "run"),
            resume=bool,
            experiment=Settings,
            arithmetic=BatchArithmetic,
            downloads=dict[str, Download],
            preview=preview | None,
            warmup=(warm | None, None),
        ),
        "rollout": document(
            "pvg rollout",
            "Samples and their metrics.",
            **each(str, "run", "path"),
            seconds=float,
            status=Ended,
            metrics=Metrics,
        ),
        "task-check": document(
            "pvg task check NAME",
            "Checks of a task, its prompts and its grader. `passed`: null if a check could not be made.",
            **each(str, "task", "notice"),
            passed=bool,
            checks=list_of(part(**each(str, "check", "detail"), warning=bool, passed=bool | None)),
            preview=preview | None,
        ),
        "runs-list": document("pvg runs list", "The newest activity first.", runs=list_of(part(**run))),
        "runs-show": document(
            "pvg runs show RUN",
            "`sizes`: bytes by part of the folder.",
            **run,
            sizes=dict[str, int],
            commands=list[str],
        ),
        "runs-tag": document("pvg runs tag RUN", "The tags after the command.", run=str, tags=list[str]),
        "runs-remove": document("pvg runs remove RUN", "What was deleted.", bytes=int, removed=list[str]),
        "report": document(
            "pvg report RUN",
            "One run. Times in seconds, `began` since 1970. `notes`: remarks on incomplete or damaged files.",
            **summary,
            evaluation=EvaluationReport | None,
            examples=list[Example],
            html=str | None,
            rollouts_html=str | None,
        ),
        "report-runs": document(
            "pvg report RUN RUN",
            "Several runs. `settings`: by key, the value of every run, for the keys in which two runs differ.",
            runs=list_of(part(**summary, final=Metrics)),
            settings=dict[str, list[str]],
            html=str | None,
        ),
        "report-benchmarks": document("pvg report FILE", "Reports of `pvg bench`.", reports=list[BenchReport]),
        "evaluate": document(
            "pvg evaluate RUN",
            "`evaluation`: the content of `path`. `resume`: the command that resumes a stopped evaluation.",
            **each(str, "run", "path"),
            seconds=float,
            status=Ended,
            evaluation=EvaluationReport,
            resume=str | None,
        ),
        "score": document(
            "pvg score RUN FILE.jsonl --out FILE",
            "The summary. The scores are in the file `out`, one object per line.",
            **each(str, "run", "verifier_version"),
            **each(int, "round", "rows", "accepted"),
            threshold=float,
            calibrated=bool,
            out=str | None,
        ),
        "export": document(
            "pvg export RUN --player prover --out DIR",
            "The facts of an export, which are also in its pvg.json. A verifier has more facts than a prover.",
            more=True,
            **each(str, "out", "run"),
            round=int,
            url=str | None,
            player=Literal["prover", "verifier"],
        ),
        "bench": ("pvg bench --profile NAME", BenchReport),
        "bench-profiles": document(
            "pvg bench", "The profiles.", profiles=list_of(part(**each(str, "name", "workload", "about", "path")))
        ),
        "compare": document(
            "pvg compare A B",
            "`failed`: a metric is worse than --fail-above, and the exit code is 1.",
            joint_confidence=float,
            failed=bool,
            **fields_of(ReportComparison),
            counts=dict[str, int],
        ),
        "profile": document(
            "pvg profile",
            "`slower_by`: how much longer a pass took than the first one. `missing`: by tool.",
            **fields_of(
                ProfileResult, folder=str, passes=list_of(part(name=str, walls_s=list[float])), slower_by=Metrics
            ),
        ),
        "plan": document(
            "pvg plan",
            "Times in seconds; `step_s`: of an optimizer step, at least. `fits`: null without a GPU.",
            **each(str, "experiment", "machine"),
            **each(int, "workers", "slots", "concurrency"),
            step_s=float,
            inputs=by_name(part(**each(str, "unit", "source"), value=float | None)),
            bounds=dict[str, float | str | None],
            memory=list_of(planned),
            gpu_gb=float | None,
            advice=list[str],
            notes=list[str],
        ),
        "study": (
            "pvg study NAME",
            _model(
                "Study", __base__=StudyResults, status=(Literal["complete", "failed", "stopped"], ...), html=(str, ...)
            ),
        ),
        "study-list": document("pvg study", "The studies.", studies=list_of(named)),
        "study-plan": document(
            "pvg study NAME --dry-run",
            "The work of a study. `warnings`: what its seeds cannot show.",
            **each(str, "study", "folder"),
            **each(int, "processes", "threads", "steps"),
            warnings=list[str],
            cells=list_of(cell),
        ),
        "diagnose": document(
            "pvg diagnose RUN", "The causes, the costliest first.", nothing_stands_out=bool, **fields_of(Diagnosis)
        ),
        "doctor": document(
            "pvg doctor", "If `healthy` is false, the exit code is 1.", healthy=bool, checks=list[CheckResult]
        ),
        "config-show": document(
            "pvg config show",
            "All settings. `pvg config schema --json` is their schema.",
            more=True,
            name=str,
            seed=int,
        ),
        "config-explain": document(
            "pvg config explain KEY",
            "A setting has `forms`; a table `kinds` and `settings`. `experiments`: the value that each sets.",
            key=str,
            forms=(list_of(part(type=str, **setting)), []),
            meaning=(str, ""),
            default=(str, ""),
            kinds=(dict[str, str], {}),
            settings=(list_of(part(key=str, **setting)), []),
            experiments=(dict[str, str], {}),
        ),
        "config-validate": document(
            "pvg config validate",
            "A valid experiment.",
            **each(str, "name", "hash"),
            valid=Literal[True],
            warnings=list[str],
        ),
        "init": document("pvg init", "`next`: by command, its purpose.", files=list[str], next=dict[str, str]),
        "schemas": document(
            "pvg schemas",
            "The schemas that pvg makes.",
            schemas=list_of(part(**each(str, "name", "about"), version=int)),
        ),
        "serve": document(
            "pvg serve EXPERIMENT",
            "Printed when the server is ready. `pid`: end this process to stop the server.",
            **server,
        ),
        "serve-verifier": document(
            "pvg serve RUN --player verifier", "Printed when the server is ready.", **each(str, "url", "run"), round=int
        ),
        "watch": document(
            "pvg watch RUN",
            "Printed when the page is ready. `forward`: an ssh command that shows it on another machine.",
            **each(str, "url", "run", "path", "forward"),
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
