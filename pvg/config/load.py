"""Reads an experiment from TOML, and changes it by `key=value`. This is the only module that knows TOML.

Errors name the key, where it came from (a file or an override), and the closest valid key.
"""

from __future__ import annotations

import copy
import difflib
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
from pydantic import ValidationError

import pvg
from pvg.config.base import as_table, kinds_of
from pvg.config.experiment import FITTED, MAX_ROWS, SECTION_NAMES, TABLES, Experiment, fields_of, is_section
from pvg.config.operation import URL_EXAMPLE, URL_PATTERN
from pvg.config.rollout import TEXTS_FOR_A_TASK
from pvg.config.sections import value_of
from pvg.errors import ConfigurationError, PvgError, UsageError, shortened, user_paths
from pvg.inputs import DEEPEST, check_settings, expanded, read_text

EMBEDDED = Path(pvg.__file__).parent / "models" / "embedded"
TOML_SYNTAX = 'Write tables as [name], and settings as number = 2 or text = "words". Write each key once.'


def find_experiment(name: str, directory: Path = Path("experiments")) -> Path:
    """The file of experiment `name`: a path, a name in ./experiments, or a name of an experiment shipped with pvg.

    Raises UsageError, naming the known experiments and the closest one.
    """
    return find_named("experiment", name, [directory, *shipped_directories()])


@user_paths()
def find_named(kind: str, name: str, places: Sequence[Path]) -> Path:
    """The TOML file `name` of a `kind` ("experiment", "profile"): a path, or a name in the first folder that has it.

    Raises UsageError, naming the known ones and the closest one.
    """
    candidate = Path(name)
    named = candidate.suffix == ".toml"
    for file in [candidate] if named else [place / f"{name}.toml" for place in places]:
        if file.is_file():
            return file
    beside = candidate.with_name(f"{candidate.name}.toml") if candidate.name else candidate
    if not named and beside.is_file():
        raise UsageError(f"There is no {kind} {name!r}, but a file {beside}.", f"Name the file: {beside}")
    path_or_name = "Give a path to a TOML file, or a name."
    if name and candidate.is_dir():
        first = min((path for path in candidate.glob("*.toml") if path.is_file()), default=None)
        remedy = f"Name a TOML file, such as {first}" if first else path_or_name
        raise UsageError(f"The {kind} {name!r} is a folder.", remedy)
    if named:
        raise UsageError(f"There is no {kind} file {candidate}.", path_or_name)
    known = sorted({path.stem for place in places for path in place.glob("*.toml")})
    raise UsageError(
        f"There is no {kind} {name!r}.{did_you_mean(name, known)}", f"Known: {', '.join(known) or 'none'}."
    )


def shipped_directories(kind: str = "experiments") -> list[Path]:
    """The folder of the experiments (or profiles) shipped with pvg: in the wheel, or next to the package in a
    checkout."""
    package = Path(pvg.__file__).parent
    return [place for place in (package / f"_{kind}", package.parent / kind) if place.is_dir()]


def known_files(kind: str) -> dict[str, Path]:
    """The TOML files in ./KIND, then those shipped with pvg, by name. The first file of a name hides the others."""
    found: dict[str, Path] = {}
    for place in [Path(kind), *shipped_directories(kind)]:
        for path in sorted(place.glob("*.toml")):
            found.setdefault(path.stem, path)
    return found


def embedded_names() -> list[str]:
    """The names of the models that come with pvg."""
    return sorted(path.parent.name for path in EMBEDDED.glob("*/model.safetensors"))


def embedded_model(name: str) -> Path:
    """The folder of a model that comes with pvg. Raises UsageError, naming the known ones and the closest one."""
    refuse_unknown("embedded model {}", name, embedded_names())
    return EMBEDDED / name


def load_experiment(path: Path, overrides: Sequence[str] = ()) -> Experiment:
    """Read `path`, apply `key=value` overrides in order, validate.

    Raises ConfigurationError, naming the key, its origin (file or override) and the closest valid key.
    """
    data, origins = overridden(path, overrides)
    return build_experiment(data, str(path), origins)


