"""The table of transports: what `weights.transport` may name."""
