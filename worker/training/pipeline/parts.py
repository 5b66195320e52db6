"""What a run is built of."""

from dataclasses import dataclass

from dressage.sandbox.pool import WorkerPool
from dressage.spec.suite import Case
from worker.training.rewards.weighted import Scorer
from worker.training.rollout.engine import Engine
from worker.training.rollout.template import ConversationTemplate
from worker.training.update.trainer import JobTrainer


@dataclass(frozen=True)
class Parts:
    """Everything between the specification and the steps."""

    template: ConversationTemplate
    pool: WorkerPool
    engine: Engine
    scorer: Scorer
    trainer: JobTrainer
    training_cases: list[Case]
    held_out: list[Case]
    longest_prompt: int  # tokens, of all cases, without what environments add
