"""The verifier: its input (`template`), its scores (`scorer`, `cache`), its training (`data`, `losses`, `robust`) and
its calibration (`calibration`). This file imports none of them, because calibration needs no torch.

Invariants: verifier labels are correctness, never role; no role prompt reaches a verifier's input; a returned score
always comes from the requested version of the verifier.
"""
