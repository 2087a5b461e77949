"""Studies: a grid of experiments times seeds, played as ordinary runs, and their joint results.

    plan = load_study("quick")                    # pvg.study.plan: validated arms, seeds, cells
    play_cells(plan.todo(...), ...)               # pvg.study.playing: one `pvg train` process per cell
    results = collect(plan, command)              # pvg.study.results: means, intervals, comparisons, trends

Invariant: a cell (one arm with one seed) is an ordinary run, played by `pvg train` in a separate process. It can be
inspected, resumed and reported like any other run.
"""
