"""`pvg attack`: how often a grader, a reward model or a judge accepts wrong solutions, and refuses correct ones.

`texts` makes the texts of static attacks, `targets` asks what is attacked, `trained` trains a prover against it, and
`runner` makes the robustness card. docs/attack.md explains the results.
"""
