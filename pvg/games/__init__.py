"""Games of many turns and many players as pure functions on values."""
