"""The tables, and sessions on them. Queries live in each domain's repository."""
