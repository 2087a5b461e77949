"""Traces of any trainer or evaluation: problems with written solutions, and what a reader finds in them.

`pvg measure` computes the measures of pvg.traces.measures on the traces of pvg.traces.loaders with a model of
pvg.traces.readers. `pvg attack` uses the same client of servers and the same store of results.
"""
