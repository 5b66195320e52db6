"""Hostile input against a live service: what was tried, and what held.

    python bench/attacks.py [--verbose]

Real PostgreSQL, Valkey and one API process, with two teams. An attack is held when what it wants
does not happen, the answer is a problem in words (never a 5xx, never a stack trace), and the API
answers others meanwhile. The last line is JSON: how many were tried, how many held.
"""

import argparse
import gzip
import io
import json
import os
import socket
import subprocess
import tarfile
import tempfile
import threading
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path

import httpx2
from api_load import Service

from dressage.sandbox.isolation import strongest
from tests.bombs import long_name, parquet

ATTEMPT = '''
from dressage.authoring import measure, score, fail_reason

@measure
def attempt(context):
    """Run what the answer says; 1 if it got what it wanted."""
    scope = {}
    exec(context.final.text, scope)
    return score(1.0 if scope.get("got") else 0.0, str(scope.get("said", "")))
'''
CASES = b'{"input": "q", "expect": {"answer": "x"}}\n{"input": "r", "expect": {"answer": "y"}}\n'
ANSWERS_WITHIN = 5.0  # seconds that others may have to wait for /healthz


@dataclass
class World:
    """The service and its keys."""

    url: str
    operator: str
    red: str
    blue: str
    viewer: str
    root: Path
    service: Service

    def ask(self, method, path, key="red", **options):
        headers = dict(options.pop("headers", {}))
        if key:
            headers["Authorization"] = f"Bearer {getattr(self, key, key)}"
        options.setdefault("timeout", 60)
        return httpx2.request(method, f"{self.url}{path}", headers=headers, **options)


def in_words(answer, *codes):
    """A refusal of ours: one of these codes, with a sentence."""
    try:
        detail = answer.json()["detail"]
    except (ValueError, KeyError, TypeError):
        return False
    return answer.status_code in (codes or range(400, 500)) and "Traceback" not in detail


# --- user code -----------------------------------------------------------------------------------

LIBC = "import ctypes, os; libc = ctypes.CDLL(None, use_errno=True)\n"


