"""The planner: predicts step time, idle share, staleness, drops and memory of an experiment before it runs.

    world = World(...)                       # what the prediction depends on (pvg.planning.world)
    outcome = simulate(world, batches=40)    # the discrete-event model (pvg.planning.simulation)
    bounds_of(world)                         # closed-form bounds (pvg.planning.bounds)

Importing this package does not load torch. docs/scaling.md explains it.
"""
