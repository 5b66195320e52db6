"""Workers: their presence, their state, and what they run."""
