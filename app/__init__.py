"""The control plane: HTTP in, rows and wakes out. Never loads torch."""
