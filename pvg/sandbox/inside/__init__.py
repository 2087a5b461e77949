"""Code that runs in the sandbox's interpreter. It imports only the standard library, and nothing of pvg.

`warden` waits for jobs, `keeper` supervises one job, `walls` and `seccomp` confine the process in which `program` runs
a solution. `values` is also used by the parent process.
"""
