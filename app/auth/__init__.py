"""Who asks: API keys with a team and a role."""
