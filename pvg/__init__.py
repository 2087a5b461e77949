"""pvg: prover-verifier games for language models. Importing it loads no torch."""

__version__ = "0.1.0"
