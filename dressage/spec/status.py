"""States of jobs, exports, attempts and workers, and the closed sets of reasons for them."""

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
    SAMPLER_FAILED = "sampler_failed"
    SAMPLER_STALE = "sampler_stale"
    PROCESS_KILLED = "process_killed"
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


class WorkerState(StrEnum):
    """Whether a worker takes new jobs."""

    ACTIVE = "active"
    DRAINING = "draining"
    SICK = "sick"


class WaitReason(StrEnum):
    """Why a queued job does not run now."""

    NONE = "none"
    BACK_OFF = "back_off"
    QUOTA = "quota"
    NO_WORKER = "no_worker"
    RESERVED = "reserved"
    BUSY = "busy"


class AttemptKind(StrEnum):
    """What a worker works on: a job's training, one of its exports, or a question to its agent."""

    TRAIN = "train"
    EXPORT = "export"
    GENERATION = "generation"


class AttemptOutcome(StrEnum):
    """How an attempt ended."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    PAUSED = "paused"
    RELEASED = "released"
    LOST = "lost"
    STALLED = "stalled"
    GPU_FAILED = "gpu_failed"
    KILLED = "killed"
    DISK_FULL = "disk_full"
    STORAGE_UNAVAILABLE = "storage_unavailable"
    OUT_OF_MEMORY = "out_of_memory"
