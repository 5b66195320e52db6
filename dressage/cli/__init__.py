"""The `dressage` command, by theme. Everything but `up` goes through the client."""
