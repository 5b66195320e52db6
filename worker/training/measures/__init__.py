"""The built-in measures. Those of a suite run in the sandbox (dressage.sandbox)."""
