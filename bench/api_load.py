"""How much the API bears: reads, submits, the time until a job is claimed, followers of streams.

    python bench/api_load.py [--quick]

Real PostgreSQL, Valkey, scheduler and worker (whose child does nothing); one API process. The load
comes from this process over plain sockets; where the machine lets us, the API has a core of its
own. For each phase the process that was busiest is named: what to add when that is too little.
"""

import argparse
import asyncio
import contextlib
import gc
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median, quantiles

import httpx2
import psycopg
from rich.console import Console
from rich.table import Table

from app.db.engine import create_engine, create_sessions, unit_of_work
from app.lifecycle.jobs import EventDraft, append_events
from dressage.authoring import Suite
from dressage.local.servers import EmbeddedDatabases
from dressage.spec.event import EventType

ROOT = Path(__file__).resolve().parent.parent
CONNECTIONS = 16
FOLLOWERS = 1000
TICKS = os.sysconf("SC_CLK_TCK")


class Service:
    """API, scheduler, worker and their servers, each a process."""

    def __init__(self, root):
        self.root, self.port = root, _free_port()
        self._databases = EmbeddedDatabases(root)
        self.postgres = self._databases.postgres
        self._postmaster = self._databases.start_postgres()
        self._databases.start_valkey()
        self._environment = {
            **os.environ,
            "DRESSAGE_DATABASE_URL": self.postgres.url,
            "DRESSAGE_REDIS_URL": self._databases.valkey.url,
            "DRESSAGE_STORAGE": str(root / "artifacts"),
            "DRESSAGE_RUNS_DIR": str(root / "runs"),
            "DRESSAGE_REQUESTS_PER_MINUTE": "0",
            "DRESSAGE_GPUS": "100",
            "PYTHONPATH": f"{ROOT}:{ROOT / 'bench'}",
        }
        self.processes = {}
        self._run("app.admin.migrate")
        self.key = self._run("app.admin.first_key").strip()
        self.start(
            "api",
            *("-m", "uvicorn", "--factory", "app.main:create_app", "--port", str(self.port)),
            *("--no-access-log", "--backlog", "4096"),
        )
        self.start("scheduler", "-m", "worker.scheduler")
        with contextlib.suppress(OSError, AttributeError):
            cores = sorted(os.sched_getaffinity(0))
            if len(cores) > 1:
                os.sched_setaffinity(self.processes["api"].pid, {cores[-1]})
        while True:
            with contextlib.suppress(httpx2.HTTPError):
                if httpx2.get(f"http://127.0.0.1:{self.port}/healthz").status_code == 200:
                    return
            time.sleep(0.1)

    def start_worker(self):
        celery = ("-m", "celery", "-A", "idle_worker", "worker", "-Q", "training")
        options = ("--pool", "threads", "-c", "101", "--loglevel", "WARNING")
        self.start("worker", *celery, *options, "--without-gossip", "--without-mingle")
        while not self.query("SELECT 1 FROM workers"):
            time.sleep(0.1)

    def start(self, name, *arguments):
        with (self.root / "logs" / f"{name}.log").open("wb") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, *arguments], env=self._environment, stdout=log, stderr=log
            )

    def stop(self):
        for process in self.processes.values():
            process.send_signal(signal.SIGTERM)
        for process in self.processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(15)
            process.kill()
        self._databases.stop()

    def query(self, statement, *parameters):
        with psycopg.connect(self.postgres.url) as connection:
            return connection.execute(statement, parameters).fetchall()

    def cpu(self):
        """CPU seconds so far, by process; PostgreSQL with all its backends."""
        pids = {name: [process.pid] for name, process in self.processes.items()}
        postmaster = self._postmaster.pid
        children = subprocess.run(
            ["ps", "--ppid", str(postmaster), "-o", "pid="], capture_output=True, text=True
        ).stdout.split()
        pids["postgres"] = [postmaster, *map(int, children)]
        pids["this load"] = [os.getpid()]
        return {name: sum(map(_cpu_of, group)) for name, group in pids.items()}

    def _run(self, module):
        done = subprocess.run(
            [sys.executable, "-m", module],
            env=self._environment,
            check=True,
            capture_output=True,
            text=True,
        )
        return done.stdout


