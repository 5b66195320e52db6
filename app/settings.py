"""What the operator decides, as environment variables that start with `DRESSAGE_`."""

from pathlib import Path

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict, SettingsError

from app.egress import AllowedAddresses
from dressage.sandbox.isolation import Isolation, strongest, too_weak

PREFIX = "DRESSAGE_"


class Settings(BaseSettings):
    """Read only at the edge: `main.py`, `celery_app.py`, `scheduler.py`, migrations."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="ignore")

    database_url: str = Field(description="postgresql://… ; a socket folder goes in `host`.")
    redis_url: str = Field(description="redis://… or unix:///path/of.sock")
    storage: str = Field(
        description="Suites and artifacts: a directory that the API and all workers share, or "
        "`s3://bucket/prefix` of any S3-compatible service; endpoint, region and credentials are "
        "`AWS_ENDPOINT_URL`, `AWS_REGION`, `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`."
    )
    storage_links: bool = Field(
        default=True,
        description="Downloads from a bucket go to it directly, by links of 15 minutes. Off: "
        "through the API, for users who cannot reach the bucket.",
    )
    runs_dir: Path = Field(
        description="Run directories with checkpoints. Shared by workers that continue each "
        "other's jobs."
    )
    max_upload_bytes: int = Field(default=512 * 1024**2, gt=0)
    lease_seconds: float = Field(
        default=90,
        gt=0,
        description="How long a silent worker owns its job. For most of it training goes on "
        "without a database.",
    )
    max_attempts: int = Field(
        default=3, ge=1, description="Tries of a job that fails for no fault of its own."
    )
    retry_back_off_seconds: float = Field(
        default=10, ge=0, description="Before the third try; doubled for each one after it."
    )
    stall_seconds: float = Field(
        default=1800, gt=0, description="A run without progress for so long is started again."
    )
    models_dir: Path | None = Field(
        default=None, description="If set, local model directories must lie below it."
    )
    allowed_models: list[str] | None = Field(
        default=None, description="If set, the only hub names that jobs may use."
    )
    minimum_isolation: Isolation = Field(
        default=Isolation.LANDLOCK,
        description="What must at least stand between suites' code and this host: `bubblewrap`, "
        "`landlock` or `limits`. API and workers do not start where it is weaker.",
    )
    allow_network: bool = Field(
        default=False, description="Whether suites' code may use the network when a job asks."
    )
    judge_urls: list[str] = Field(
        default_factory=list,
        description="Base URLs of the endpoints that LLM judges may use. Their bearer token is "
        "`DRESSAGE_JUDGE_KEY`.",
    )
    ollama_urls: list[str] = Field(
        default_factory=list, description="Ollama servers that jobs may register models in."
    )
    keep_history_days: float = Field(
        default=90,
        gt=0,
        description="After a job's end; then its logs, progress and rollouts go. Statuses, "
        "metrics, evaluations and files stay.",
    )
    keep_runs_days: float = Field(
        default=2, ge=0, description="After a job's end; then its run directories go."
    )
    outbound_networks: list[str] = Field(
        default_factory=list,
        description="Private networks (CIDR) that webhooks may reach, beside public addresses.",
    )
    root_path: str = Field(
        default="",
        pattern=r"^(/[A-Za-z0-9._~-]+)*$",
        description="Path below which a proxy serves the API (`/dressage`) and which it removes.",
    )
    allowed_origins: list[str] = Field(
        default_factory=list,
        description="Web origins (`https://tools.example.com`) whose pages may call the API.",
    )
    max_queued_jobs: int = Field(
        default=1000, ge=0, description="Of a team that has no limit of its own."
    )
    max_waiting_tasks: int = Field(
        default=200, ge=0, description="Exports and questions of a team that wait for a worker."
    )
    requests_per_minute: int = Field(
        default=6000, ge=0, description="Of one key, in one API process; 0 is no limit."
    )
    gpus: int | None = Field(default=None, ge=0, description="Of this worker; counted if unset.")
    worker_labels: list[str] = Field(
        default_factory=list, description="Of this worker; jobs may ask for them."
    )

    @field_validator("storage")
    @classmethod
    def _is_absolute(cls, storage: str) -> str:
        if not storage.startswith(("/", "s3://")):
            raise ValueError("must be an absolute path or s3://bucket/prefix")
        return storage

    @field_validator("outbound_networks")
    @classmethod
    def _are_networks(cls, networks: list[str]) -> list[str]:
        AllowedAddresses.of(networks)
        return networks

    @property
    def allowed_addresses(self) -> AllowedAddresses:
        """Where the service may connect to when users give an address."""
        return AllowedAddresses.of(self.outbound_networks)

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


def require_isolation(minimum: Isolation) -> str:
    """What holds user code on this host.

    Raises:
        SystemExit: It is weaker than the operator accepts.
    """
    problem = too_weak(minimum)
    if problem:
        raise SystemExit(problem)
    return str(strongest())


def read_settings() -> Settings:
    """The settings of this process, from its environment.

    Raises:
        SystemExit: A variable is missing or wrong; with its name.
    """
    try:
        return Settings()
    except ValidationError as error:
        problems = [
            f"{PREFIX}{'_'.join(map(str, e['loc'])).upper()}: "
            + e["msg"].removeprefix("Value error, ")
            for e in error.errors()
        ]
    except SettingsError as error:
        field = str(error).split('"')[1]  # of: error parsing value for field "…" from source "…"
        problems = [f'{PREFIX}{field.upper()}: must be JSON, as \'["one", "two"]\'']
    raise SystemExit("; ".join(problems))
