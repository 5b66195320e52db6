"""Webhooks: addresses that are told when jobs change their status."""

from datetime import datetime
from enum import StrEnum
from typing import Any

from pydantic import Field

from dressage.spec.base import Spec, View
from dressage.spec.status import JobStatus


class WebhookSpec(Spec):
    """A webhook to make."""

    url: str = Field(max_length=2000, examples=["https://ci.example.com/hooks/dressage"])
    statuses: tuple[JobStatus, ...] = Field(
        default=(
            JobStatus.SUCCEEDED,
            JobStatus.FAILED,
            JobStatus.CANCELLED,
            JobStatus.PAUSED,
        ),
        min_length=1,
        description="The changes to tell.",
    )


class Webhook(View):
    """A webhook without its secret."""

    id: str
    team: str
    url: str
    statuses: tuple[JobStatus, ...]
    created_at: datetime


class NewWebhook(Webhook):
    """A webhook as it is shown once, when it is made."""

    secret: str = Field(description="Signs every message; see standardwebhooks.com.")


class DeliveryStatus(StrEnum):
    """What became of a message."""

    PENDING = "pending"
    DELIVERED = "delivered"
    FAILED = "failed"


class Delivery(View):
    """One message to a webhook."""

    id: str
    status: DeliveryStatus
    attempts: int
    next_at: datetime | None = Field(default=None, description="When it is tried (again).")
    last_status: int | None = Field(default=None, description="HTTP status of the last answer.")
    last_error: str | None = None
    payload: dict[str, Any]
    created_at: datetime
    finished_at: datetime | None = None


class DeliveryPage(Spec):
    """One page of deliveries; pass `next_cursor` as `cursor` for the next one."""

    items: tuple[Delivery, ...]
    next_cursor: str | None = None
