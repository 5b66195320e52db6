"""`/webhooks`: be told when jobs change their status."""

import base64
import secrets
from typing import Annotated

from fastapi import Body, Response
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from app import examples
from app.db.base import new_id, visible
from app.db.models import DeliveryRow, WebhookRow
from app.db.paging import newest_first, next_cursor
from app.dependencies import InTransaction, Limit, Parts, Position, Team, VisibleTeam
from app.egress import normalized
from app.exceptions import FieldProblem, InvalidRequest, NotFound
from app.gate import ApiRouter
from app.webhooks.delivery import SECRET_PREFIX
from dressage.spec.webhook import (
    Delivery,
    DeliveryPage,
    DeliveryStatus,
    NewWebhook,
    Webhook,
    WebhookSpec,
)

router = ApiRouter(prefix="/webhooks", tags=["webhooks"])


@router.post("", status_code=201, responses=examples.shown(examples.NEW_WEBHOOK, 201))
async def create_webhook(
    spec: Annotated[WebhookSpec, Body(openapi_examples={"ci": {"value": examples.WEBHOOK_SPEC}})],
    transaction: InTransaction,
    team: Team,
    parts: Parts,
    response: Response,
) -> NewWebhook:
    """Tell an address of your team's jobs. The secret is in this answer and nowhere else."""
    problem = parts.allowed_addresses.problem(spec.url)
    if problem:
        raise InvalidRequest(f"url: {problem}", [FieldProblem(field="url", message=problem)])
    secret = SECRET_PREFIX + base64.b64encode(secrets.token_bytes(32)).decode()
    row = WebhookRow(
        id=new_id("webhook"),
        team=team,
        url=normalized(spec.url),
        secret=secret,
        statuses=[str(status) for status in spec.statuses],
    )
    transaction.session.add(row)
    await transaction.session.flush()
    await transaction.session.refresh(row)
    response.headers["Location"] = f"/webhooks/{row.id}"
    return NewWebhook(**Webhook.model_validate(row).model_dump(), secret=secret)


@router.get("", responses=examples.shown([examples.WEBHOOK]))
async def list_webhooks(transaction: InTransaction, team: VisibleTeam) -> tuple[Webhook, ...]:
    """Webhooks of your team (of every team, for operators)."""
    rows = await transaction.session.scalars(
        select(WebhookRow).where(visible(WebhookRow.team, team)).order_by(WebhookRow.arrival)
    )
    return tuple(map(Webhook.model_validate, rows))


@router.delete("/{webhook_id}", status_code=204)
async def delete_webhook(
    webhook_id: str, transaction: InTransaction, team: VisibleTeam
) -> Response:
    """Stop telling. Messages that wait are not sent any longer."""
    await transaction.session.delete(await _existing(transaction.session, team, webhook_id))
    return Response(status_code=204)


@router.get("/{webhook_id}/deliveries", responses=examples.shown(examples.page(examples.DELIVERY)))
async def list_deliveries(
    webhook_id: str,
    transaction: InTransaction,
    team: VisibleTeam,
    position: Position,
    limit: Limit = 50,
) -> DeliveryPage:
    """What became of each message, newest first."""
    await _existing(transaction.session, team, webhook_id)
    query = select(DeliveryRow).where(DeliveryRow.webhook_id == webhook_id)
    rows = await newest_first(
        transaction.session, query, DeliveryRow.arrival, before=position, limit=limit
    )
    return DeliveryPage(items=tuple(map(_delivery, rows)), next_cursor=next_cursor(rows, limit))


async def _existing(session: AsyncSession, team: str | None, webhook_id: str) -> WebhookRow:
    row: WebhookRow | None = await session.scalar(
        select(WebhookRow).where(WebhookRow.id == webhook_id, visible(WebhookRow.team, team))
    )
    if row is None:
        raise NotFound(f"there is no webhook {webhook_id!r}")
    return row


def _delivery(row: DeliveryRow) -> Delivery:
    shown = Delivery.model_validate(row)
    pending = shown.status is DeliveryStatus.PENDING
    return shown if pending else shown.model_copy(update={"next_at": None})
