"""The verifier: its input and its pairs (`data`), its scores (`scorer`, on servers `vllm_backend`), its losses
(`losses`) and its calibration (`calibration`). This file imports none of them, because calibration needs no torch.

Invariants: verifier labels are correctness, never role; no role prompt reaches a verifier's input; a returned score
always comes from the requested version of the verifier.
"""
