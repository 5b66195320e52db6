"""What every training process stands on: failures with a reason, seeds, user code, its boundary."""
