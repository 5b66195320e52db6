"""Sends what the outbox holds, signed as https://www.standardwebhooks.com says."""

import asyncio
import base64
import hashlib
import hmac
import json
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import httpcore2
import structlog
from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from app.db.engine import Sessions, unit_of_work
from app.db.models import DeliveryRow, WebhookRow
from app.egress import AllowedAddresses, post
from dressage.spec.webhook import DeliveryStatus

log = structlog.get_logger()

AT_ONCE = 20
SECRET_PREFIX = "whsec_"
CLAIMED_FOR = timedelta(minutes=2)  # a sender that dies leaves its message to the next one
MINUTE, HOUR = timedelta(minutes=1), timedelta(hours=1)
RETRY_AFTER = (
    timedelta(seconds=5),
    *(5 * MINUTE, 30 * MINUTE, 2 * HOUR, 5 * HOUR, 10 * HOUR, 14 * HOUR, 20 * HOUR, 24 * HOUR),
)
GONE = 410
FAILURES = (httpcore2.NetworkError, httpcore2.TimeoutException, httpcore2.ProtocolError)


@dataclass(frozen=True)
class Message:
    """A claimed delivery."""

    id: str
    url: str
    secret: str
    payload: dict[str, Any]


async def deliver_due(sessions: Sessions, allowed: AllowedAddresses) -> int:
    """Send what is due, many at a time. Returns how many messages were tried."""
    async with unit_of_work(sessions) as session:
        messages = await _claim(session)
    results = await asyncio.gather(*(_send(message, allowed) for message in messages))
    for message, (status, error) in zip(messages, results, strict=True):
        async with unit_of_work(sessions) as session:
            await _settle(session, message.id, status, error)
    return len(messages)


def signature(secret: str, message_id: str, timestamp: int, body: bytes) -> str:
    """The `webhook-signature` header: `v1,` and base64 of HMAC-SHA256."""
    key = base64.b64decode(secret.removeprefix(SECRET_PREFIX))
    signed = f"{message_id}.{timestamp}.".encode() + body
    digest = hmac.new(key, signed, hashlib.sha256).digest()
    return f"v1,{base64.b64encode(digest).decode()}"


async def _claim(session: AsyncSession) -> list[Message]:
    now = await session.scalar(select(func.clock_timestamp()))
    assert now
    rows = await session.execute(
        select(DeliveryRow, WebhookRow)
        .join(WebhookRow, WebhookRow.id == DeliveryRow.webhook_id)
        .where(DeliveryRow.status == DeliveryStatus.PENDING, DeliveryRow.next_at <= now)
        .order_by(DeliveryRow.next_at)
        .limit(AT_ONCE)
        .with_for_update(skip_locked=True, of=DeliveryRow)
    )
    messages = []
    for delivery, webhook in rows:
        delivery.attempts += 1
        delivery.next_at = now + CLAIMED_FOR
        messages.append(Message(delivery.id, webhook.url, webhook.secret, delivery.payload))
    return messages


async def _send(message: Message, allowed: AllowedAddresses) -> tuple[int | None, str | None]:
    body = json.dumps(message.payload).encode()
    timestamp = int(time.time())
    headers: dict[bytes | str, bytes | str] = {
        "Content-Type": "application/json",
        "User-Agent": "dressage",
        "webhook-id": message.id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": signature(message.secret, message.id, timestamp, body),
    }
    try:
        status, answer = await post(allowed, message.url, headers, body)
    except FAILURES as error:
        return None, f"{type(error).__name__}: {error}"[:500]
    accepted = 200 <= status < 300  # a redirect is none: it could lead anywhere
    return status, None if accepted else f"answered {status}: {answer[:300]}".replace("\x00", "")


async def _settle(
    session: AsyncSession, delivery_id: str, status: int | None, error: str | None
) -> None:
    row = await session.get(DeliveryRow, delivery_id, with_for_update=True)
    if row is None:  # its webhook was deleted meanwhile
        return
    now = await session.scalar(select(func.clock_timestamp()))
    assert now
    row.last_status, row.last_error = status, error
    if error is None:
        row.status, row.finished_at = DeliveryStatus.DELIVERED, now
    elif row.attempts > len(RETRY_AFTER) or status == GONE:
        row.status, row.finished_at = DeliveryStatus.FAILED, now
    else:
        row.next_at = now + RETRY_AFTER[row.attempts - 1]
    log.info("webhook.sent", delivery=delivery_id, status=status, error=error)
