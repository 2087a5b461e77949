"""What `pvg evaluate` writes, made of the fewest numbers; imports no part of pvg."""

from __future__ import annotations

from typing import Any

NUMBER = {"value": 0.5, "low": None, "high": None, "n": 4, "problems": 2}
ERRORS = {"ece": NUMBER, "ece_by_chance": None, "brier": NUMBER, "bins": []}
POLICY = {"name": "round-000", "kl": NUMBER, "kl_per_token": NUMBER, "accuracy": NUMBER}
PARTS = {
    "best_of_n": [],
    "separability": {"overall": NUMBER, "correct": NUMBER, "incorrect": NUMBER},
    "calibration": {"raw_is_probability": True, "raw": ERRORS, "fitted": None, "slope": 1.0, "offset": 0.0},
    "localisation": {"known": False},
    "cross": [],
    "legibility": [],
    "tax": {"policy": POLICY, "tax": NUMBER, "in_range": True, "kl_range": [0.0, 1.0]},
}


def attack(kind: str, steps: int, *, found: bool) -> dict[str, Any]:
    status = "found" if found else "censored"
    return {"kind": kind, "status": status, "limit": 200, "window": 2, "reference": NUMBER, "steps": steps}


def detection(*sources: str) -> dict[str, Any]:
    flaws = [{"source": name, "solutions": 4, "fooled_rate": NUMBER, "auc": NUMBER, "roc": []} for name in sources]
    shares = dict.fromkeys(("helpful_accuracy", "accepted_helpful"), NUMBER)
    return {"threshold": 0.0, **shares, "sources": flaws}


def round_of(number: int, *attacks: dict[str, Any]) -> dict[str, Any]:
    found = detection("base", *(f"attack-{one['kind']}" for one in attacks))
    return {"round": number, "exploit": list(attacks), "detection": found, **PARTS}


def document(config_hash: str, settings: dict[str, Any], rounds: list[dict[str, Any]]) -> dict[str, Any]:
    texts = dict.fromkeys(("run", "experiment", "code_version", "machine", "created"), "x")
    counts = {"rounds_finished": len(rounds), "rounds_planned": len(rounds)}
    return {
        "status": "complete", **texts, **counts, "config_hash": config_hash, "settings": settings, "rounds": rounds
    }  # fmt: skip
