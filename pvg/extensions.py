"""User code that an experiment names as `FILE.py:NAME`: a reward, a loss, a head or a task in one file.

    reward = "my_rewards.py:brave"          # [game]; instead of a name in pvg's table

The path is relative to the working directory, like all paths of an experiment. pvg reads the file as text when it
checks the experiment, and runs it when a command opens the object. The code runs with the user's permissions.

Invariant: a run uses one version of such a file. Its digest is committed with the run's state, a copy is in the run's
folder, and a run does not resume with another version (`pvg.game.ledger`).
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from traceback import walk_tb
from types import CodeType, ModuleType
from typing import Annotated, Any, TypeVar

from pydantic import Field

from pvg.errors import ConfigurationError, MissingRequirementError, PvgError, said
from pvg.inputs import expanded, read_input
from pvg.installation import install_packages

REFERENCE_PATTERN = r"^[^:]+\.py:[A-Za-z_][A-Za-z0-9_]*$"
# The type of a setting that accepts such a reference in addition to pvg's names.
Reference = Annotated[str, Field(pattern=REFERENCE_PATTERN)]
# The settings that accept one, by section.
EXTENSIBLE = {
    "task": ("source", "game"),
    "verifier": ("head", "loss"),
    "training": ("loss",),
    "game": ("reward", "protocol"),
}

MODULES = "pvg_extension_"  # begins the names of modules that are users' files

# Expressions whose values cannot be called.
PLAIN = (
    *(ast.Constant, ast.JoinedStr, ast.List, ast.Tuple, ast.Dict, ast.Set, ast.BinOp, ast.UnaryOp, ast.Compare),
    *(ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp),
)

T = TypeVar("T")
R = TypeVar("R")


def imported(place: str) -> Any:
    """The object of pvg at `place` (`MODULE:NAME`), imported now. A table of such places loads only what is used."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def is_reference(name: str) -> bool:
    return re.match(REFERENCE_PATTERN, name) is not None


def split_reference(name: str) -> tuple[Path, str]:
    path, _, attribute = name.rpartition(":")
    return expanded(path, name), attribute


def resolve(key: str, name: str, table: Mapping[str, T], kind: type = object) -> T:
    """The object that `name` means for the setting `key`: an entry of pvg's `table`, or an object in a user's file."""
    return load(key, name, kind) if is_reference(name) else table[name]


def load(key: str, name: str, kind: type = object) -> Any:
    """The object that the reference `name` means for the setting `key`. Runs its file.

    Raises ConfigurationError if the file cannot be read or run, or has no such object of type `kind` (`object`: any
    callable), and MissingRequirementError if it imports a module that is not installed.
    """
    path, attribute = split_reference(name)
    module = _module(key, path)
    if not hasattr(module, attribute):
        raise ConfigurationError(f"{key}: {path} does not define {attribute!r}.")
    found = getattr(module, attribute)
    fits = callable(found) if kind is object else isinstance(found, kind)
    if not fits:
        wanted = "a function or a class" if kind is object else f"a {kind.__name__}"
        raise ConfigurationError(f"{key}: {attribute!r} of {path} is a {type(found).__name__}, but must be {wanted}.")
    return found


def check_references(named: Iterable[tuple[str, str]]) -> None:
    """`named`: settings and their references. Raises ConfigurationError for a reference whose file is missing, is not
    Python, or does not define the name. Runs nothing."""
    for key, name in named:
        path, attribute = split_reference(name)
        tree = _parsed(key, path, _source(key, path))
        defined, imports = (
            set(_defined(tree)),
            [node for node in _statements(tree) if isinstance(node, ast.Import | ast.ImportFrom)],
        )
        imported = {alias.asname or alias.name for node in imports for alias in node.names}  # "*" for a star import
        if complaint := _unusable(key, attribute, tree):
            raise ConfigurationError(f"{key} = {name!r}: {attribute!r} of {path} {complaint}.")
        if not {attribute, "*"} & (defined | imported):
            raise ConfigurationError(
                f"{key} = {name!r}: {path} does not define {attribute!r}.",
                f"It defines: {', '.join(sorted(defined)) or 'nothing'}.",
            )


def digests(named: Iterable[tuple[str, str]]) -> dict[str, str]:
    """SHA-256 of every `named` file and of what it imports from its folder, by its path as written there."""
    return {str(path): hashlib.sha256(source).hexdigest() for path, source in _files(named)}


def sources(named: Iterable[tuple[str, str]]) -> dict[str, bytes]:
    """The content of every such file, under a name that distinguishes files with the same name and other content."""
    return {f"{path.stem}-{hashlib.sha256(source).hexdigest()[:12]}.py": source for path, source in _files(named)}


def _files(named: Iterable[tuple[str, str]]) -> Iterator[tuple[Path, bytes]]:
    for key, name in named:
        waiting, seen = [split_reference(name)[0]], set[Path]()
        while waiting:
            path = waiting.pop()
            if path not in seen:
                seen.add(path)
                source = _source(key, path)
                yield path, source
                waiting += _imported_beside(path, source)


