"""The Python client: `Client` talks to a running service and gives back `dressage.spec` objects."""

from dressage.client.client import Client
from dressage.client.errors import ApiError, DownloadCorrupt, ServiceUnreachable

__all__ = ["ApiError", "Client", "DownloadCorrupt", "ServiceUnreachable"]
