"""`python -m app.admin.first_key`: make the first operator key and print it, once.

With `--new` it makes another one, for an operator who has lost the last: whoever may read the
database's address may do that.
"""

import asyncio
import sys

from app.auth import audit, keys
from app.auth.keys import Caller
from app.db.engine import create_engine, create_sessions, unit_of_work
from app.settings import Settings, read_settings
from dressage.spec.team import KeySpec, Role

DEFAULT_TEAM = "default"  # the migrations make it


async def make(settings: Settings, *, even_if_there_is_one: bool) -> str | None:
    """The secret of a new operator key, or None when somebody has one already."""
    engine = create_engine(settings.sqlalchemy_url)
    try:
        async with unit_of_work(create_sessions(engine)) as session:
            if await keys.any_operator(session) and not even_if_there_is_one:
                return None
            spec = KeySpec(team=DEFAULT_TEAM, role=Role.OPERATOR, name="first operator")
            made = await keys.create(session, spec)
            host = Caller(made.id, DEFAULT_TEAM, Role.OPERATOR, None, None)
            audit.note(session, host, action="first_key", target=f"/keys/{made.id}")
            return made.secret
    finally:
        await engine.dispose()


if __name__ == "__main__":
    secret = asyncio.run(make(read_settings(), even_if_there_is_one="--new" in sys.argv[1:]))
    if secret:
        print(secret)  # noqa: T201