def _imported_beside(path: Path, source: bytes) -> Iterator[Path]:
    """The files in the folder of `path` that it may import, the modules of a package included. Not pvg itself, in a
    checkout. A file that is not valid Python counts as a module without imports."""
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except Exception:  # noqa: BLE001 - also ValueError, RecursionError, MemoryError: all are about the text
        return
    for node in nodes:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) and node.module and not node.level else []
        for name in {name.partition(".")[0] for name in names} - sys.stdlib_module_names - {"pvg", "pvg_cli"}:
            found = [path.parent / f"{name}.py", *sorted((path.parent / name).rglob("*.py"))]
            yield from filter(Path.is_file, found)


def _source(key: str, path: Path) -> bytes:
    try:
        return read_input(path)
    except OSError as error:
        raise ConfigurationError(
            f"{key}: cannot read {path}: {error.strerror}.",
            "The path of your file is relative to the working directory.",
        ) from None


def _parsed(key: str, path: Path, source: bytes) -> ast.Module:
    """The syntax tree of a file that compiles. The compiler refuses more than the parser, such as a late `global`."""
    try:
        tree = ast.parse(source, filename=str(path))
        compile(tree, str(path), "exec", dont_inherit=True)
        return tree
    except Exception as error:  # noqa: BLE001 - also ValueError, RecursionError, MemoryError: all are about the text
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        what = error.msg if isinstance(error, SyntaxError) else str(error) or type(error).__name__
        raise ConfigurationError(f"{key}: {path}{line} is not valid Python: {what}.") from None


def _statements(tree: ast.AST) -> Iterator[ast.stmt]:
    """The statements that an import of the file may run, those in blocks such as `try` included."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.stmt):
            yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.expr):
            yield from _statements(node)


def _defined(tree: ast.Module) -> Iterator[str]:
    """The names of functions, classes and values of the file, not those inside of functions and classes."""
    for node in _statements(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (leaf.id for target in targets for leaf in ast.walk(target) if isinstance(leaf, ast.Name))


def _unusable(key: str, attribute: str, tree: ast.Module) -> str:
    """Why the last top-level definition of that name cannot be used, as far as the source shows; otherwise "".

    `training.loss` must be an object and `task.source` a class; all others are called.
    """
    found = [node for node in tree.body if attribute in _defined(ast.Module([node], []))]
    if not found:
        return ""
    if isinstance(found[-1], ast.Assign | ast.AnnAssign):
        return "is a plain value, but must be code" if isinstance(found[-1].value, PLAIN) else ""
    wanted = {"training.loss": "a PolicyLoss", "task.source": "a class"}.get(key, "a function or a class")
    if isinstance(found[-1], ast.AsyncFunctionDef) and key != "TARGET":
        return f"is an async function, but must be {wanted}"
    if isinstance(found[-1], ast.FunctionDef) and key == "training.loss":
        return f"is a function, but must be {wanted}"
    return ""


def _module(key: str, path: Path) -> ModuleType:
    """The file as a module. It runs once per process and content, so that its classes keep their identity."""
    source = _source(key, path)
    name = f"{MODULES}{path.stem}_{hashlib.sha256(bytes(path.resolve()) + source).hexdigest()[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    code = compile(_parsed(key, path, source), str(path), "exec", dont_inherit=True)
    spec = importlib.util.spec_from_loader(name, loader=None, origin=str(path))
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    module.__file__ = str(path)
    sys.modules[name] = module  # before it runs, because its dataclasses look up their module
    try:
        exec(code, module.__dict__)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, KeyboardInterrupt):
            raise
        raise _failure(f"{key}: running {path} failed", error) from error
    return module


def _failure(what: str, error: BaseException) -> PvgError:
    """The error for a user's code that raised `error`, perhaps the SystemExit of `sys.exit` or argparse."""
    kind = MissingRequirementError if isinstance(error, ModuleNotFoundError) else ConfigurationError
    remedy = package_remedy(error) or "--debug shows the traceback."
    return kind(f"{what}: {type(error).__name__}: {said(error)}.", remedy)


def package_remedy(error: BaseException) -> str:
    """What to do about a module that is not installed; "" for another error."""
    name = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    return name and f"Install the package that has it: {install_packages(name)}"


def failure_of(error: BaseException) -> PvgError | None:
    """The error to show for an exception that passed through a user's file; None if no frame of it is in one."""
    if (place := _place(error)) is None:
        return None
    code, line = place
    return _failure(f"{code.co_filename}, line {line}, failed", error)


def _place(error: BaseException) -> tuple[CodeType, int] | None:
    """The last function of a user's file that an exception passed through, and the line in it."""
    tops = [each for each in walk_tb(error.__traceback__) if each[0].f_globals.get("__name__", "").startswith(MODULES)]
    return (tops[-1][0].f_code, tops[-1][1]) if tops else None


def called(key: str, name: str, function: Callable[..., R], *args: Any, method: str = "") -> R:
    """`function(*args)`. An exception of the user's function, or of the call of its `method`, becomes a
    ConfigurationError; pvg's errors pass through."""
    try:
        return function(*args)
    except (PvgError, KeyboardInterrupt):
        raise
    except BaseException as error:
        if not is_reference(name):
            raise
        where = method
        if (place := _place(error)) is not None:
            where = f"{place[0].co_qualname}, line {place[1]}"
        raise _failure(f"{key} = {name!r} failed{where and f' in {where}'}", error) from error
