"""A run's files on disk, which survive a kill at any instant. Each module states its invariants."""
