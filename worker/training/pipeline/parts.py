"""What a run is built of."""

from dataclasses import dataclass
from typing import Any

from dressage.sandbox.pool import WorkerPool
from worker.training.rewards.weighted import Scorer
from worker.training.rollout.engine import Engine
from worker.training.update.trainer import JobTrainer


@dataclass(frozen=True)
class Parts:
    """Everything between the specification and the steps."""

    tokenizer: Any
    pool: WorkerPool
    engine: Engine
    scorer: Scorer
    trainer: JobTrainer
