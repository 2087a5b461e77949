"""`pvg evaluate`: measures the finished rounds of a game with fresh samples (docs/evaluation.md).

The measures are pure functions of arrays. `runner` samples, trains attackers and combines the results.
"""
