"""Who runs what: claims with leases, heartbeats, expiry, and the doorbell."""
