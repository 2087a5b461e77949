"""Studies: a grid of experiments times seeds, played as ordinary runs, and what they say together.

    plan = load_study("quick")                    # pvg.study.plan: arms, seeds, cells, all validated
    play_cells(plan.todo(...), ...)               # pvg.study.playing: each cell a `pvg train` of its own
    results = collect(plan, command)              # pvg.study.results: means, intervals, comparisons, trends

Invariant: a cell (one arm, one seed) is an ordinary run, played by `pvg train` in a process of its own, and can be
looked at, resumed and reported like any other.
"""