class Busiest:
    """`with Busiest(service) as busy:` and then `busy.text`: who used most of a core."""

    def __init__(self, service):
        self._service = service

    def __enter__(self):
        self._began, self._before = time.monotonic(), self._service.cpu()
        return self

    def __exit__(self, *_):
        seconds = time.monotonic() - self._began
        after = self._service.cpu()
        shares = {name: (after[name] - self._before.get(name, 0)) / seconds for name in after}
        name = max(shares, key=shares.get)
        self.text = f"{name} {shares[name]:.0%} of a core"


class Connection:
    """HTTP/1.1 over a socket, with as little of our own time as possible."""

    def __init__(self, service):
        self._service = service
        self._auth = f"Authorization: Bearer {service.key}\r\n"

    async def __aenter__(self):
        self._reader, self._writer = await asyncio.open_connection(
            "127.0.0.1", self._service.port, limit=1 << 22
        )
        return self

    async def __aexit__(self, *_):
        self._writer.close()

    async def request(self, method, path, body=b""):
        head = f"{method} {path} HTTP/1.1\r\nHost: x\r\n{self._auth}"
        if body:
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        self._writer.write(head.encode() + b"\r\n" + body)
        head = await self._reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        body = await self._reader.readexactly(length)
        assert head[9:10] == b"2", (head, body)
        return body

    async def follow(self, job_id, got):
        """Call `got(seconds)` for each event: how long after it was stored it is here."""
        head = f"GET /jobs/{job_id}/events HTTP/1.1\r\nHost: x\r\n{self._auth}"
        self._writer.write(f"{head}Accept: text/event-stream\r\n\r\n".encode())
        while line := await self._reader.readline():
            if line.startswith(b"data: ") and b'"sent":' in line:
                sent = float(line.split(b'"sent":')[1].split(b"}")[0].split(b",")[0])
                got(time.time() - sent)


async def reads(service, job_id, seconds):
    count, end = 0, time.monotonic() + seconds

    async def read():
        nonlocal count
        async with Connection(service) as connection:
            while time.monotonic() < end:
                await connection.request("GET", f"/jobs/{job_id}")
                count += 1

    await asyncio.gather(*(read() for _ in range(CONNECTIONS)))
    return count / seconds


async def submits(service, spec, count):
    left, body = iter(range(count)), json.dumps(spec).encode()

    async def submit():
        async with Connection(service) as connection:
            for _ in left:
                await connection.request("POST", "/jobs", body)

    began = time.monotonic()
    await asyncio.gather(*(submit() for _ in range(CONNECTIONS)))
    return count / (time.monotonic() - began)


async def claims(service, spec, count):
    """Submit to an idle worker, one after the other; milliseconds until each was claimed."""
    body = json.dumps({**spec, "name": "claimed", "resources": {"gpus": 1}}).encode()
    async with Connection(service) as connection:
        for _ in range(count):
            await connection.request("POST", "/jobs", body)
            await asyncio.sleep(0.3)
    await asyncio.sleep(3)
    rows = service.query(
        "SELECT extract(epoch FROM a.started_at - j.created_at) FROM attempts a "
        "JOIN jobs j ON j.id = a.job_id WHERE j.name = 'claimed'"
    )
    assert len(rows) == count
    return [float(seconds) * 1000 for (seconds,) in rows]


