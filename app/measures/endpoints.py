"""`/measures`: try them before a job does."""

from app import examples
from app.dependencies import Parts, Team
from app.gate import ApiRouter
from app.measures import service
from dressage.spec.preview import MeasurePreview, PreviewResults

router = ApiRouter(prefix="/measures", tags=["measures"])


@router.post("/preview", responses=examples.shown(examples.PREVIEW))
async def preview_measures(request: MeasurePreview, team: Team, parts: Parts) -> PreviewResults:
    """Run measures on given rollouts. A measure that fails says how; nothing is stored."""
    return await service.preview(
        parts.sessions,
        parts.storage,
        parts.policy,
        parts.previews,
        team=team,
        request=request,
    )
