"""Sends what the outbox holds, signed as https://www.standardwebhooks.com says."""

import asyncio
import base64
import hashlib
import hmac
import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import structlog
from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from app.db.engine import DATABASE_UNAVAILABLE, Sessions, unit_of_work
from app.db.models import DeliveryRow, WebhookRow
from app.egress import TOTAL_SECONDS, AllowedAddresses, post
from dressage.spec.webhook import DeliveryStatus

log = structlog.get_logger()

AT_ONCE, PER_TEAM, PER_WEBHOOK = 20, 5, 2
SECRET_PREFIX = "whsec_"
CLAIMED_FOR = timedelta(minutes=2)  # a sender that dies leaves its message to the next one
MINUTE, HOUR = timedelta(minutes=1), timedelta(hours=1)
RETRY_AFTER = (
    timedelta(seconds=5),
    *(5 * MINUTE, 30 * MINUTE, 2 * HOUR, 5 * HOUR, 10 * HOUR, 14 * HOUR, 20 * HOUR, 24 * HOUR),
)
GONE = 410


@dataclass(frozen=True)
class Message:
    """A claimed delivery."""

    id: str
    team: str
    webhook_id: str
    url: str
    secret: str
    payload: dict[str, Any]


class Sender:
    """Sends messages, each on its own: a slow receiver delays only what is for it."""

    def __init__(self, sessions: Sessions, allowed: AllowedAddresses) -> None:
        self._sessions, self._allowed = sessions, allowed
        self._running: dict[asyncio.Task[None], Message] = {}

    async def start_due(self) -> int:
        """Begin to send what is due, as far as there is room. Returns how many messages."""
        room = AT_ONCE - len(self._running)
        if room <= 0:
            return 0
        async with unit_of_work(self._sessions) as session:
            messages = await _claim(session, room, list(self._running.values()))
        for message in messages:
            task = asyncio.create_task(self._deliver(message))
            self._running[task] = message
            task.add_done_callback(self._running.pop)
        return len(messages)

    async def finish(self) -> None:
        """Wait for what is being sent."""
        await asyncio.gather(*self._running, return_exceptions=True)

    async def _deliver(self, message: Message) -> None:
        status, error = await _send(message, self._allowed)
        try:
            async with unit_of_work(self._sessions) as session:
                await _settle(session, message.id, status, error)
        except DATABASE_UNAVAILABLE as away:  # it is sent once more: receivers know its id
            log.warning("webhooks.database", error=str(away).splitlines()[:1])


async def deliver_due(sessions: Sessions, allowed: AllowedAddresses) -> int:
    """Send what is due now, to its end. Returns how many messages were tried."""
    sender = Sender(sessions, allowed)
    started = await sender.start_due()
    await sender.finish()
    return started


def signature(secret: str, message_id: str, timestamp: int, body: bytes) -> str:
    """The `webhook-signature` header: `v1,` and base64 of HMAC-SHA256."""
    key = base64.b64decode(secret.removeprefix(SECRET_PREFIX))
    signed = f"{message_id}.{timestamp}.".encode() + body
    digest = hmac.new(key, signed, hashlib.sha256).digest()
    return f"v1,{base64.b64encode(digest).decode()}"


async def _claim(session: AsyncSession, room: int, running: Sequence[Message]) -> list[Message]:
    """What to send next: of each team and each webhook only so much at a time."""
    now = await session.scalar(select(func.clock_timestamp()))
    assert now
    teams = Counter(message.team for message in running)
    hooks = Counter(message.webhook_id for message in running)
    turn = func.row_number().over(partition_by=WebhookRow.id, order_by=DeliveryRow.next_at)
    due = (
        select(DeliveryRow.id, turn.label("turn"))
        .join(WebhookRow, WebhookRow.id == DeliveryRow.webhook_id)
        .where(
            DeliveryRow.status == DeliveryStatus.PENDING,
            DeliveryRow.next_at <= now,
            WebhookRow.id.not_in([hook for hook, count in hooks.items() if count >= PER_WEBHOOK]),
        )
        .subquery()
    )
    rows = await session.execute(
        select(DeliveryRow, WebhookRow)
        .join(WebhookRow, WebhookRow.id == DeliveryRow.webhook_id)
        .join(due, due.c.id == DeliveryRow.id)
        .where(due.c.turn <= PER_WEBHOOK)
        .order_by(DeliveryRow.next_at)
        .with_for_update(skip_locked=True, of=DeliveryRow)
    )
    messages: list[Message] = []
    for delivery, webhook in rows:
        if len(messages) == room:
            break
        if teams[webhook.team] >= PER_TEAM or hooks[webhook.id] >= PER_WEBHOOK:
            continue
        teams[webhook.team] += 1
        hooks[webhook.id] += 1
        delivery.attempts += 1
        delivery.next_at = now + CLAIMED_FOR
        messages.append(
            Message(
                delivery.id,
                webhook.team,
                webhook.id,
                webhook.url,
                webhook.secret,
                delivery.payload,
            )
        )
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
    except TimeoutError:
        return None, f"no whole answer within {TOTAL_SECONDS:g} seconds"
    except Exception as error:  # noqa: BLE001  what cannot be sent must not stop the others
        return None, f"{type(error).__name__}: {error}"[:500].replace("\x00", "")
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