def sandbox_attacks(world):
    """Code of a measure, each in a preview. It sets `got` when it has got what it wanted."""
    run = world.root / "run"
    api = world.service.processes["api"].pid
    outside = world.root / "outside"
    outside.mkdir(mode=0o777)
    outside.chmod(0o777)
    (outside / "file").write_text("s3cr3t")
    (outside / "file").chmod(0o666)
    secrets = [str(path) for path in (world.root / "secrets").iterdir()]
    sockets = [str(run / "valkey.sock"), str(run / ".s.PGSQL.5432")]
    code = {
        "be root": "import os; got = os.getuid() == 0",
        "become root": "import os; os.setuid(0); got = True",
        "become another user": "import os; os.setuid(1); got = True",
        "take other groups": "import os; os.setgroups([0]); got = True",
        "read a password of the service": f"got = any(open(p).read() for p in {secrets!r})",
        "read the environment of the API": f"got = open('/proc/{api}/environ', 'rb').read()",
        "read the environment of its parent": "import os\n"
        "got = b'DRESSAGE' in open(f'/proc/{os.getppid()}/environ', 'rb').read()",
        "find a secret in its own environment": "import os\n"
        "got = any('DRESSAGE' in k or 'AWS' in k for k in os.environ)",
        "speak to the broker": "import socket\n"
        f"s = socket.socket(1); s.connect({sockets[0]!r}); got = True",
        "speak to the database": "import socket\n"
        f"s = socket.socket(1); s.connect({sockets[1]!r}); got = True",
        "speak to the API": "import socket\n"
        f"socket.create_connection(('127.0.0.1', {world.service.port}), 3); got = True",
        "send UDP": "import socket; s = socket.socket(2, 2)\n"
        "s.sendto(b'x', ('127.0.0.1', 53)); got = True",
        "make a raw socket": "import socket; socket.socket(2, 3, 1); got = True",
        "make a packet socket": "import socket; socket.socket(17, 3); got = True",
        "make a netlink socket": "import socket; socket.socket(16, 3); got = True",
        "make a vsock": "import socket; socket.socket(40, 1); got = True",
        "aim a datagram at any unix socket": "import socket\n"
        "a, b = socket.socketpair(1, 2); a.sendto(b'x', '/run/systemd/notify'); got = True",
        "use io_uring": LIBC + "p = ctypes.create_string_buffer(120)\n"
        "got = libc.syscall(425, 8, p) >= 0",
        "read a file of everybody": f"got = open({str(outside / 'file')!r}).read()",
        "write a file of everybody": f"open({str(outside / 'file')!r}, 'a').write('x'); got = True",
        # Of a home where Python lies, the way to it may be seen.
        "list somebody's home": f"import os\ngot = len(os.listdir({str(Path.home())!r})) > 1",
        "read the passwords of the host": "got = open('/etc/shadow').read()",
        "read the suites of all teams": "import os\n"
        f"got = os.listdir({str(world.root / 'artifacts')!r})",
        "write beside the suite": "import attempt_code, os\n"
        "open(os.path.dirname(attempt_code.__file__) + '/x.py', 'w'); got = True",
        "write into Python": "import json; open(json.__file__, 'a').write('#'); got = True",
        "write into /tmp": "open('/tmp/got', 'w').write('x'); got = True",
        "change a mode outside": "import os\n"
        f"os.chmod({str(outside / 'file')!r}, 0o600)\n"
        f"got = os.stat({str(outside / 'file')!r}).st_mode & 0o777 == 0o600",
        "change an owner outside": "import os\n"
        f"os.chown({str(outside / 'file')!r}, os.getuid(), -1)\n"
        f"got = os.stat({str(outside / 'file')!r}).st_uid == os.getuid() != 0",
        "set the clock": "import time; time.clock_settime(0, 0); got = True",
        "trace its parent": LIBC + "got = libc.ptrace(16, os.getppid(), 0, 0) == 0",
        "read its parent's memory": "import os\n"
        "open(f'/proc/{os.getppid()}/mem', 'rb'); got = True",
        "write its parent's memory": LIBC + "got = libc.process_vm_writev("
        "os.getppid(), None, 0, None, 0, 0) == 0",
        "kill its parent": "import os; os.kill(os.getppid(), 9); got = True",
        "stop its parent": "import os, signal; os.kill(os.getppid(), signal.SIGSTOP); got = True",
        "kill everybody": "import os; os.kill(-1, 9); got = True",
        "kill the API": f"import os; os.kill({api}, 0); got = True",
        "limit its parent": "import os, resource\n"
        "resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE, (1, 1)); got = True",
        "make a namespace": LIBC + "got = libc.unshare(0x10000000) == 0",
        "mount": LIBC + "got = libc.mount(b'x', b'/', b'tmpfs', 0, None) == 0",
        "change the root": "import os; os.chroot('.'); got = True",
        "load a program into the kernel": LIBC + "got = libc.syscall(321, 0, None, 0) >= 0",
        "read the kernel's keys": LIBC + "got = libc.syscall(250, 0, -3, 0) >= 0",
        "open by handle": LIBC
        + "libc.syscall(304, -100, None, 0); got = ctypes.get_errno() not in "
        "(1, 38)",
        "take shared memory of the host": LIBC + "got = libc.shmget(1234, 4096, 0o1666) >= 0",
        "hide memory in a file": "import os\nfd = os.memfd_create('x')\ngot = True",
        "make a device": "import os; os.mknod('d', 0o60600, 0x800); open('d', 'rb'); got = True",
        "take 50 GB of memory": "bytearray(50 * 1024**3); got = True",
        "write a file of 1 GB": "f = open('f', 'wb')\n"
        "for _ in range(1024): f.write(bytes(1024**2))\ngot = True",
        "fill the disk": "import os, time\n"
        "for n in range(40): open(f'f{n}', 'wb').write(bytes(20 * 1024**2))\n"
        "time.sleep(3)\ngot = True",
        "fork without end": "import os\n"
        "for n in range(6000):\n    if os.fork() == 0:\n        import time; time.sleep(9); "
        "os._exit(0)\ngot = True",
        "start threads without end": "import threading, time\n"
        "for n in range(6000):\n"
        "    threading.Thread(target=time.sleep, args=(9,), daemon=True).start()\ngot = True",
        "never end": "while True: pass",
        "sleep for hours": "import time; time.sleep(9999)",
        "end its process": "import os; os._exit(0)",
        "break its stack": "import sys; sys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
        "crash Python": "import ctypes; ctypes.string_at(0)",
        "give a reason of 20 MB": "got = False; said = 'x' * 20_000_000",
        "print 200 MB": "for _ in range(200): print('x' * 1_000_000)",
        "close all files": "import os; os.closerange(0, 1000); got = True",
        "forge an answer": "import os, json\n"
        "for fd in range(3, 64):\n    try: os.write(fd, b'{\"value\": 7}\\n')\n"
        "    except OSError: pass\ngot = False",
        "patch what judges it": "import dressage.sandbox.worker as w, dressage.authoring.measure\n"
        "w.cut = lambda text: 'patched'; got = False",
    }
    for name, text in code.items():
        yield f"code: {name}", lambda text=text: _ran(world, text)
    yield "code: leave a process behind", lambda: _left_behind(world)
    yield "code: import that hangs is not loaded", lambda: _bad_code(world, "while True: pass")
    yield "code: import that ends the process", lambda: _bad_code(world, "import os; os._exit(1)")
    yield (
        "code: import that crashes",
        lambda: _bad_code(world, "import ctypes; ctypes.string_at(0)"),
    )
    yield (
        "code: import that kills its parent",
        lambda: _bad_code(world, "import os; os.kill(os.getppid(), 9)"),
    )


