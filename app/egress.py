"""Requests to addresses that users give: checked where the connection is really made.

A name may resolve to one address when it is checked and to another one a moment later; so it is
resolved once, here, and the connection goes to an address that passed. Redirects are not followed.
"""

import asyncio
import ipaddress
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpcore2

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Address = ipaddress.IPv4Address | ipaddress.IPv6Address
TIMEOUTS = {"connect": 10.0, "read": 20.0, "write": 20.0, "pool": 10.0}
MAX_ANSWER_BYTES = 4096


class AddressRefused(httpcore2.ConnectError):
    """The operator does not let the service call this address."""


@dataclass(frozen=True)
class AllowedAddresses:
    """Public addresses, and the networks that the operator adds."""

    networks: tuple[Network, ...] = ()

    @classmethod
    def of(cls, networks: Iterable[str]) -> "AllowedAddresses":
        """Read networks in CIDR notation.

        Raises:
            ValueError: One of them is not a network.
        """
        return cls(tuple(ipaddress.ip_network(network) for network in networks))

    def allows(self, address: Address) -> bool:
        """Whether the service may connect to it."""
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped:
            address = address.ipv4_mapped
        if any(address in network for network in self.networks):
            return True
        return address.is_global and not address.is_multicast

    def problem(self, url: str) -> str | None:
        """What is wrong with a URL, as far as it can be known without a look at the network."""
        try:
            parts = urlsplit(url)
            host, _ = parts.hostname, parts.port
        except ValueError as error:
            return f"not a URL: {error}"
        if parts.scheme not in ("http", "https") or not host:
            return "must be an http:// or https:// URL with a host"
        if parts.username or parts.password:
            return "must not hold a user name or password"
        try:
            literal = ipaddress.ip_address(host)
        except ValueError:
            return None
        return None if self.allows(literal) else _refusal(host)


class _CheckedBackend(httpcore2.AnyIOBackend):
    def __init__(self, allowed: AllowedAddresses) -> None:
        self._allowed = allowed

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore2.SOCKET_OPTION] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        for address in await _resolve(host, port):
            if self._allowed.allows(address):
                return await super().connect_tcp(
                    str(address), port, timeout, local_address, socket_options
                )
        raise AddressRefused(_refusal(host))


async def post(
    allowed: AllowedAddresses, url: str, headers: Mapping[bytes | str, bytes | str], body: bytes
) -> tuple[int, str]:
    """Send one request. Returns the status and the beginning of the answer.

    Raises:
        AddressRefused: The operator does not allow the address it would go to.
        httpcore2.NetworkError: It did not arrive; or `TimeoutException`, `ProtocolError`.
    """
    async with (
        httpcore2.AsyncConnectionPool(network_backend=_CheckedBackend(allowed)) as pool,
        pool.stream(
            "POST", url, headers=headers, content=body, extensions={"timeout": TIMEOUTS}
        ) as response,
    ):
        text = b""
        async for chunk in response.aiter_stream():
            text += chunk
            if len(text) >= MAX_ANSWER_BYTES:
                break
        return response.status, text[:MAX_ANSWER_BYTES].decode("utf-8", "replace")


async def _resolve(host: str, port: int) -> Sequence[Address]:
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise httpcore2.ConnectError(f"{host} cannot be resolved: {error}") from error
    # An IPv6 address may carry the name of an interface, which is not part of the address.
    return [ipaddress.ip_address(str(address[0]).partition("%")[0]) for *_, address in found]


def _refusal(host: str) -> str:
    return f"the operator does not let the service call {host} (DRESSAGE_OUTBOUND_NETWORKS)"
