"""The API process: `uvicorn --factory app.main:create_app`."""

import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import structlog
from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import HTMLResponse, RedirectResponse
from fastapi.staticfiles import StaticFiles

from app.api import router
from app.auth import keys
from app.auth.keys import KeyCache
from app.auth.limits import RateLimiter, RefusalLimiter
from app.background import Background
from app.broker.celery import create_celery
from app.db.engine import (
    Sessions,
    create_engine,
    create_reading_engine,
    create_sessions,
    unit_of_work,
)
from app.dependencies import Services
from app.exceptions import add_handlers
from app.head import AnswerHead
from app.health import Health
from app.jobs.cache import JobCache
from app.jobs.dependencies import StreamLimiter
from app.jobs.feed import Feed
from app.logs import configure_logs
from app.policy import AdmissionPolicy
from app.pools import TeamPool
from app.settings import Settings, read_settings, require_isolation
from app.storage import open_storage

log = structlog.get_logger()

ASSETS = "/assets"


def create_app(settings: Settings | None = None) -> FastAPI:
    """Build the service from the environment, or from given settings."""
    settings = settings or read_settings()
    configure_logs()
    log.info("user_code.isolation", walls=require_isolation(settings.minimum_isolation))
    engine = create_engine(settings.sqlalchemy_url)
    reading = create_reading_engine(settings.sqlalchemy_url)

    @asynccontextmanager
    async def lifespan(api: FastAPI) -> AsyncIterator[None]:
        sessions = create_sessions(engine)
        await _require_operator(sessions)
        feed = Feed(sessions, settings.libpq_url)
        api.state.feed, api.state.job_cache = feed, JobCache(reading, sessions)
        api.state.services = Services(
            sessions=sessions,
            key_cache=KeyCache(sessions),
            limiter=RateLimiter(settings.requests_per_minute),
            refusals=RefusalLimiter(),
            celery=create_celery(settings.celery_url),
            storage=open_storage(settings.storage, links=settings.storage_links),
            policy=AdmissionPolicy(
                models_dir=settings.models_dir,
                allowed_models=settings.allowed_models,
                allow_network=settings.allow_network,
                judge_urls=tuple(url.rstrip("/") for url in settings.judge_urls),
                ollama_urls=tuple(settings.ollama_urls),
                max_queued_jobs=settings.max_queued_jobs,
                max_waiting_tasks=settings.max_waiting_tasks,
            ),
            allowed_addresses=settings.allowed_addresses,
            max_upload_bytes=settings.max_upload_bytes,
            previews=TeamPool(4, per_team=2, what="previews"),
            uploads=TeamPool(4, per_team=2, what="uploads"),
        )
        # A full collection stops all streams for 100 ms and more: what was imported is kept out of
        # it, and it is rare (bench/api_load.py shows the difference).
        gc.collect()
        gc.freeze()
        gc.set_threshold(100_000, 50, 1000)
        api.state.streams = StreamLimiter(api.state.services.key_cache)
        background = Background()
        api.state.health = Health(api.state.services, background)
        background.start("feed", feed.listen)
        yield
        await background.stop()
        api.state.services.previews.close()
        api.state.services.uploads.close()
        await engine.dispose()
        await reading.dispose()

    api = FastAPI(
        title="Dressage",
        version="0.1.0",
        description="Reinforcement learning for tool-using agents, as a service.",
        lifespan=lifespan,
        root_path=settings.root_path,
        generate_unique_id_function=lambda route: route.name,
        docs_url=None,
        redoc_url=None,
    )
    add_handlers(api)
    api.add_middleware(AnswerHead)
    if settings.allowed_origins:
        api.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=["*"],
            allow_headers=["Authorization", "Content-Type", "Idempotency-Key", "Last-Event-ID"],
        )
    api.include_router(router)
    api.mount(ASSETS, StaticFiles(packages=[("fastapi_swagger", "resources")]))

    @api.get("/docs", include_in_schema=False)
    async def documentation() -> HTMLResponse:
        # FastAPI's own page loads its scripts from a CDN: it would stay blank without internet.
        return get_swagger_ui_html(
            openapi_url="openapi.json",
            title="Dressage",
            swagger_js_url=f"{ASSETS[1:]}/swagger-ui-bundle.js",
            swagger_css_url=f"{ASSETS[1:]}/swagger-ui.css",
            swagger_favicon_url=f"{ASSETS[1:]}/favicon-32x32.png",
        )

    @api.get("/", include_in_schema=False)
    async def home() -> RedirectResponse:
        return RedirectResponse("docs")

    return api


async def _require_operator(sessions: Sessions) -> None:
    """Nobody could use a service without keys, so it does not start."""
    async with unit_of_work(sessions) as session:
        if not await keys.any_operator(session):
            raise RuntimeError(
                "there is no operator key: make one with python -m app.admin.first_key"
            )
