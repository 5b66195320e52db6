"""Who is alive to take work."""
