"""A scored episode as it is stored."""

from typing import Any

from dressage.spec.event import Rollout, TokenRole
from worker.training.rewards.weighted import Scored

LETTER = {role: role.value[0] for role in TokenRole}


def rollout_record(
    scored: Scored, phase: str, step: int, advantage: float | None = None
) -> dict[str, Any]:
    """Messages, tokens with roles, verdicts and reward of one episode.

    The id is the same when a step is repeated after a restart: the later rollout replaces the
    earlier one.
    """
    episode = scored.episode
    roles = LETTER[TokenRole.PROMPT] * len(episode.prompt_ids)
    roles += "".join(LETTER[role] for role in episode.roles)
    rollout = Rollout(
        id=f"{phase}-{step}-{episode.case.id}-{episode.index}",
        phase=phase,
        step=step,
        case_id=episode.case.id,
        index=episode.index,
        messages=tuple(episode.messages),
        token_ids=tuple(episode.prompt_ids + episode.completion_ids),
        roles=roles,
        stop_reason=str(episode.stop_reason),
        reward=scored.reward,
        verdicts=scored.verdicts,
        advantage=advantage,
        error=episode.lost,
    )
    return rollout.model_dump(mode="json")
