"""One root seed, from which every draw of a run gets its own."""

import hashlib


def derived_seed(*parts: int | str) -> int:
    """A 31-bit seed that differs for every combination and is the same on every machine."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1
