"""What the operator decides, as environment variables that start with `DRESSAGE_`."""

from pathlib import Path

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class Settings(BaseSettings):
    """Read only at the edge: `main.py`, `celery_app.py`, `scheduler.py`, migrations."""

    model_config = SettingsConfigDict(env_prefix="DRESSAGE_", extra="ignore")

    database_url: str = Field(description="postgresql://… ; a socket folder goes in `host`.")
    redis_url: str = Field(description="redis://… or unix:///path/of.sock")
    storage_dir: Path = Field(description="Suites and artifacts. Shared by API and workers.")
    runs_dir: Path = Field(
        description="Run directories with checkpoints. Shared by workers that continue each "
        "other's jobs."
    )
    max_upload_bytes: int = Field(default=512 * 1024**2, gt=0)
    lease_seconds: float = Field(default=30, gt=0, description="How long a silent worker owns.")
    max_attempts: int = Field(default=3, ge=1, description="Tries of a job whose worker dies.")
    models_dir: Path | None = Field(
        default=None, description="If set, local model directories must lie below it."
    )
    allowed_models: list[str] | None = Field(
        default=None, description="If set, the only hub names that jobs may use."
    )
    allow_network: bool = Field(
        default=False, description="Whether suites' code may use the network when a job asks."
    )
    judge_urls: list[str] = Field(
        default_factory=list,
        description="Base URLs of the endpoints that LLM judges may use. Their bearer token is "
        "`DRESSAGE_JUDGE_KEY`.",
    )
    gpus: int | None = Field(default=None, ge=0, description="Of this worker; counted if unset.")

    @property
    def libpq_url(self) -> str:
        """The database address as Postgres' own tools take it."""
        return "postgresql://" + self.database_url.split("://", 1)[1]

    @property
    def sqlalchemy_url(self) -> str:
        """The database address with the driver we use."""
        return "postgresql+psycopg://" + self.database_url.split("://", 1)[1]

    @property
    def celery_url(self) -> str:
        """The Redis address in Celery's words."""
        if self.redis_url.startswith("unix://"):
            return "redis+socket://" + self.redis_url.removeprefix("unix://")
        return self.redis_url
