"""An S3-compatible server on a free port of this machine: moto's, which keeps objects in memory."""

import logging

import httpx2
from moto.server import ThreadedMotoServer


class S3Server:
    """`with S3Server() as s3:` then `s3.environment`, `s3.stop()` and `s3.start()` again."""

    def __init__(self):
        logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        self._server.start()
        _, self._port = self._server.get_host_and_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self.environment = {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
        }

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()

    def make_bucket(self, name):
        assert httpx2.put(f"{self.url}/{name}").status_code == 200

    def keys(self, bucket):
        """Names of all objects."""
        text = httpx2.get(f"{self.url}/{bucket}?list-type=2").text
        return [part.split("</Key>")[0] for part in text.split("<Key>")[1:]]

    def unfinished(self, bucket):
        """Whether parts of an upload lie about."""
        return "<UploadId>" in httpx2.get(f"{self.url}/{bucket}?uploads").text

    def stop(self):
        self._server.stop()

    def start(self):
        """Again, with what it had."""
        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=self._port, verbose=False)
        self._server.start()
