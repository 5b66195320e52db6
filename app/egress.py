"""Requests to addresses that users give: checked where the connection is really made.

A name may resolve to one address when it is checked and to another one a moment later; so it is
resolved once, here, and the connection goes to an address that passed. Redirects are not followed.
"""

import asyncio
import ipaddress
import re
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import quote, urlsplit

import httpcore2
import idna

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Address = ipaddress.IPv4Address | ipaddress.IPv6Address
TOTAL_SECONDS = 30.0  # a receiver that sends a byte now and then is no better than one that hangs
TIMEOUTS = {"connect": 10.0, "read": 20.0, "write": 20.0, "pool": 10.0}
MAX_ANSWER_BYTES = 4096
SAFE = "/%:@!$&'()*+,;=~?-._"
LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")

GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")
SIX_TO_FOUR = ipaddress.IPv6Network("2002::/16")
# IPv4-compatible, mapped, translated (RFC 2765), NAT64 (RFC 6052) and local NAT64 (RFC 8215).
LAST_32_BITS = tuple(
    map(
        ipaddress.IPv6Network,
        ("::/96", "::ffff:0:0/96", "::ffff:0:0:0/96", "64:ff9b::/96", "64:ff9b:1::/48"),
    )
)


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
        if any(address in network for network in self.networks):
            return True
        if isinstance(address, ipaddress.IPv4Address):
            return address.is_global and not address.is_multicast
        inner = embedded_ipv4(address)
        if inner is not None:
            return self.allows(inner)
        return address in GLOBAL_UNICAST and address.is_global

    def problem(self, url: str) -> str | None:
        """What is wrong with a URL, as far as it can be known without a look at the network."""
        try:
            host = urlsplit(normalized(url)).hostname
            literal = ipaddress.ip_address(host or "")
        except UrlError as error:
            return str(error)
        except ValueError:
            return None  # a name: judged when it is resolved
        return None if self.allows(literal) else _refusal(str(literal))


class UrlError(ValueError):
    """It is no URL that can be called; the message says why."""


def normalized(url: str) -> str:
    """A URL as it goes over the wire: its name in IDNA's letters, its path and query quoted.

    Raises:
        UrlError: It cannot be called.
    """
    if any(ord(character) <= ord(" ") or ord(character) == 0x7F for character in url):
        raise UrlError("must not hold spaces or control characters")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise UrlError(f"not a URL: {error}") from None
    if parts.scheme not in ("http", "https") or not host:
        raise UrlError("must be an http:// or https:// URL with a host")
    if parts.username is not None or parts.password is not None:
        raise UrlError("must not hold a user name or password")
    if port == 0:
        raise UrlError("not a URL: port 0")
    path, query = (quote(part, safe=SAFE) for part in (parts.path, parts.query))
    place = _host(host) + (f":{port}" if port else "")
    return f"{parts.scheme}://{place}{path or '/'}{'?' + query if query else ''}"


def _host(host: str) -> str:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        pass
    else:
        return f"[{address}]" if address.version == 6 else str(address)
    name = host.removesuffix(".")
    if not name.isascii():
        try:
            name = idna.encode(name, uts46=True).decode()
        except idna.IDNAError as error:
            raise UrlError(f"the host {host!r} is no name: {error}") from None
    if len(name) > 253 or not all(LABEL.fullmatch(label) for label in name.split(".")):
        raise UrlError(f"the host {host[:300]!r} is no name")
    return name.lower()


def embedded_ipv4(address: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    """The IPv4 address that a translated, mapped or tunnelled IPv6 address leads to."""
    number = int(address)
    if address in SIX_TO_FOUR:
        return ipaddress.IPv4Address(number >> 80 & 0xFFFFFFFF)
    if any(address in network for network in LAST_32_BITS):
        return ipaddress.IPv4Address(number & 0xFFFFFFFF)
    return None


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
        TimeoutError: It takes longer than `TOTAL_SECONDS`, name and answer included.
    """
    async with (
        asyncio.timeout(TOTAL_SECONDS),
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
