"""Workers: processes with one compute thread each that sample, score and compute gradients for shards of rows."""
