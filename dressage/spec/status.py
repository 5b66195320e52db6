"""The states of jobs and exports, and the closed set of reasons for which they end."""

from enum import StrEnum


class JobStatus(StrEnum):
    """Where a job is in its life."""

    QUEUED = "queued"
    PREPARING = "preparing"
    TRAINING = "training"
    EVALUATING = "evaluating"
    EXPORTING = "exporting"
    PAUSING = "pausing"
    PAUSED = "paused"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


TERMINAL = frozenset({JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.CANCELLED})


class Reason(StrEnum):
    """Why a job or an export ended, or went back to the queue."""

    COMPLETED = "completed"
    CANCELLED_BY_USER = "cancelled_by_user"
    PAUSED_BY_USER = "paused_by_user"
    OUT_OF_MEMORY = "out_of_memory"
    NO_LEARNING_SIGNAL = "no_learning_signal"
    NUMERICAL_ERROR = "numerical_error"
    USER_CODE_ERROR = "user_code_error"
    MODEL_NOT_FOUND = "model_not_found"
    MODEL_UNSUPPORTED = "model_unsupported"
    SUITE_INVALID = "suite_invalid"
    MISSING_DEPENDENCY = "missing_dependency"
    DISK_FULL = "disk_full"
    STORAGE_UNAVAILABLE = "storage_unavailable"
    WORKER_LOST = "worker_lost"
    STALLED = "stalled"
    GPU_FAILED = "gpu_failed"
    PREEMPTED = "preempted"
    CONVERSION_FAILED = "conversion_failed"
    OLLAMA_UNAVAILABLE = "ollama_unavailable"
    OLLAMA_REFUSED = "ollama_refused"
    FILES_REMOVED = "files_removed"
    PARITY_FAILED = "parity_failed"
    INTERNAL_ERROR = "internal_error"


class ExportStatus(StrEnum):
    """Where a follow-up task is in its life."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


EXPORT_TERMINAL = frozenset({ExportStatus.SUCCEEDED, ExportStatus.FAILED, ExportStatus.CANCELLED})
