"""pvg: prover-verifier games for language models.

    import pvg

    run = pvg.play("modchain", {"game.rounds": 1})

Importing pvg loads no torch. The names of `API` are loaded when they are first used; pvg.api documents them, and
__init__.pyi gives type checkers their types.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

# Name -> the module that defines it.
API = {
    "Run": "pvg.api",
    "VerifierScorer": "pvg.verifier.scorer",
    "evaluate": "pvg.api",
    "load_experiment": "pvg.api",
    "play": "pvg.api",
}


def __getattr__(name: str) -> Any:
    if name not in API:
        raise AttributeError(f"module 'pvg' has no attribute {name!r}")
    return getattr(importlib.import_module(API[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *API})
