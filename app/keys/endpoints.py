"""`/keys` and `/audit`: who may ask, and who did what."""

from typing import Annotated

from fastapi import Body, Response

from app import examples
from app.auth import audit, keys
from app.db.paging import next_cursor
from app.dependencies import (
    CurrentCaller,
    InTransaction,
    Limit,
    OperatorOnly,
    Position,
    VisibleTeam,
)
from app.gate import ApiRouter
from dressage.spec.team import AuditEntry, AuditPage, Key, KeyPage, KeySpec, NewKey

router = ApiRouter()


@router.post(
    "/keys",
    status_code=201,
    tags=["keys"],
    dependencies=[OperatorOnly],
    responses=examples.shown(examples.NEW_KEY, 201),
)
async def create_key(
    spec: Annotated[KeySpec, Body(openapi_examples={"submitter": {"value": examples.KEY_SPEC}})],
    transaction: InTransaction,
    response: Response,
) -> NewKey:
    """Make a key. Its secret is in this answer and nowhere else."""
    made = await keys.create(transaction.session, spec)
    response.headers["Location"] = f"/keys/{made.id}"
    return made


@router.get("/keys", tags=["keys"], responses=examples.shown(examples.page(examples.KEY)))
async def list_keys(
    transaction: InTransaction, team: VisibleTeam, position: Position, limit: Limit = 50
) -> KeyPage:
    """Keys of your team (of every team, for operators), newest first."""
    rows = await keys.page(transaction.session, team, before=position, limit=limit)
    return KeyPage(items=tuple(map(Key.model_validate, rows)), next_cursor=next_cursor(rows, limit))


@router.get("/keys/mine", tags=["keys"], responses=examples.shown(examples.KEY))
async def my_key(transaction: InTransaction, caller: CurrentCaller) -> Key:
    """The key of this request: your team and role."""
    return Key.model_validate(await keys.get(transaction.session, caller.key_id))


@router.delete(
    "/keys/{key_id}",
    tags=["keys"],
    dependencies=[OperatorOnly],
    responses=examples.shown(examples.KEY),
)
async def revoke_key(key_id: str, transaction: InTransaction) -> Key:
    """End a key, for good. It is refused within seconds."""
    return Key.model_validate(await keys.revoke(transaction.session, key_id))


@router.get("/audit", tags=["audit"], responses=examples.shown(examples.page(examples.AUDIT)))
async def list_changes(
    transaction: InTransaction, team: VisibleTeam, position: Position, limit: Limit = 50
) -> AuditPage:
    """Changes that your team (every team, for operators) made, newest first."""
    rows = await audit.page(transaction.session, team, before=position, limit=limit)
    return AuditPage(
        items=tuple(map(AuditEntry.model_validate, rows)), next_cursor=next_cursor(rows, limit)
    )