def _preview(world, text, key="red", timeout=4):
    body = {
        "suite": "attempt",
        "rewards": [{"measure": "attempt"}],
        "rollouts": [{"answer": text}],
        "timeout": timeout,
    }
    return world.ask("POST", "/measures/preview", key, json=body)


def _ran(world, text):
    answer = _preview(world, text)
    if answer.status_code != 200:
        return in_words(answer)
    (item,) = answer.json()["items"]
    (verdict,) = item["verdicts"]
    # And the next one is served as if nothing had been.
    (fine,) = _preview(world, "got = True").json()["items"]
    return verdict["value"] != 1.0 and len(verdict["reason"]) < 5000 and fine["reward"] == 1.0


def _left_behind(world):
    _preview(
        world,
        "import os\n"
        "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
        "        os.execvp('sleep', ['sleep', '4242.5'])\n    os._exit(0)\n"
        "import time; time.sleep(60)",
    )
    deadline = time.monotonic() + 5
    while (
        "sleep 4242.5"
        in subprocess.run(["ps", "-ewwo", "args"], capture_output=True, text=True).stdout
    ):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def _bad_code(world, text):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("cases.jsonl", CASES)
        archive.writestr("bad.py", text)
    return in_words(
        world.ask("POST", "/suites?name=bad", content=buffer.getvalue(), timeout=120), 422
    )


# --- uploads -------------------------------------------------------------------------------------


def _zip(files):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files:
            archive.writestr(name, content)
    return buffer.getvalue()


def _tar(*members):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=1) as archive:
        for name, kind, target in members:
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, target
            archive.addfile(member)
    return buffer.getvalue()


def _encrypted(archive):
    """A zip whose directory says that its file is encrypted."""
    at = archive.index(b"PK\x01\x02") + 8
    return archive[:at] + b"\x01\x00" + archive[at + 2 :]


