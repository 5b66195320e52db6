"""All tables: importing this package registers them for sessions and migrations."""

from app.db.models.artifact import ArtifactRow
from app.db.models.attempt import AttemptRow
from app.db.models.audit import AuditRow
from app.db.models.event import EventRow
from app.db.models.export import ExportRow
from app.db.models.heartbeat import HeartbeatRow
from app.db.models.job import JobRow
from app.db.models.key import KeyRow
from app.db.models.orphan_blob import OrphanBlobRow
from app.db.models.rollout import RolloutRow
from app.db.models.suite import SuiteNameRow, SuiteRow
from app.db.models.sweep import SweepRow
from app.db.models.team import TeamRow
from app.db.models.webhook import DeliveryRow, WebhookRow
from app.db.models.worker import WorkerRow

__all__ = [
    "ArtifactRow",
    "AttemptRow",
    "AuditRow",
    "DeliveryRow",
    "EventRow",
    "ExportRow",
    "HeartbeatRow",
    "JobRow",
    "KeyRow",
    "OrphanBlobRow",
    "RolloutRow",
    "SuiteNameRow",
    "SuiteRow",
    "SweepRow",
    "TeamRow",
    "WebhookRow",
    "WorkerRow",
]
