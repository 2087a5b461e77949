"""`pvg profile`: one stage of an experiment under several profilers, one after the other, and the timeline of a run.

- `stages`: the stage's work, from the benchmark profile of that name
- `passes`: the profilers, each over a pass of its own
- `py_spy`: the sampling profiler that runs beside us; `frames`: its costliest frames
- `profile`: all of it in one folder; `timeline`: a finished run as a Chrome trace
"""
