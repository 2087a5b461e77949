"""Whole games of a run, phase by phase. Games of Diplomacy are drawn on the board; other games have a table of what the
seats decided and of their values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from markupsafe import Markup

from pvg.games.diplomacy.game import Diplomacy
from pvg.games.diplomacy.orders import parse_orders
from pvg.games.diplomacy.phases import step
from pvg.games.diplomacy.position import Dislodged, Position
from pvg.reporting.axes import ChartLine, XAxis
from pvg.reporting.board import DrawnOrder, board_svg, described, legend, units_text
from pvg.reporting.charts import line_chart
from pvg.reporting.formats import value_text
from pvg.reporting.table import Column, PageSection, Table, elements
from pvg.rollout.game_records import GameRecord, PhaseRecord
from pvg.store.journal import read_json_lines
from pvg.store.run_directory import RunDirectory

MOST_PHASES = 40  # of a game that are drawn; a board takes about 20 kB
TICKS = 10
ENDS = {
    "over": "The rules ended the game.",
    "horizon": "The game was stopped at the horizon.",
    "quiet": "The game was stopped because no value changed any more.",
}


def section(run: RunDirectory, kind: str, thresholds: Mapping[int, float], each: int) -> PageSection:
    """At most `each` games of the newest round that has recorded games. `kind` and `thresholds` are not needed.

    Raises DamagedFileError for a damaged metrics.jsonl.
    """
    body: list[object] = []
    for number, game in enumerate(newest_games(run)[:each]):
        body += _shown(game, f"game-{number}")
    lead = "Games of the newest round, phase by phase. Open a phase to see its orders."
    return PageSection("games", "Games", body, lead, style="board.css")


def newest_games(run: RunDirectory) -> list[GameRecord]:
    """The recorded games of the newest round. A game that a resumed run recorded again counts once."""
    if not run.metrics.is_file():
        return []
    records = [GameRecord.from_plain(plain) for plain in read_json_lines(run.metrics) if plain.get("kind") == "game"]
    newest = max((record.round for record in records), default=0)
    by_start = {(r.start, *r.players.items()): r for r in records if r.round == newest}
    return list(by_start.values())


def _shown(game: GameRecord, ident: str) -> Iterator[object]:
    seats = list(game.phases[-1].values)
    styles = {seat: f"power-{number % 7}" for number, seat in enumerate(seats)}
    players = ", ".join(f"{seat}: {game.players.get(seat, 'policy')}" for seat in seats)
    ended = ENDS.get(game.ended, game.ended)
    yield elements.subheading(f"Round {game.round}: {game.game}", f"Start {game.start}. {players}. {ended}")
    yield _values(game, styles)
    drawn = Diplomacy() if game.game == "diplomacy" else None
    played = [phase for phase in game.phases if phase.decisions]
    if drawn is not None:
        last = drawn.load(bytes.fromhex(game.phases[-1].state))
        yield legend([(seat, styles[seat]) for seat in seats])
        title = f"The position at the end, before {last.phase}"
        yield elements.note(f"{title}. A dot is a supply centre in the colour of its owner.")
        yield _board(drawn, last, [], f"{ident}-end", title)
    for number, phase in enumerate(played[:MOST_PHASES]):
        name = f"{ident}-{number}"
        pieces = [_table(phase)] if drawn is None else _phase(drawn, phase, name, styles)
        yield elements.details(f"{phase.phase}: {_summary(phase)}", pieces)
    if len(played) > MOST_PHASES:
        yield elements.note(f"The other {len(played) - MOST_PHASES} phases are not shown.")


def _values(game: GameRecord, styles: Mapping[str, str]) -> Markup:
    """The value of each seat by phase."""
    lines = [
        ChartLine(seat, [[(float(at), phase.values[seat]) for at, phase in enumerate(game.phases)]], style)
        for seat, style in styles.items()
    ]
    every = -(-len(game.phases) // TICKS)
    names = [phase.phase or "end" for phase in game.phases]
    ticks = tuple((float(at), name) for at, name in enumerate(names) if at % every == 0)
    axis = XAxis(0.0, float(max(1, len(names) - 1)), "phase", ticks)
    title = "Supply centres" if game.game == "diplomacy" else "Value of each seat"
    return line_chart(title, lines, axis, "number", zero=True)


def _summary(phase: PhaseRecord) -> str:
    illegal = sum(bool(decision.note) for decision in phase.decisions)
    decisions = f"{len(phase.decisions)} decision{'s' if len(phase.decisions) > 1 else ''}"
    return f"{decisions}, {illegal} with illegal parts" if illegal else decisions


def _phase(game: Diplomacy, phase: PhaseRecord, ident: str, styles: Mapping[str, str]) -> list[object]:
    board, position = game.board, game.load(bytes.fromhex(phase.state))
    orders = {board.powers.index(d.seat): parse_orders(board, d.text).orders for d in phase.decisions}
    outcome = step(board, position, orders)
    results: dict[int, list[DrawnOrder]] = {}
    for result in outcome.results:
        drawn = DrawnOrder(result.order, result.success, result.why, styles[board.powers[result.power]])
        results.setdefault(result.power, []).append(drawn)
    table = Table([Column("power"), Column("orders"), Column("illegal", style="quiet")])
    for decision in phase.decisions:
        written = [described(board, drawn) for drawn in results.get(board.powers.index(decision.seat), [])]
        table.add(decision.seat, "; ".join(written) or "none", decision.note)
    every = [drawn for listed in results.values() for drawn in listed]
    return [_board(game, position, every, ident, phase.phase, outcome.dislodged), table]


def _board(
    game: Diplomacy,
    position: Position,
    orders: Sequence[DrawnOrder],
    ident: str,
    title: str,
    dislodged: Sequence[Dislodged] = (),
) -> Markup:
    says = "; ".join(described(game.board, drawn) for drawn in orders)
    description = f"{units_text(game.board, position)}{f' Orders: {says}.' if says else ''}"
    return board_svg(
        game.board, position, orders, ident=ident, title=title, description=description, dislodged=dislodged
    )


def _table(phase: PhaseRecord) -> Table:
    table = Table([Column("seat"), Column("decision"), Column("illegal", style="quiet"), Column("value", "right")])
    for decision in phase.decisions:
        value = value_text("number", phase.values[decision.seat])
        table.add(decision.seat, decision.text, decision.note, value)
    return table
