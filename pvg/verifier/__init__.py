"""The verifier: what it reads (`template`), how it scores (`scorer`, `cache`), how it learns (`data`, `batch`,
`losses`) and how it is judged (`measures`). This file imports none of them: the measures need no torch.

Invariants: verifier labels are correctness, never role, and no role prompt can reach a verifier's input; a score can
never be returned for another version of the verifier than the one that computed it.
"""
