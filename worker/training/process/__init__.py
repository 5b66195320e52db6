"""What every training process stands on: failures with a reason, user code, its boundary."""