def upload_attacks(world):
    """Suites that are no suites."""
    cases = ("cases.jsonl", CASES)
    uploads = {
        "a file above": lambda: _zip([cases, ("../x.py", "")]),
        "a file at the root": lambda: _zip([cases, ("/etc/x.py", "")]),
        "a file on another drive": lambda: _zip([cases, ("C:\\x.py", "")]),
        "a file twice": lambda: _zip([cases, ("a.py", ""), ("a.py", "x = 1")]),
        "a file that is a folder, too": lambda: _zip([cases, ("a", ""), ("a/b", "")]),
        "a name of 300 bytes": lambda: _zip([cases, ("x" * 300 + ".py", "")]),
        "a link": lambda: _tar(("cases.jsonl", tarfile.SYMTYPE, "/etc/passwd")),
        "a hard link": lambda: _tar(("cases.jsonl", tarfile.LNKTYPE, "/etc/passwd")),
        "a device": lambda: _tar(("cases.jsonl", tarfile.CHRTYPE, "")),
        "a pipe": lambda: _tar(("cases.jsonl", tarfile.FIFOTYPE, "")),
        "20,000 folders": lambda: _tar(*((f"d{n}", tarfile.DIRTYPE, "") for n in range(20_000))),
        "5,000 files": lambda: _zip([cases, *((f"f{n}.py", "") for n in range(5000))]),
        "a name of 400 MB": lambda: long_name(tarfile.GNUTYPE_LONGNAME),
        "a bomb": lambda: _zip([("cases.jsonl", b"0" * 500 * 1024**2)]),
        "2 million rows of Parquet": lambda: parquet(2_000_000, "q"),
        "5 GB of Parquet": lambda: parquet(50_000, "q" * 100_000),
        "no archive at all": lambda: b"PK\x03\x04" + os.urandom(5000),
        "no Parquet at all": lambda: b"PAR1" + os.urandom(5000) + b"PAR1",
        "a broken gzip": lambda: gzip.compress(b"x" * 1000)[:-10],
        "an encrypted zip": lambda: _encrypted(_zip([cases])),
        "nothing": lambda: b"",
        "not UTF-8": lambda: b'{"input": "\xff"}',
        "NUL": lambda: b'{"input": "a\\u0000b"}',
        "half a surrogate": lambda: b'{"input": "\\ud800"}',
        "100,000 brackets": lambda: b'{"input": ' + b"[" * 100_000,
        "a number too large": lambda: b'{"input": "q", "expect": {"answer": 1e999}}',
        "NaN": lambda: b'{"input": "q", "expect": {"answer": NaN}}',
        "a line of 10 MB": lambda: b'{"input": "' + b"x" * 10 * 1024**2 + b'"}',
        "more than the limit": lambda: b"x" * (600 * 1024**2),
    }
    for name, make in uploads.items():
        yield (
            f"upload: {name}",
            lambda make=make: _refused_cheaply(world, make()),
        )


def _refused_cheaply(world, content):
    before = _peak(world)
    answer = world.ask("POST", "/suites?name=hostile", content=content, timeout=120)
    return in_words(answer, 413, 422) and _peak(world) - before < 700


