"""Where weights change: TRL's trainer, given our rollouts and rewards. Needs torch."""
