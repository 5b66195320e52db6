"""A synchronous client on httpx2."""

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx2
from pydantic import TypeAdapter

from dressage.authoring.suite import Suite
from dressage.client.config import stored_key
from dressage.client.download import download
from dressage.client.errors import ApiError, ServiceUnreachable
from dressage.spec.artifact import Artifact, Checkpoint
from dressage.spec.base import Spec
from dressage.spec.comparison import Comparison, Regrade, RegradeSpec
from dressage.spec.event import Evaluations, Event, EventPage, Metrics, RolloutPage
from dressage.spec.generation import Generation, GenerationSpec
from dressage.spec.job import DryRun, ExportView, Job, JobPage, JobSpec
from dressage.spec.queue import QueueState, Worker
from dressage.spec.suite import CasePage, SuiteInfo, SuitePage
from dressage.spec.sweep import Sweep, SweepSpec
from dressage.spec.team import (
    AuditPage,
    Key,
    KeyPage,
    KeySpec,
    NewKey,
    Team,
    TeamLimits,
    Usage,
)

DEFAULT_URL = "http://127.0.0.1:8400"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
AWAY, TRIES = (502, 503, 504), 10  # what a proxy or a service that waits for its database says
RECONNECT_SECONDS = 1.0
REGRADE_SECONDS = 180.0


