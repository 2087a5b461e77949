"""Runs untrusted programs: pvg.sandbox.sandbox. docs/sandbox.md says what it guarantees."""
