"""The planner: the memory of an experiment, and bounds of its step time, before it runs.

    plan = plan_of(experiment, inputs, prover, verifier)     # pvg.planning.plan

Importing this package does not load torch.
"""
