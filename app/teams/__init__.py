"""Teams that share the GPUs: their limits, quotas and use."""
