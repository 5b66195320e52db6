"""Webhook messages are stored in the transaction that changes a job, and sent later."""

from datetime import datetime
from typing import Any

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from app.db.base import new_id
from app.db.models import DeliveryRow, JobRow, WebhookRow


async def enqueue_deliveries(session: AsyncSession, job: JobRow, now: datetime) -> None:
    """Write a message for every webhook of the job's team that wants to hear of its status."""
    webhooks = await session.scalars(
        select(WebhookRow.id).where(
            WebhookRow.team == job.team, WebhookRow.statuses.contains([job.status])
        )
    )
    session.add_all(
        DeliveryRow(
            id=new_id("msg"), webhook_id=webhook_id, payload=_payload(job, now), next_at=now
        )
        for webhook_id in webhooks
    )


def _payload(job: JobRow, now: datetime) -> dict[str, Any]:
    return {
        "type": f"job.{job.status}",
        "timestamp": now.isoformat(),
        "data": {
            "job_id": job.id,
            "team": job.team,
            "name": job.name,
            "status": job.status,
            "reason": job.reason,
            "message": job.message,
        },
    }