def overridden(path: Path, overrides: Sequence[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """The data of an experiment file with the overrides applied, not yet validated; and the origin of each override's
    key."""
    data = read_settings(path)
    origins: dict[str, str] = {}
    for key, value, origin in override_settings(overrides):
        assign(data, key, value)
        origins[key] = origin
    return data, origins


def read_settings(path: Path, heirs: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The data of an experiment file, over those of the experiment that its `base` names. `heirs`: the files whose base
    this one is."""
    data = read_toml(path, "experiment")
    base = data.pop("base", None)
    if base is None:
        return data
    if not isinstance(base, str):
        raise ConfigurationError(f"{path}: base = {base!r} is not an experiment.", 'For example: base = "modchain"')
    beside = path.parent / base
    above = beside if base.endswith(".toml") and beside.is_file() else find_experiment(base)
    chain = (*heirs, path.resolve())
    if above.resolve() in chain:
        raise ConfigurationError(
            f"{path}: base = {base!r} leads back to {above}.", "Name another experiment, or its file."
        )
    merged = read_settings(above, chain)
    for key, value, _ in kinds_first([(key, value, "") for key, value in leaves(data)]):
        assign(merged, key, value)
    return merged


def override_settings(overrides: Sequence[str]) -> list[tuple[str, Any, str]]:
    """The settings (key, value, origin) of all overrides, in the order in which they apply."""
    return kinds_first([setting for override in overrides for setting in read_override(override)])


def changed(experiment: Experiment, values: Mapping[str, Any]) -> Experiment | None:
    """The experiment with other values, by dotted key. None if these settings exclude each other."""
    data = parse_toml(experiment.to_toml(), experiment.name)
    for key, value, _ in kinds_first([(key, value, "") for key, value in values.items()]):
        assign(data, key, value)
    try:
        return build_experiment(data)
    except ConfigurationError:
        return None


def fitted_as(run: Experiment, experiment: Experiment, chosen: Collection[str]) -> Experiment:
    """The experiment to resume a run with, with the run's values where pvg lowered them to fit the memory. The `chosen`
    settings stay."""
    sampled_here = run.rollout.engine.kind == experiment.rollout.engine.kind == "torch"
    keys = [key for key in FITTED if key not in chosen and (key != MAX_ROWS or sampled_here)]
    before = {key: value_of(run, key) for key in keys}
    lower = {key: value for key, value in before.items() if value < value_of(experiment, key)}
    return (changed(experiment, lower) if lower else None) or experiment


def read_toml(path: Path, kind: str) -> dict[str, Any]:
    """The data of a TOML file of a `kind`. Raises UsageError or ConfigurationError, naming the file."""
    try:
        return parse_toml(read_text(path), str(path))
    except FileNotFoundError:
        raise UsageError(f"There is no {kind} file {path}.") from None
    except OSError as error:
        raise UsageError(f"The {kind} file {path} cannot be read: {error.strerror}.") from None


def parse_toml(text: str, origin: str) -> dict[str, Any]:
    """The data of a TOML text. Raises ConfigurationError, naming `origin`, for invalid TOML or impossible values."""
    try:
        data = tomllib.loads(text)
    except RecursionError:
        raise ConfigurationError(f"{origin}: the values are nested more than {DEEPEST} levels deep.") from None
    except ValueError as error:  # TOMLDecodeError, or Python's limit on the digits of an integer
        said = str(error).partition(";")[0].rstrip(".")
        remedy = TOML_SYNTAX if isinstance(error, tomllib.TOMLDecodeError) else ""
        raise ConfigurationError(f"{origin} is not valid TOML: {said}.", remedy) from None
    check_settings(data, origin)
    return data


def build_experiment(data: dict[str, Any], origin: str = "", overrides: dict[str, str] | None = None) -> Experiment:
    """Validate plain data. `origin` and `overrides` (key -> its origin) serve only the error message."""
    try:
        return Experiment.model_validate(data)
    except ValidationError as error:
        raise _explain(error, data, origin, overrides or {}) from None


def parse_override(text: str) -> tuple[str, Any]:
    """`key=value` -> (key, value). The value is parsed as TOML, or is a plain string if it is not TOML."""
    key, separator, value = text.partition("=")
    key = key.strip()
    if not separator or not key:
        raise UsageError(f"--set {text!r} must have the form key=value.", "For example: --set training.steps=30")
    if key.count(".") >= DEEPEST:
        raise ConfigurationError(f"--set {shortened(key)}: the key has more than {DEEPEST} parts.")
    return key, _value(key, value)


def _value(key: str, text: str) -> Any:
    """The TOML value of the text, or the text itself if it is not TOML."""
    try:
        found = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        found = {}
    except RecursionError:
        raise ConfigurationError(f"{shortened(key)}: the value is nested more than {DEEPEST} levels deep.") from None
    except ValueError as error:
        raise ConfigurationError(f"{shortened(key)}: {str(error).partition(';')[0]}.") from None
    value = found["value"] if found.keys() == {"value"} else text.strip()
    check_settings({key: value}, shortened(f"--set {key}={text}"))
    return value


def read_override(text: str) -> list[tuple[str, Any, str]]:
    """The settings of `--set TEXT` as (key, value, origin): one for `key=value`, all in a TOML file for `@FILE`. Raises
    UsageError and ConfigurationError."""
    if not text.startswith("@"):
        return [(*parse_override(text), shortened(f"--set {text}"))]
    path = expanded(text[1:], "--set")
    return [(key, value, str(path)) for key, value in leaves(read_toml(path, "settings"))]


def chosen_keys(overrides: Sequence[str]) -> frozenset[str]:
    """The keys that overrides set, those inside a table included."""
    found = [(key, value) for override in overrides for key, value, _ in read_override(override)]
    return frozenset(leaf for key, value in found for leaf, _ in leaves({key: value}))


def leaves(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of all settings in a table, for dotted, quoted and nested keys."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def parse_list(text: str) -> tuple[str, list[Any]]:
    """`key=a,b,c` -> (key, [a, b, c]): TOML values if the whole list is TOML, otherwise value by value."""
    key, separator, values = text.partition("=")
    key = key.strip()
    whole = _value(key, f"[{values}]")
    found = whole if isinstance(whole, list) else [_value(key, value) for value in values.split(",") if value.strip()]
    if not separator or not key or not found:
        raise UsageError(f"{text!r} must have the form key=a,b,c.", "For example: rollout.engine.max_rows=8,64,256")
    return key, found


def kinds_first(settings: Sequence[tuple[str, Any, str]]) -> list[tuple[str, Any, str]]:
    """The settings (key, value, origin) in their order, but those that choose the kind of a table before all others:
    the order of `-s game.reward.floor=-9 -s game.reward=cgc` does not matter. The kind of the task is the very
    first, because it drops the instructions and examples of another task, also if a table of prompts gives them."""
    return sorted(
        settings, key=lambda setting: (not chooses_task(setting[0]), setting[0].removesuffix(".kind") not in TABLES)
    )


def chooses_task(key: str) -> bool:
    return key in ("task", "task.kind")


def assign(data: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key in plain data. A tagged table that gets another kind starts with the defaults of that kind.
    Another kind of task also removes the instructions and examples, which were written for the old one.

    `value` is copied: a later key inside a table does not change the caller's table.
    """
    if key in TABLES and not isinstance(value, dict):
        key += ".kind"
    *sections, leaf = key.split(".")
    node, place = data, ""
    for section in sections:
        place = f"{place}.{section}".lstrip(".")
        if place in TABLES and isinstance(node.get(section), str):
            node[section] = {"kind": node[section]}
        elif leaf == "file" and place == key.removesuffix(".file") and isinstance(node.get(section), str):
            del node[section]  # a text, which the file replaces (pvg.config.rollout)
        node = node.setdefault(section, {})
        if not isinstance(node, dict):
            raise ConfigurationError(f"--set {key}: {section!r} is a setting, not a section.")
    before = task_kind(data)
    if leaf == "kind" and place in TABLES and node.get("kind", TABLES[place].default) != value:
        node.clear()
    node[leaf] = copy.deepcopy(value)
    if chooses_task(key) and task_kind(data) != before and isinstance(prompts := data.get("prompts"), dict):
        for name in TEXTS_FOR_A_TASK:
            prompts.pop(name, None)


def task_kind(data: dict[str, Any]) -> Any:
    """The kind of task in plain data that is not yet validated."""
    task = as_table(data.get("task", {}))
    return task.get("kind", TABLES["task"].default) if isinstance(task, dict) else task


def switch_note(before: dict[str, Any], after: dict[str, Any]) -> str:
    """One line about the settings that another kind of task drops, for plain data before and after the change; empty
    if none is dropped."""
    old, new = task_kind(before), task_kind(after)
    if old == new:
        return ""
    task, prompts = before.get("task"), before.get("prompts")
    names = [f"task.{name}" for name in task if name != "kind"] if isinstance(task, dict) else []
    names += [f"prompts.{name}" for name in TEXTS_FOR_A_TASK if isinstance(prompts, dict) and name in prompts]
    dropped = f"so these settings of the file are dropped: {', '.join(sorted(names))}."
    return f"task.kind = {new!r} replaces {old!r}, {dropped}" if names else ""


def _explain(
    error: ValidationError, data: dict[str, Any], origin: str, overrides: dict[str, str]
) -> ConfigurationError:
    """pydantic's first error as one line that tells the user what to change."""
    first = _first(error)
    key = ".".join(str(part) for part in first["loc"] if part not in SECTION_NAMES)
    where = next((where for set_, where in reversed(overrides.items()) if _overlap(key, set_)), origin)
    suffix = f" ({where})" if where else ""
    if first["type"] == "extra_forbidden":
        if key in valid_keys():  # a setting of another kind
            return ConfigurationError(f"{_of_another_kind(key, data)}{suffix}.")
        hint = nearest_key(key)
        return ConfigurationError(
            f"Unknown key {key!r}{suffix}." + (f" The nearest valid key is {hint!r}." if hint else ""),
            "See `pvg config show` for all keys.",
        )
    if first["type"] == "value_error":
        message = str(first["msg"]).removeprefix("Value error, ")
        message = message if key in message else f"{key}: {message}"
        return ConfigurationError(f"{message}{suffix}.")
    if first["type"].startswith("union_tag"):
        choices = ", ".join(TABLES[key].kinds())
        value = first["input"]
        shown = f"there is no kind {str(value.get('kind'))[:60]!r}" if isinstance(value, dict) else ""
        problem = shown or f"{str(value)[:60]} is no kind, and it is a table"
        return ConfigurationError(f"{key}: {problem}; its kinds are {choices}{suffix}.")
    given = repr(first["input"])
    if first["type"] == "string_pattern_mismatch" and first["ctx"]["pattern"] == URL_PATTERN:
        return ConfigurationError(f"{key}: {given[:60]} is not a server address{suffix}.", URL_EXAMPLE)
    is_table = first["type"] == "model_type"
    says = "Input should be a table of settings" if is_table else first["msg"]
    explained = is_table or key in valid_keys()
    remedy = f"To see what it means, and which values it takes: pvg config explain {key}" if explained else ""
    return ConfigurationError(f"{key}: {says}, not {given[:60]}{suffix}.", remedy)


def _first(error: ValidationError) -> Any:
    """pydantic's first error. A setting that takes pvg's names or a user's FILE.py:NAME has two errors; this chooses
    the one that matches the given value."""
    complaints = error.errors()
    first = complaints[0]
    if not first["loc"] or not str(first["loc"][-1]).startswith("literal["):
        return first
    own = ".py" in str(first["input"])
    message = (
        "Input should be FILE.py:NAME, such as 'mine.py:my_function'" if own else f"{first['msg']} or FILE.py:NAME"
    )
    return {**first, "loc": first["loc"][:-1], "msg": message}


def _overlap(key: str, other: str) -> bool:
    """Whether two dotted keys are equal or one contains the other."""
    return bool(key) and (f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}."))


def _of_another_kind(key: str, data: dict[str, Any]) -> str:
    """That `key` belongs to other kinds of its table than the one that is set."""
    place, _, leaf = key.rpartition(".")
    table, node = TABLES[place], data
    for section in place.split("."):
        node = node[section]
    kinds = [repr(kind) for section in table.sections if leaf in section.model_fields for kind in kinds_of(section)]
    plural = "kinds" if len(kinds) > 1 else "kind"
    return f"{key} belongs to {plural} {', '.join(kinds)}, not to {node.get('kind', table.default)!r}"


# What other libraries call a setting, where no similar spelling leads to it.
NAMES_ELSEWHERE = {
    "lr": "learning_rate",
    "batch_size": "groups",
    "num_generations": "group_size",
    "num_samples": "group_size",
    "beta": "kl.coefficient",
}


def nearest_key(key: str) -> str | None:
    """The valid key or section closest to `key`: by what other libraries call it, by the whole key, or by its last
    part."""
    keys = valid_keys()
    last = key.rpartition(".")[2]
    if name := NAMES_ELSEWHERE.get(last):
        same = [k for k in keys if k.endswith((f".{last}", f".{name}"))]
        places = (f"{key.partition('.')[0]}.", "training.", "")
        return next(k for place in places for k in same if k.startswith(place))
    sections = {place for place, *_ in fields_of(Experiment)} - set(keys)
    if (in_training := f"training.{key}") in sections or in_training in keys:
        return in_training
    if hint := nearest(key, [*keys, *sorted(sections)]):
        return hint
    leaves = {k.rsplit(".", 1)[-1]: k for k in [*sorted(TABLES), *reversed(keys)]}
    leaf = nearest(key.rsplit(".", 1)[-1], list(leaves))
    return leaves[leaf] if leaf else None


def valid_keys() -> list[str]:
    """Every dotted key that an experiment file may contain."""
    places = [key for key, _, info in fields_of(Experiment) if key not in TABLES and not is_section(info.annotation)]
    return list(dict.fromkeys(places))


def nearest(word: str, known: Sequence[str]) -> str | None:
    """The known word closest to `word`, if any is similar."""
    if len(word) > 2 * max(map(len, known), default=0):
        return None
    found = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return found[0] if found else None


def did_you_mean(word: str, known: Sequence[str]) -> str:
    """The end of an error message about an unknown word: a question that names the closest known word, or nothing."""
    hint = nearest(word, known)
    return f" Did you mean {hint!r}?" if hint else ""


def refuse_unknown(what: str, name: str, known: Iterable[str], error: type[PvgError] = UsageError) -> None:
    """Raises `error`, with the nearest name, if `name` is not `known`. `what`: of which kind it is, such as "stage {}",
    with a place for the name."""
    names = list(known)
    if name not in names:
        missing = f"There is no {what.format(repr(name))}.{did_you_mean(name, names)}"
        raise error(missing, f"Known: {', '.join(names) or 'none'}.")


def differences(before: dict[str, Any], after: dict[str, Any], prefix: str = "") -> list[str]:
    """Lines `key: before -> after` for every setting that differs, sorted by key."""
    lines = []
    for key in sorted(before.keys() | after.keys()):
        old, new = before.get(key), after.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            lines += differences(old, new, f"{prefix}{key}.")
        elif old != new:
            lines.append(f"{prefix}{key}: {_shown(old)} -> {_shown(new)}")
    return lines


def _shown(value: Any) -> str:
    return "unset" if value is None else orjson.dumps(value).decode()
