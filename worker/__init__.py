"""The GPU side: a shell that holds leases, and the training process it starts."""
