"""What runs in the sandbox's own interpreter: it imports nothing of pvg, and nothing but the standard library.

`warden` waits for jobs, `keeper` supervises one of them, `walls` and `seccomp` confine the process that `program` then
runs a solution in. `values` is shared with the process that asks.
"""
