"""Draws docs/diplomacy-board.svg: two plans of the mini board with a reply, as `pvg report` draws them.

python -m benchmarks.pages.draw_plans
"""

from __future__ import annotations

import re
from pathlib import Path

from pvg.games.diplomacy.board import place
from pvg.games.diplomacy.phases import step
from pvg.games.diplomacy.standard import mini_board
from pvg.reporting import table
from pvg.reporting.board import DrawnOrder, board_svg
from pvg.reporting.plans_on_board import ENEMY, OWN, mini_orders

PICTURE = Path(__file__).parents[2] / "docs" / "diplomacy-board.svg"
REPLY = "bd;g+bd"
# Plan, heading, and what the picture says below it.
PLANS = (
    ("ab;d.;e.", "Refuted", "The reply bd;g+bd drives the army out of d."),
    ("a.;d.;e+d", "Sound", "With support, d holds against the same reply."),
)
WIDTH, HEIGHT, GAP, HEAD, FOOT = 308, 236, 40, 34, 30  # of a board, between boards, and of the lines around it
TEMPLATES = Path(table.__file__).parent / "templates"


def picture() -> str:
    boards = []
    for number, (text, heading, says) in enumerate(PLANS):
        left = number * (WIDTH + GAP) + GAP / 2
        nested = f'<svg x="{left:g}" y="{HEAD}" width="{WIDTH}" height="{HEIGHT}"'
        drawn = re.sub(r"^.*?<svg", nested, _board(text, f"plan-{number}"), count=1, flags=re.DOTALL)
        boards.append(f'<text class="head" x="{left:g}" y="24">{heading}: {text}</text>')
        boards.append(drawn.replace("</div>", ""))
        boards.append(f'<text class="foot" x="{left:g}" y="{HEAD + HEIGHT + 20}">{says}</text>')
    width, height = len(PLANS) * (WIDTH + GAP), HEAD + HEIGHT + FOOT
    description = " ".join(f"{text}: {says}" for text, _, says in PLANS)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'role="img" aria-labelledby="title desc" font-family="system-ui, sans-serif">\n'
        '<title id="title">Two plans for the problem ade/bg&gt;d</title>\n'
        f'<desc id="desc">{description}</desc>\n<style>{_style()}</style>\n'
        f'<rect width="{width}" height="{height}" rx="8" fill="var(--paper)"/>\n' + "\n".join(boards) + "\n</svg>\n"
    )


def _board(text: str, ident: str) -> str:
    """A plan of a, d and e with the reply of b and g."""
    board = mini_board()
    position = place(board, {"White": ["A a", "A d", "A e"], "Black": ["A b", "A g"]})
    outcome = step(board, position, {0: mini_orders(board, text) or [], 1: mini_orders(board, REPLY) or []})
    styles = [OWN, ENEMY]
    return board_svg(
        board,
        position,
        [DrawnOrder(r.order, r.success, r.why, styles[r.power]) for r in outcome.results],
        ident=ident,
        title=text,
        description=f"The plan {text} with the reply {REPLY}.",
        styles=styles,
        dislodged=outcome.dislodged,
        target=board.provinces.index("d"),
    )


def _style() -> str:
    """The colours of a page and the style sheet of boards. A picture has no theme button, so it follows the system."""
    colours = re.findall(r"(--[a-z0-9-]+): (light-dark\([^()]*\))", (TEMPLATES / "page.css").read_text())
    sheet = re.sub(r"/\*.*?\*/", "", (TEMPLATES / "board.css").read_text(), flags=re.DOTALL)
    used = [f"{name}: {value};" for name, value in colours if f"var({name})" in sheet]
    own = ".head { font-weight: 650; } text { fill: var(--ink); font-size: 14px; }"
    text = f":root {{ {' '.join(used)} }}\n{sheet}\n{own}"
    return _resolved(text, 1) + "\n@media (prefers-color-scheme: dark) {\n" + _resolved(_roots(text), 2) + "\n}"


def _resolved(text: str, group: int) -> str:
    """`light-dark(a, b)` replaced by a (group 1) or b (group 2)."""
    return re.sub(r"light-dark\((#[0-9a-f]+), (#[0-9a-f]+)\)", rf"\{group}", text)


def _roots(text: str) -> str:
    """The rules of a style sheet that depend on the theme."""
    return "\n".join(re.findall(r"[^{}\n]+\{[^{}]*light-dark\([^{}]*\}", text))


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
