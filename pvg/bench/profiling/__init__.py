"""`pvg profile`: one stage of an experiment under several profilers, one after the other, and the timeline of a run.

- `passes`: the stage's work, and one pass over it per profiler
- `py_spy`: the sampling profiler, and its most expensive frames
- `profile`: all results in one folder
"""
