"""What a game has led to, measured on its finished rounds with fresh samples: `pvg evaluate` (docs/evaluation.md).

The measures are pure functions of arrays, one module each; `runner` samples, trains attackers and puts them together.
"""
