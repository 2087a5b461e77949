"""Tasks on the Diplomacy board (pvg.games.diplomacy): plans that no reply of the other side refutes."""
