"""The board game Diplomacy as pure functions on values: the map, positions, orders and the rules of every phase."""