class Client:
    """One connection to a service.

    Args:
        url: Its address.
        key: An API key; without one `DRESSAGE_API_KEY`, else the user's config file.
        timeout: Seconds to wait for an answer (uploads and downloads have none).

    Every method raises `ApiError` when the service refuses and `ServiceUnreachable` when nothing
    answers.
    """

    def __init__(
        self, url: str = DEFAULT_URL, *, key: str | None = None, timeout: float = 60
    ) -> None:
        self.url = url.rstrip("/")
        key = key or stored_key(self.url)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        host = (httpx2.URL(self.url).host if "://" in self.url else "").strip("[]")
        try:
            self._http = httpx2.Client(
                base_url=self.url,
                headers=headers,
                timeout=timeout,
                trust_env=host not in LOOPBACK,  # what is here is never behind a proxy
            )
        except (ImportError, ValueError) as error:
            raise ServiceUnreachable(
                f"the proxy that the environment names cannot be used: {error}"
            ) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give the connection up."""
        self._http.close()

    def push_suite(self, suite: Suite | Path | str, name: str) -> SuiteInfo:
        """Upload a suite object, a folder, or a file as it is."""
        if not isinstance(suite, Suite) and not Path(suite).is_file():
            suite = Suite.from_path(suite)  # a folder; or nothing, which it explains
        if isinstance(suite, Suite):
            return self._push(suite.to_archive(), name, "application/zip")
        csv_text = str(suite).endswith(".csv")
        content_type = "text/csv" if csv_text else "application/octet-stream"
        return self._push(Path(suite).read_bytes(), name, content_type)

    def suites(self, *, name: str | None = None, cursor: str | None = None) -> SuitePage:
        """Suites, newest first."""
        return SuitePage.model_validate_json(
            self._send("GET", "/suites", params={"name": name, "cursor": cursor}).content
        )

    def cases(self, suite: str, *, cursor: str | None = None, limit: int = 200) -> CasePage:
        """One page of a suite's cases."""
        params = {"cursor": cursor, "limit": limit}
        response = self._send("GET", f"/suites/{suite}/cases", params=params)
        return CasePage.model_validate_json(response.content)

    def submit(
        self, spec: JobSpec | Mapping[str, Any], *, idempotency_key: str | None = None
    ) -> Job:
        """Put a job into the queue."""
        headers = {"Idempotency-Key": idempotency_key} if idempotency_key else {}
        response = self._send("POST", "/jobs", json=_plain(spec), headers=headers)
        return Job.model_validate_json(response.content)

    def check(self, spec: JobSpec | Mapping[str, Any]) -> DryRun:
        """Validate a job without storing it."""
        response = self._send("POST", "/jobs", json=_plain(spec), params={"dry_run": True})
        return DryRun.model_validate_json(response.content)

    def job(self, job_id: str) -> Job:
        """One job as it is now."""
        return Job.model_validate_json(self._send("GET", f"/jobs/{job_id}").content)

    def jobs(
        self,
        *,
        status: str | None = None,
        name: str | None = None,
        cursor: str | None = None,
        limit: int = 50,
    ) -> JobPage:
        """Jobs, newest first."""
        params = {"status": status, "name": name, "cursor": cursor, "limit": limit}
        return JobPage.model_validate_json(self._send("GET", "/jobs", params=params).content)

    def cancel(self, job_id: str) -> Job:
        """End a job."""
        return Job.model_validate_json(self._send("POST", f"/jobs/{job_id}/cancel").content)

    def pause(self, job_id: str) -> Job:
        """Set a job aside after its current step."""
        return Job.model_validate_json(self._send("POST", f"/jobs/{job_id}/pause").content)

    def retry(self, job_id: str) -> Job:
        """Submit a failed or cancelled job again, as a new one."""
        return Job.model_validate_json(self._send("POST", f"/jobs/{job_id}/retry").content)

    def delete(self, job_id: str) -> None:
        """Remove an ended job with its history and files."""
        self._send("DELETE", f"/jobs/{job_id}")

    def resume(self, job_id: str) -> Job:
        """Continue a paused job."""
        return Job.model_validate_json(self._send("POST", f"/jobs/{job_id}/resume").content)

    def queue(self) -> QueueState:
        """Everything that waits, in order of standing."""
        return QueueState.model_validate_json(self._send("GET", "/queue").content)

    def workers(self) -> tuple[Worker, ...]:
        """What there is to run jobs."""
        content = self._send("GET", "/workers").content
        return TypeAdapter(tuple[Worker, ...]).validate_json(content)

    def drain(self, worker_id: str) -> Worker:
        """Let a worker finish what it runs, and take nothing new."""
        return self._worker(worker_id, "drain")

    def activate(self, worker_id: str) -> Worker:
        """Let a drained or sick worker take jobs again."""
        return self._worker(worker_id, "activate")

    def teams(self) -> tuple[Team, ...]:
        """Teams with their limits and what they use."""
        content = self._send("GET", "/teams").content
        return TypeAdapter(tuple[Team, ...]).validate_json(content)

    def put_team(self, name: str, limits: TeamLimits | Mapping[str, Any]) -> Team:
        """Make a team, or give it other limits."""
        content = TeamLimits.model_validate(limits).model_dump(mode="json")
        return Team.model_validate_json(self._send("PUT", f"/teams/{name}", json=content).content)

    def set_team(self, name: str, changes: Mapping[str, Any]) -> Team:
        """Change some limits of a team, or make one with them."""
        try:
            response = self._send("PATCH", f"/teams/{name}", json=dict(changes))
        except ApiError as error:
            if error.status != httpx2.codes.NOT_FOUND:
                raise
            return self.put_team(name, changes)
        return Team.model_validate_json(response.content)

    def create_key(self, spec: KeySpec | Mapping[str, Any]) -> NewKey:
        """Make a key; its secret is in the answer and nowhere else."""
        content = KeySpec.model_validate(spec).model_dump(mode="json")
        return NewKey.model_validate_json(self._send("POST", "/keys", json=content).content)

    def keys(self, *, cursor: str | None = None) -> KeyPage:
        """Keys, newest first."""
        response = self._send("GET", "/keys", params={"cursor": cursor})
        return KeyPage.model_validate_json(response.content)

    def revoke_key(self, key_id: str) -> Key:
        """End a key, for good."""
        return Key.model_validate_json(self._send("DELETE", f"/keys/{key_id}").content)

    def usage(self, **params: Any) -> Usage:
        """GPU time: `since`, `until`, `by` (`team`, `job`, `attempt`)."""
        return Usage.model_validate_json(self._send("GET", "/usage", params=params).content)

    def usage_csv(self, **params: Any) -> str:
        """GPU time as CSV."""
        headers = {"Accept": "text/csv"}
        return self._send("GET", "/usage", params=params, headers=headers).text

    def audit(self, *, cursor: str | None = None) -> AuditPage:
        """Who changed what, newest first."""
        response = self._send("GET", "/audit", params={"cursor": cursor})
        return AuditPage.model_validate_json(response.content)

    def export(self, job_id: str, spec: Mapping[str, Any]) -> ExportView:
        """Make another file of a trained job, or try one again that failed."""
        response = self._send("POST", f"/jobs/{job_id}/exports", json=dict(spec))
        return ExportView.model_validate_json(response.content)

    def exports(self, job_id: str) -> tuple[ExportView, ...]:
        """A job's follow-up tasks, with what came of them."""
        content = self._send("GET", f"/jobs/{job_id}/exports").content
        return TypeAdapter(tuple[ExportView, ...]).validate_json(content)

    def preflight(self, spec: JobSpec | Mapping[str, Any]) -> Job:
        """Queue a look at whether a job can learn; its result has the report."""
        response = self._send("POST", "/jobs/preflight", json=_plain(spec))
        return Job.model_validate_json(response.content)

    def delete_suite(self, reference: str) -> None:
        """Remove a version that no job uses."""
        self._send("DELETE", f"/suites/{reference}")

    def submit_sweep(self, spec: SweepSpec | Mapping[str, Any]) -> Sweep:
        """Queue a job for every combination of a grid."""
        content = spec.model_dump(mode="json") if isinstance(spec, SweepSpec) else dict(spec)
        return Sweep.model_validate_json(self._send("POST", "/sweeps", json=content).content)

    def sweep(self, sweep_id: str) -> Sweep:
        """A sweep with its table as it is now."""
        return Sweep.model_validate_json(self._send("GET", f"/sweeps/{sweep_id}").content)

    def generate(
        self, job_id: str, request: GenerationSpec | Mapping[str, Any], *, wait: float = 60
    ) -> Generation:
        """Ask the trained agent and wait for its answer, so many seconds at most."""
        content = (
            request.model_dump(mode="json")
            if isinstance(request, GenerationSpec)
            else dict(request)
        )
        response = self._send(
            "POST",
            f"/jobs/{job_id}/generate",
            json=content,
            params={"wait": wait},
            timeout=wait + 30,
        )
        return Generation.model_validate_json(response.content)

    def events(self, job_id: str, *, after: int = 0) -> EventPage:
        """One page of a job's history."""
        response = self._send("GET", f"/jobs/{job_id}/events", params={"cursor": str(after)})
        return EventPage.model_validate_json(response.content)

    def follow(self, job_id: str, *, after: int = 0) -> Iterator[Event]:
        """A job's events as they happen, from a sequence number to the job's end.

        A broken connection is taken up again where it broke.
        """
        while True:
            headers = {"Accept": "text/event-stream", "Last-Event-ID": str(after)}
            try:
                with self._http.stream(
                    "GET", f"/jobs/{job_id}/events", headers=headers, timeout=60
                ) as response:
                    if response.status_code in AWAY:
                        time.sleep(RECONNECT_SECONDS)
                        continue
                    if response.status_code >= 400:
                        response.read()
                        raise ApiError.from_response(response)
                    for event in _server_sent_events(response.iter_lines()):
                        if event is None:
                            return
                        after = event.seq
                        yield event
            except httpx2.TransportError:
                time.sleep(RECONNECT_SECONDS)

    def logs(self, job_id: str) -> Iterator[Event]:
        """A job's log lines so far."""
        cursor = None
        while True:
            params = {"cursor": cursor, "limit": 1000}
            response = self._send("GET", f"/jobs/{job_id}/logs", params=params)
            page = EventPage.model_validate_json(response.content)
            yield from page.items
            cursor = page.next_cursor
            if cursor is None:
                return

    def metrics(self, job_id: str) -> Metrics:
        """The metric history."""
        return Metrics.model_validate_json(self._send("GET", f"/jobs/{job_id}/metrics").content)

    def metrics_csv(self, job_id: str) -> str:
        """The metric history as CSV."""
        headers = {"Accept": "text/csv"}
        return self._send("GET", f"/jobs/{job_id}/metrics", headers=headers).text

    def rollouts(
        self, job_id: str, *, phase: str | None = None, cursor: str | None = None, limit: int = 20
    ) -> RolloutPage:
        """One page of stored rollouts."""
        params = {"phase": phase, "cursor": cursor, "limit": limit}
        response = self._send("GET", f"/jobs/{job_id}/rollouts", params=params)
        return RolloutPage.model_validate_json(response.content)

    def evaluations(self, job_id: str) -> Evaluations:
        """Held-out evaluations and the gain."""
        response = self._send("GET", f"/jobs/{job_id}/evaluations")
        return Evaluations.model_validate_json(response.content)

    def compare(self, job_ids: Sequence[str], *, evaluation: str | None = None) -> Comparison:
        """Evaluations of several jobs on the same cases, pair by pair."""
        params = {"jobs": ",".join(job_ids), "evaluation": evaluation}
        return Comparison.model_validate_json(self._send("GET", "/compare", params=params).content)

    def regrade(self, job_id: str, spec: RegradeSpec | Mapping[str, Any]) -> Regrade:
        """What other measures say of a job's stored rollouts."""
        response = self._send(
            "POST", f"/jobs/{job_id}/regrade", json=_plain(spec), timeout=REGRADE_SECONDS
        )
        return Regrade.model_validate_json(response.content)

    def checkpoints(self, job_id: str) -> tuple[Checkpoint, ...]:
        """The steps that have a checkpoint; those with a file can be exported."""
        response = self._send("GET", f"/jobs/{job_id}/checkpoints")
        return TypeAdapter(tuple[Checkpoint, ...]).validate_json(response.content)

    def artifacts(self, job_id: str) -> tuple[Artifact, ...]:
        """A job's files."""
        response = self._send("GET", f"/jobs/{job_id}/artifacts")
        return TypeAdapter(tuple[Artifact, ...]).validate_json(response.content)

    def download(self, job_id: str, artifact: Artifact, folder: Path) -> Path:
        """Download a file; what a broken download left behind is continued.

        Raises:
            ServiceUnreachable: Nothing more comes after several tries; what came is kept.
            DownloadCorrupt: The checksum is wrong; the partial file is removed.
        """
        url = f"/jobs/{job_id}/artifacts/{artifact.name}"
        return download(self._http, url, artifact, folder)

    def _worker(self, worker_id: str, action: str) -> Worker:
        response = self._send("POST", f"/workers/{worker_id}/{action}")
        return Worker.model_validate_json(response.content)

    def _push(self, content: bytes, name: str, content_type: str) -> SuiteInfo:
        response = self._send(
            "POST",
            "/suites",
            params={"name": name},
            content=content,
            headers={"Content-Type": content_type},
            timeout=None,
        )
        return SuiteInfo.model_validate_json(response.content)

    def _send(self, method: str, path: str, **options: Any) -> httpx2.Response:
        params = {k: v for k, v in options.pop("params", {}).items() if v is not None}
        for again in range(TRIES):
            try:
                response = self._http.request(method, path, params=params, **options)
            except httpx2.TransportError as error:
                raise ServiceUnreachable(
                    f"no service answers at {self.url} ({error}); start one with `dressage up`"
                ) from None
            # A read may be repeated: the service, or what it needs, is being started again.
            if response.status_code not in AWAY or method != "GET" or again == TRIES - 1:
                break
            time.sleep(RECONNECT_SECONDS)
        if response.status_code >= 400:
            raise ApiError.from_response(response)
        return response


def _plain(spec: Spec | Mapping[str, Any]) -> Any:
    return spec.model_dump(mode="json") if isinstance(spec, Spec) else dict(spec)


def _server_sent_events(lines: Iterator[str]) -> Iterator[Event | None]:
    """Events of a stream; None says that the job has ended."""
    kind, data = "", ""
    for line in lines:
        if line.startswith("event: "):
            kind = line.removeprefix("event: ")
        elif line.startswith("data: "):
            data = line.removeprefix("data: ")
        elif not line and data:
            yield None if kind == "end" else Event.model_validate_json(data)
            kind, data = "", ""
