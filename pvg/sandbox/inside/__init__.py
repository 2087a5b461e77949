"""Runs in the sandbox's interpreter: imports nothing of pvg, only the standard library.

`warden` waits for jobs. `keeper` supervises one job. `walls` and `seccomp` confine the process in which `program` runs
a solution. `values` is also used outside the sandbox.
"""
