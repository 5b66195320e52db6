"""Questions to a trained agent: leased and answered like an export, with an answer as result."""