async def streams(service, job_ids, followers, *, batches, per_second, size):
    """Followers of each job while events are stored; milliseconds from stored to received."""
    delays = []
    engine = create_engine("postgresql+psycopg://" + service.postgres.url.split("://", 1)[1])
    sessions = create_sessions(engine)

    async def tell(job_id):
        for batch in range(batches):
            await asyncio.sleep(1 / per_second)
            drafts = [
                EventDraft(EventType.LOG, {"message": f"{batch}", "sent": time.time()})
                for _ in range(size)
            ]
            async with unit_of_work(sessions) as session:
                await append_events(session, job_id, drafts)

    connections = [Connection(service) for _ in range(followers * len(job_ids))]
    async with contextlib.AsyncExitStack() as stack:
        for connection in connections:
            await stack.enter_async_context(connection)
        tasks = [
            asyncio.create_task(connection.follow(job_ids[at % len(job_ids)], delays.append))
            for at, connection in enumerate(connections)
        ]
        await asyncio.sleep(3)  # all of them have caught up
        gc.collect()
        gc.disable()  # pauses of ours are not the service's
        delays.clear()
        began = time.monotonic()
        await asyncio.gather(*map(tell, job_ids))
        wanted = batches * size * len(connections)
        while len(delays) < wanted and time.monotonic() - began < 60:
            await asyncio.sleep(0.05)
        seconds = time.monotonic() - began
        gc.enable()
        for task in tasks:
            task.cancel()
    await engine.dispose()
    assert len(delays) == wanted, f"{len(delays)} of {wanted} events arrived"
    return [delay * 1000 for delay in delays], wanted / seconds


def p99(values):
    return quantiles(values, n=100)[-1] if len(values) > 1 else values[0]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="dressage-load-"))
    root.chmod(0o711)
    service = Service(root)
    try:
        figures, table = measure(service, quick=options.quick)
    finally:
        service.stop()
        shutil.rmtree(root, ignore_errors=True)
    Console(width=110).print(table)
    print(json.dumps(figures))


def measure(service, *, quick):
    url, headers = f"http://127.0.0.1:{service.port}", {"Authorization": f"Bearer {service.key}"}
    suite = Suite.from_path(ROOT / "examples" / "arithmetic").to_archive()
    with httpx2.Client(base_url=url, headers=headers) as client:
        client.post("/suites?name=arithmetic", content=suite).raise_for_status()
        spec = json.loads((ROOT / "examples" / "arithmetic" / "job.json").read_text())
        spec["agent"]["model"] = str(ROOT / "examples" / "tiny_agent" / "model")
        spec |= {"exports": []}
        job_id = client.post("/jobs", json=spec).raise_for_status().json()["id"]
        many = [
            client.post("/jobs", json={**spec, "name": f"s{n}"}).json()["id"] for n in range(100)
        ]
    table = Table("", "figure", "busiest")
    figures = {}

    with Busiest(service) as busy:
        figures["status_reads_per_s"] = asyncio.run(reads(service, job_id, 4 if quick else 15))
    table.add_row("status reads per second", f"{figures['status_reads_per_s']:.0f}", busy.text)

    with Busiest(service) as busy:
        figures["submits_per_s"] = asyncio.run(submits(service, spec, 200 if quick else 1000))
    table.add_row("submits per second", f"{figures['submits_per_s']:.0f}", busy.text)

    with Busiest(service) as busy:
        delays, rate = asyncio.run(
            streams(service, [job_id], FOLLOWERS, batches=20 if quick else 60, per_second=4, size=1)
        )
    figures |= {"sse_followers": FOLLOWERS, "sse_p50_ms": median(delays), "sse_p99_ms": p99(delays)}
    table.add_row(
        f"{FOLLOWERS} followers of one job, 4 events/s: p50, p99",
        f"{median(delays):.0f} ms, {p99(delays):.0f} ms ({rate:.0f} events/s in all)",
        busy.text,
    )

    with Busiest(service) as busy:
        delays, rate = asyncio.run(
            streams(service, many, 1, batches=10 if quick else 40, per_second=2, size=5)
        )
    figures |= {"streams": len(many), "streams_p99_ms": p99(delays)}
    table.add_row(
        f"{len(many)} jobs streaming at once, 10 events/s each: p50, p99",
        f"{median(delays):.0f} ms, {p99(delays):.0f} ms ({rate:.0f} events/s in all)",
        busy.text,
    )

    service.query("DELETE FROM jobs RETURNING id")  # an idle service
    service.start_worker()
    with Busiest(service) as busy:
        delays = asyncio.run(claims(service, spec, 20 if quick else 80))
    figures |= {"claim_p50_ms": median(delays), "claim_p99_ms": p99(delays)}
    table.add_row(
        "claim after POST: p50, p99", f"{median(delays):.0f} ms, {p99(delays):.0f} ms", busy.text
    )
    return figures, table


def _cpu_of(pid):
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / TICKS


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    main()
