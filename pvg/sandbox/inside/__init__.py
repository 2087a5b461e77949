"""Runs in the sandbox's interpreter: it imports only the standard library, and no other part of pvg.

`warden` waits for jobs. `keeper` supervises one job. `walls` and `seccomp` confine the process in which `program` runs
a solution. `values` is also used outside the sandbox.
"""