def _peak(world):
    status = Path(f"/proc/{world.service.processes['api'].pid}/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1]) // 1024


# --- addresses -----------------------------------------------------------------------------------

ADDRESSES = (
    *("http://127.0.0.1/", "http://localhost./x y", "http://[::1]/", "http://0.0.0.0/"),
    *("http://169.254.169.254/latest/meta-data", "http://10.0.0.1/", "http://192.168.0.1/"),
    *("http://100.64.0.1/", "http://[fd00::1]/", "http://[fe80::1]/", "http://[fec0::1]/"),
    *("http://[::ffff:127.0.0.1]/", "http://[64:ff9b::7f00:1]/", "http://[64:ff9b:1::a00:1]/"),
    *("http://[2002:7f00:1::]/", "http://[::7f00:1]/", "http://[::ffff:0:7f00:1]/"),
    *("http://[ff02::1]/", "http://224.0.0.1/", "http://255.255.255.255/", "file:///etc/passwd"),
    *("gopher://example.com/", "http://a..b/", f"http://{'x' * 64}.com/", "http://ex\tample.com/"),
    *("http://example.com:99999/", "http://user:pw@example.com/", "http:///x", "http://\u2260/"),
    "http://example.com/\r\nX-Forged: 1",
)


def address_attacks(world):
    """Webhooks to where the service must not go."""
    for url in ADDRESSES:
        yield (
            f"webhook to {url[:40]!r}",
            lambda url=url: in_words(world.ask("POST", "/webhooks", json={"url": url}), 422),
        )


# --- requests ------------------------------------------------------------------------------------


def request_attacks(world):
    """Bodies, parameters and headers that no client sends."""
    as_json = {"Content-Type": "application/json"}

    def post(body, path="/jobs", key="red", **headers):
        return world.ask("POST", path, key, content=body, headers=as_json | headers)

    bodies = {
        "100,000 brackets": b"[" * 100_000,
        "300 objects within each other": b'{"a":' * 300 + b"1" + b"}" * 300,
        "NaN": b'{"name": NaN}',
        "1e999": b'{"training": {"beta": 1e999}}',
        "a key twice": b'{"name": "a", "name": "b"}',
        "not UTF-8": b'{"name": "\xff"}',
        "20 MB of instructions": b'{"agent": {"instructions": "' + b"x" * 20 * 1024**2 + b'"}}',
        "a NUL": b'{"name": "a\\u0000b"}',
        "nothing": b"",
        "a list": b"[]",
        "a huge number": b'{"training": {"max_steps": 1' + b"0" * 400 + b"}}",
    }
    for name, body in bodies.items():
        yield f"body: {name}", lambda body=body: in_words(post(body))
    yield (
        "body: 200 MB without a key",
        lambda: post(b"x" * 200 * 1024**2, key="").status_code == 401,
    )
    yield "body: gzip", lambda: in_words(post(gzip.compress(b"{}"), **{"Content-Encoding": "gzip"}))
    paths = {
        "unknown parameter": "/jobs?stauts=queued",
        "parameter twice": "/jobs?status=queued&status=failed",
        "cursor that is none": "/jobs?cursor=-1",
        "cursor of 30 digits": "/jobs?cursor=" + "9" * 30,
        "limit of a billion": "/jobs?limit=1000000000",
        "year 1": "/usage?until=0001-01-01T00:00:00Z",
        "year 9999": "/usage?since=9999-12-31T00:00:00Z",
        "NUL in a path": "/jobs/job_%00",
        "NUL in a parameter": "/jobs?name=%00",
        "SQL in a parameter": "/jobs?status='%20OR%201=1",
        "path above": "/jobs/..%2f..%2fkeys",
        "an id of 5,000 characters": "/jobs/" + "x" * 5000,
    }
    for name, path in paths.items():
        yield f"request: {name}", lambda path=path: in_words(world.ask("GET", path))
    yield (
        "request: SQL in a name finds nothing",
        lambda: world.ask("GET", "/jobs?name=x'%20OR%20'1'='1").json()["items"] == [],
    )
    yield (
        "request: event number beyond all",
        lambda: in_words(
            world.ask("GET", "/jobs/job_x/events", headers={"Last-Event-ID": str(2**63)})
        ),
    )
    yield (
        "request: dry_run does not hide a change",
        lambda: in_words(
            world.ask(
                "POST", "/keys?dry_run=x", "operator", json={"team": "red", "role": "viewer"}
            ),
            422,
        ),
    )


def measure_attacks(world):
    """Built-in measures whose specification is the weapon."""
    schemas = {
        "a pattern without end": {"pattern": "^(a+)+$"},
        "a schema that needs itself": {"$ref": "#"},
        "a schema on the network": {"$dynamicRef": f"{world.url}/healthz"},
        "a schema in a file": {"$ref": "file:///etc/passwd"},
        "a reference that leads nowhere": {"$ref": "#/nope"},
        "an old reference to itself": {
            "$schema": "https://json-schema.org/draft/2019-09/schema",
            "$recursiveRef": "#",
        },
        "a pattern that is none": {"pattern": "("},
        "a schema 150 deep": json.loads('{"not":' * 150 + "{}" + "}" * 150),
    }
    answer = json.dumps("a" * 40 + "!")
    for name, schema in schemas.items():
        measure = {"type": "json_schema", "schema": schema}
        yield (
            f"measure: {name}",
            lambda measure=measure: _no_reward(world, measure, answer),
        )
    patterns = {
        "a regular expression without end": "^(a|a?)+$",
        "fuzzy matching": "(?:yes){e<=3}",
        "a pattern of another engine": r"\p{Lu}",
        "an open brace": "key={d",
    }
    for name, pattern in patterns.items():
        measure = {"type": "regex", "pattern": pattern}
        yield (
            f"measure: {name}",
            lambda measure=measure: _no_reward(world, measure, "a" * 40 + "!"),
        )


def _no_reward(world, measure, answer):
    body = {
        "suite": "attempt",
        "rewards": [{"measure": measure}],
        "rollouts": [{"answer": answer}],
        "timeout": 3,
    }
    said = world.ask("POST", "/measures/preview", json=body)
    if said.status_code != 200:
        return in_words(said, 422)
    return not said.json()["items"][0]["reward"]


# --- teams ---------------------------------------------------------------------------------------


def team_attacks(world):
    """Keys of one team on what another has, and of a viewer on anything."""
    suite = world.ask("GET", "/suites?name=attempt").json()["items"][0]["id"]
    hook = world.ask("POST", "/webhooks", json={"url": "https://example.com/"}).json()["id"]
    key = world.ask("GET", "/keys").json()["items"][0]["id"]
    foreign = {
        "read a suite": ("GET", f"/suites/{suite}"),
        "read its cases": ("GET", f"/suites/{suite}/cases"),
        "delete a suite": ("DELETE", f"/suites/{suite}"),
        "read deliveries": ("GET", f"/webhooks/{hook}/deliveries"),
        "delete a webhook": ("DELETE", f"/webhooks/{hook}"),
        "read a team": ("GET", "/teams/red"),
    }
    for name, (method, path) in foreign.items():
        yield (
            f"other team: {name}",
            lambda method=method, path=path: in_words(world.ask(method, path, "blue"), 404),
        )
    yield (
        "other team: preview with its suite",
        lambda: in_words(
            world.ask(
                "POST",
                "/measures/preview",
                "blue",
                json={"suite": suite, "rewards": ["attempt"], "rollouts": [{"answer": "x"}]},
            ),
            422,
        ),
    )
    yield "other team: see its keys", lambda: key not in world.ask("GET", "/keys", "blue").text
    yield (
        "other team: see its jobs",
        lambda: world.ask("GET", "/jobs?team=red", "blue").json()["items"] == [],
    )
    yield "other team: see its changes", lambda: hook not in world.ask("GET", "/audit", "blue").text
    operators = {
        "make a key": ("POST", "/keys", {"team": "red", "role": "operator"}),
        "revoke a key": ("DELETE", f"/keys/{key}", None),
        "change a team": ("PUT", "/teams/red", {"weight": 100}),
    }
    for name, (method, path, body) in operators.items():
        yield (
            f"submitter: {name}",
            lambda method=method, path=path, body=body: in_words(
                world.ask(method, path, json=body), 403
            ),
        )
    for name, (method, path) in {
        "upload": ("POST", "/suites?name=x"),
        "submit": ("POST", "/jobs"),
        "make a webhook": ("POST", "/webhooks"),
        "delete": ("DELETE", f"/suites/{suite}"),
    }.items():
        yield (
            f"viewer: {name}",
            lambda method=method, path=path: in_words(
                world.ask(method, path, "viewer", json={"url": "https://example.com/"}), 403, 422
            ),
        )
    for name, secret in {
        "no key": "",
        "the beginning of every key": "drs_",
        "half a key": world.red[:20],
        "a key in capitals": world.red.upper(),
        "a key with a NUL": "drs_x",
        "a key of 100 kB": "drs_" + "x" * 60_000,
    }.items():
        yield (
            f"key: {name}",
            lambda secret=secret: (
                world.ask("GET", "/jobs", secret or None).status_code in (400, 401, 431)
            ),
        )


# --- floods --------------------------------------------------------------------------------------


def flood_attacks(world):
    """Much at once."""
    yield "flood: previews of one team leave room for others", lambda: _previews(world)
    yield "flood: keys that are guessed are slowed down", lambda: _guesses(world)
    yield "flood: connections that say nothing", lambda: _silent(world)


def _previews(world):
    codes = []
    threads = [
        threading.Thread(
            target=lambda: codes.append(_preview(world, "import time; time.sleep(30)").status_code)
        )
        for _ in range(12)
    ]
    for thread in threads:
        thread.start()
    time.sleep(1)
    started = time.monotonic()
    world.ask("POST", "/suites?name=mine", "blue", content=CASES)
    waited = time.monotonic() - started
    for thread in threads:
        thread.join()
    return waited < ANSWERS_WITHIN and codes.count(429) >= 8


def _guesses(world):
    with httpx2.Client(base_url=world.url) as client:
        codes = [
            client.get("/jobs", headers={"Authorization": f"Bearer drs_{n}"}).status_code
            for n in range(700)
        ]
    return codes[-1] == 429 and world.ask("GET", "/jobs").status_code == 200


def _silent(world):
    held = [socket.create_connection(("127.0.0.1", world.service.port)) for _ in range(300)]
    answered = world.ask("GET", "/jobs").status_code == 200
    for connection in held:
        connection.close()
    return answered


GROUPS = (
    *(sandbox_attacks, upload_attacks, address_attacks, request_attacks),
    *(measure_attacks, team_attacks, flood_attacks),
)


def prepared(service, root):
    """Two teams with a key each, a viewer, and a suite whose measure does what it is told."""
    url = f"http://127.0.0.1:{service.port}"
    operator = {"Authorization": f"Bearer {service.key}"}
    made = {}
    for name, team, role in (
        *(("red", "red", "submitter"), ("blue", "blue", "submitter")),
        ("viewer", "red", "viewer"),
    ):
        httpx2.put(f"{url}/teams/{team}", headers=operator, json={}).raise_for_status()
        answer = httpx2.post(f"{url}/keys", headers=operator, json={"team": team, "role": role})
        made[name] = answer.json()["secret"]
    world = World(url, service.key, **made, root=root, service=service)
    suite = _zip([("cases.jsonl", CASES), ("attempt_code.py", ATTEMPT)])
    world.ask("POST", "/suites?name=attempt", content=suite).raise_for_status()
    return world


def held(attack, world):
    """Whether nothing came of it, and others were answered meanwhile."""
    worst, over = [0.0], threading.Event()

    def others():
        while not over.wait(0.25):
            started = time.monotonic()
            world.ask("GET", "/healthz", None)
            worst[0] = max(worst[0], time.monotonic() - started)

    watching = threading.Thread(target=others)
    watching.start()
    try:
        well = attack()
    except httpx2.HTTPError as error:
        well = False
        print(f"    {type(error).__name__}: {error}")
    finally:
        over.set()
        watching.join()
    return bool(well) and worst[0] < ANSWERS_WITHIN


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--verbose", action="store_true", help="Show also what held.")
    parser.add_argument("--only", default="", help="Only attacks whose name begins so.")
    options = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="dressage-attacks-"))
    root.chmod(0o711)
    print(f"user code runs behind: {strongest()}")
    service = Service(root)
    tried, failed = 0, []
    try:
        world = prepared(service, root)
        for group in GROUPS:
            for name, attack in group(world):
                if not name.startswith(options.only):
                    continue
                tried += 1
                well = held(attack, world)
                if not well:
                    failed.append(name)
                if options.verbose or not well:
                    print(f"{'held  ' if well else 'FAILED'}  {name}", flush=True)
    finally:
        service.stop()
    print(json.dumps({"tried": tried, "held": tried - len(failed), "failed": failed}))


if __name__ == "__main__":
    main()
