"""A scored rollout as it is stored."""

from typing import Any

from dressage.spec.event import Rollout as StoredRollout
from dressage.spec.event import TokenRole
from worker.training.rewards.weighted import ScoredRollout

LETTER = {role: role.value[0] for role in TokenRole}


def rollout_record(
    scored: ScoredRollout,
    phase: str,
    step: int,
    advantage: float | None = None,
    *,
    whole: bool = True,
) -> dict[str, Any]:
    """Messages, tokens with roles, verdicts and reward of one rollout; or its figures alone.

    The id is the same when a step is repeated after a restart: the later rollout replaces the
    earlier one.
    """
    rollout = scored.rollout
    roles = LETTER[TokenRole.PROMPT] * len(rollout.prompt_ids)
    roles += "".join(LETTER[role] for role in rollout.roles)
    stored = StoredRollout(
        id=f"{phase}-{step}-{rollout.case.id}-{rollout.index}{rollout.resampled or ''}",
        resampled=rollout.resampled is not None,
        phase=phase,
        step=step,
        case_id=rollout.case.id,
        index=rollout.index,
        messages=tuple(rollout.messages) if whole else (),
        token_ids=tuple(rollout.prompt_ids + rollout.completion_ids) if whole else (),
        roles=roles if whole else "",
        whole=whole,
        stop_reason=str(rollout.stop_reason),
        reward=scored.reward,
        verdicts=scored.verdicts,
        advantage=advantage,
        error=rollout.lost,
    )
    return stored.model_dump(mode="json")
