"""Decide where the service may send: URLs by their text, addresses by their number. Must not resolve a name or open a connection."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Self, TypeAlias
from urllib.parse import urldefrag, urljoin

Address: TypeAlias = IPv4Address | IPv6Address
Network: TypeAlias = IPv4Network | IPv6Network

MAX_URL_CHARACTERS = 2_048  # far above any real endpoint, far below what a proxy or a log line starts to cut
DEFAULT_PORTS = {"http": 80, "https": 443}
MAX_PORT = 65_535
MAX_HOST_CHARACTERS = 253  # RFC 1035, section 3.1, as text
IPV4_BITS = 32

# RFC 3986: what may stand in a URI at all. Backslashes, quotes, spaces and controls are where parsers disagree, so they are refused.
_URL_TEXT = re.compile(r"(?:[A-Za-z0-9._~:/?#\[\]@!$&'()*+,;=-]|%[0-9A-Fa-f]{2})+")
_URL_PARTS = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<authority>[^/?]*)(?P<path>[^?]*)(?P<query>.*)")
_PORT = re.compile(r"[0-9]{1,5}")
# Underscores are no host name by RFC 1123, but container networks give out such names.
_LABEL = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?")
_NUMBER = re.compile(r"0x[0-9a-f]*|[0-9]+")
_HINT = "; the deployment may list it in COUNTERMAND_EGRESS_ALLOW"

# Refused even for a listed host name or a wider listed network: they answer with the machine's own credentials. Only a CIDR inside
# one of these opens it (threat model, row B1).
_METADATA = tuple(
    (ip_network(network), name)
    for network, name in (
        ("169.254.0.0/16", "link-local, cloud metadata"),
        ("fe80::/10", "link-local"),
        ("fd00:ec2::254/128", "cloud metadata"),
        ("fd20:ce::254/128", "cloud metadata"),
        ("100.100.100.200/32", "cloud metadata"),
        ("192.0.0.192/32", "cloud metadata"),
        ("168.63.129.16/32", "cloud metadata"),
    )
)

# The IANA special-purpose registries, and what embeds an IPv4 address. A table of our own, since `is_global` differs between releases
# of Python and lets multicast through. The narrower network stands first.
_SPECIAL = tuple(
    (ip_network(network), name)
    for network, name in (
        ("0.0.0.0/8", "this network"),
        ("10.0.0.0/8", "private"),
        ("100.64.0.0/10", "carrier-grade NAT"),
        ("127.0.0.0/8", "loopback"),
        ("169.254.0.0/16", "link-local"),
        ("172.16.0.0/12", "private"),
        ("192.0.0.0/24", "protocol assignments"),
        ("192.0.2.0/24", "documentation"),
        ("192.88.99.0/24", "6to4 relay"),
        ("192.168.0.0/16", "private"),
        ("198.18.0.0/15", "benchmarking"),
        ("198.51.100.0/24", "documentation"),
        ("203.0.113.0/24", "documentation"),
        ("224.0.0.0/4", "multicast"),
        ("240.0.0.0/4", "reserved"),
        ("::/128", "unspecified"),
        ("::1/128", "loopback"),
        ("::ffff:0:0/96", "an embedded IPv4 address"),
        ("::/96", "an embedded IPv4 address"),
        ("64:ff9b::/96", "an embedded IPv4 address"),
        ("64:ff9b:1::/48", "an embedded IPv4 address"),
        ("100::/64", "discard"),
        ("2001::/32", "an embedded IPv4 address"),
        ("2001::/23", "protocol assignments"),
        ("2001:db8::/32", "documentation"),
        ("2002::/16", "an embedded IPv4 address"),
        ("3fff::/20", "documentation"),
        ("5f00::/16", "segment routing"),
        ("fc00::/7", "private"),
        ("fe80::/10", "link-local"),
        ("fec0::/10", "site-local"),
        ("ff00::/8", "multicast"),
    )
)
# All that is handed out for public use so far; everything outside is reserved.
_GLOBAL_UNICAST = IPv6Network("2000::/3")
# IPv4-mapped, IPv4-compatible and NAT64 (RFC 4291, 6052, 8215).
_LAST_32_BITS_ARE_IPV4 = tuple(IPv6Network(network) for network in ("::ffff:0:0/96", "::/96", "64:ff9b::/96", "64:ff9b:1::/48"))
# ISATAP (RFC 5214) hides an IPv4 address behind these 32 bits of any prefix.
_ISATAP = frozenset({0x0000_5EFE, 0x0200_5EFE})
_LOOPBACKS = ("127.0.0.1", "::1")


class Refusal(StrEnum):
    """What is wrong with a URL or an address."""

    MALFORMED = "malformed"
    SCHEME = "scheme"
    USERINFO = "userinfo"
    FRAGMENT = "fragment"
    HOST = "host"
    PORT = "port"
    ADDRESS = "address"


class UrlRefused(Exception):
    """A URL or an address that must never be called; `detail` is for people and repeats neither credentials nor the whole URL."""

    def __init__(self, reason: Refusal, detail: str) -> None:
        """Keep the parts; `str(error)` is the detail."""
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True, slots=True, kw_only=True)
class EgressPolicy:
    """What the operator allows beyond the public internet.

    `allowed_hosts`: canonical names that may resolve to any address but link-local and metadata ones. `allowed_networks`: addresses
    that may be connected to, whatever name led there.
    """

    allowed_hosts: frozenset[str] = frozenset()
    allowed_networks: tuple[Network, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `COUNTERMAND_EGRESS_ALLOW`: host names, addresses and CIDRs, separated by commas; empty allows nothing more.

        Raises:
            ValueError: an item that is none of these, e.g. with a scheme, a port, a wildcard or host bits set.
        """
        hosts: set[str] = set()
        networks: list[Network] = []
        for item in filter(None, (part.strip() for part in text.split(","))):
            if _is_network_text(item):
                networks.append(_parse_network(item))
            else:
                hosts.add(_parse_allowed_host(item))
        return cls(allowed_hosts=frozenset(hosts), allowed_networks=tuple(networks))


@dataclass(frozen=True, slots=True, kw_only=True)
class Destination:
    """Where a URL leads, in canonical form.

    `host`: a lower-case name without trailing dot, or an address in its standard text (IPv6 without brackets). `target`: path and query
    exactly as written, "/" where there is no path.
    """

    scheme: str
    host: str
    port: int
    target: str

    @property
    def authority(self) -> str:
        """Host and port as the Host header has them: IPv6 in brackets, a default port left out."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == DEFAULT_PORTS[self.scheme] else f"{host}:{self.port}"

    @property
    def url(self) -> str:
        """The canonical URL."""
        return f"{self.scheme}://{self.authority}{self.target}"


def check_url(url: str, policy: EgressPolicy) -> Destination:
    """Return where `url` leads if its text alone does not forbid it (contract, section 5, "The outgoing request").

    Addresses written into the URL, in any notation, are judged here; what a name resolves to is judged by `check_address` at each
    connect.

    Raises:
        UrlRefused: with the first thing found wrong.
    """
    scheme, authority, target = _split(url)
    host_text, port = _host_and_port(authority, scheme)
    host = _canonical_host(host_text)
    if _literal(host) is not None:
        check_address(host, host, policy)
    elif host == "localhost" or host.endswith(".localhost"):
        for address in _LOOPBACKS:
            check_address(address, host, policy)
    return Destination(scheme=scheme, host=host, port=port, target=target)


@lru_cache(maxsize=256)  # asked for several times with each call, and most calls go where others went
def destination_of(url: str) -> str:
    """Return the canonical `host:port` that a URL leads to; of a text that is none, which is never sent to, what it says."""
    try:
        scheme, authority, _ = _split(url)
        host, port = _host_and_port(authority, scheme)
        return f"{_canonical_host(host)}:{port}"
    except UrlRefused:
        return url


def check_address(address: str, host: str, policy: EgressPolicy) -> None:
    """Pass if a connection to `address`, reached by the canonical name `host`, is allowed.

    That is: publicly routable unicast, or inside an allowed network, or under an allowed name. Link-local and metadata addresses need an
    allowed network that lies inside their range.

    Raises:
        UrlRefused: reason `address`, with the range it is in.
    """
    found = _literal(address)
    if found is None:
        raise UrlRefused(Refusal.ADDRESS, f"{address!r} is not an address")
    granting = tuple(network for network in policy.allowed_networks if found in network)
    for network, name in _METADATA:
        if any(part in network for part in (found, *_embedded(found))) and not any(_is_inside(grant, network) for grant in granting):
            raise UrlRefused(Refusal.ADDRESS, f"{found} is refused ({name}, {network}); only a CIDR inside that range allows it")
    if granting or host in policy.allowed_hosts:
        return
    reason = _why_not_public(found)
    if reason is not None:
        raise UrlRefused(Refusal.ADDRESS, f"{found} is not public ({reason}){_HINT}")


def is_address(host: str) -> bool:
    """Say whether a canonical host is an address, so that there is no name to resolve."""
    return _literal(host) is not None


def absolute_location(url: str, location: str) -> str:
    """Return the absolute URL of a Location header that answered a request to `url` (RFC 9110, section 10.2.2), without fragment.

    The result is as trustworthy as the endpoint: give it to `check_url` like any other.
    """
    try:
        return urldefrag(urljoin(url, location.strip())).url
    except ValueError:
        return location


def _split(url: str) -> tuple[str, str, str]:
    """Return scheme, authority and target of a URL whose text is unambiguous."""
    if len(url) > MAX_URL_CHARACTERS:
        raise UrlRefused(Refusal.MALFORMED, f"a URL has at most {MAX_URL_CHARACTERS} characters, found {len(url)}")
    if not url.isascii():
        raise UrlRefused(Refusal.MALFORMED, "a URL is ASCII: write an international host name in its xn-- form and percent-encode the rest")
    if _URL_TEXT.fullmatch(url) is None:
        raise UrlRefused(Refusal.MALFORMED, "the URL holds characters that RFC 3986 does not allow, or nothing")
    parts = _URL_PARTS.fullmatch(url)
    if parts is None:
        raise UrlRefused(Refusal.MALFORMED, "expected an absolute URL like https://host/path")
    scheme = parts["scheme"].lower()
    if scheme not in DEFAULT_PORTS:
        raise UrlRefused(Refusal.SCHEME, f"the scheme is http or https, found {scheme[:20]!r}")
    if "#" in url:
        raise UrlRefused(Refusal.FRAGMENT, "a fragment is never sent; leave it out")
    if "@" in parts["authority"]:
        raise UrlRefused(Refusal.USERINFO, "credentials do not belong into a URL")
    return scheme, parts["authority"], (parts["path"] or "/") + parts["query"]


def _host_and_port(authority: str, scheme: str) -> tuple[str, int]:
    """Return the host as written (IPv6 in its brackets) and the port, the scheme's where none is written."""
    host, colon, port_text = authority.rpartition(":") if not authority.endswith("]") else (authority, "", "")
    if not colon:
        return authority, DEFAULT_PORTS[scheme]
    if _PORT.fullmatch(port_text) is None or not 1 <= int(port_text) <= MAX_PORT:
        raise UrlRefused(Refusal.PORT, f"a port is a number from 1 to {MAX_PORT}, found {port_text[:20]!r}")
    return host, int(port_text)


def _canonical_host(text: str) -> str:
    """Return a name in lower case without its trailing dot, or the standard text of an address in whatever notation."""
    if text.startswith("[") and text.endswith("]"):
        try:
            return str(IPv6Address(_without_zone(text[1:-1])))
        except ValueError:
            raise UrlRefused(Refusal.HOST, f"{text[:60]!r} is not an IPv6 address without zone") from None
    name = text.lower().removesuffix(".")
    labels = name.split(".")
    if _NUMBER.fullmatch(labels[-1]) is not None:
        return str(_numeric_host(labels))
    if len(name) > MAX_HOST_CHARACTERS or not all(_LABEL.fullmatch(label) for label in labels):
        raise UrlRefused(Refusal.HOST, f"{text[:60]!r} is not a host name")
    return name


def _numeric_host(labels: list[str]) -> IPv4Address:
    """Read what `inet_aton` reads: one to four decimal, octal or hexadecimal numbers, the last one filling the rest."""
    try:
        *bytes_before, last = [_number(label) for label in labels]
    except ValueError:
        raise UrlRefused(Refusal.HOST, f"{'.'.join(labels)[:60]!r} ends in a number and is not an IPv4 address") from None
    rest_bits = IPV4_BITS - 8 * len(bytes_before)
    if len(bytes_before) > 3 or any(value > 255 for value in bytes_before) or last >= 1 << rest_bits:
        raise UrlRefused(Refusal.HOST, f"{'.'.join(labels)[:60]!r} ends in a number and is not an IPv4 address")
    return IPv4Address(int.from_bytes(bytes(bytes_before)) << rest_bits | last)


def _number(label: str) -> int:
    if _NUMBER.fullmatch(label) is None:
        raise ValueError(label)
    if label.startswith("0x"):
        return int(label[2:] or "0", 16)
    return int(label, 8 if len(label) > 1 and label.startswith("0") else 10)


def _literal(text: str) -> Address | None:
    """Return the address that `text` is in standard notation, or None."""
    try:
        return ip_address(_without_zone(text))
    except ValueError:
        return None


def _without_zone(text: str) -> str:
    """Refuse a zone id: it names an interface of this machine, and everything scoped so is link-local anyway."""
    if "%" in text:
        raise ValueError(text)
    return text


def _why_not_public(address: Address) -> str | None:
    """Return the special range an address is in, or None for publicly routable unicast."""
    for network, name in _SPECIAL:
        if address in network:
            return f"{name}, {network}"
    if isinstance(address, IPv4Address):
        return None
    if address not in _GLOBAL_UNICAST:
        return f"outside {_GLOBAL_UNICAST}"
    return "an embedded IPv4 address, ISATAP" if _is_isatap(address) else None


def _is_isatap(address: IPv6Address) -> bool:
    return int(address) >> IPV4_BITS & 0xFFFF_FFFF in _ISATAP


def _embedded(address: Address) -> Iterator[IPv4Address]:
    """Yield the IPv4 addresses that traffic to an IPv6 address may end at."""
    if isinstance(address, IPv4Address):
        return
    if address.sixtofour is not None:
        yield address.sixtofour
    elif address.teredo is not None:
        yield from address.teredo
    elif _is_isatap(address) or any(address in network for network in _LAST_32_BITS_ARE_IPV4):
        yield IPv4Address(int(address) & 0xFFFF_FFFF)


def _is_inside(inner: Network, outer: Network) -> bool:
    if isinstance(inner, IPv4Network):
        return isinstance(outer, IPv4Network) and inner.subnet_of(outer)
    return isinstance(outer, IPv6Network) and inner.subnet_of(outer)


def _is_network_text(item: str) -> bool:
    return "/" in item or _literal(item) is not None


def _parse_network(item: str) -> Network:
    try:
        return ip_network(item)
    except ValueError as error:
        raise ValueError(f"{item!r} is no CIDR like 10.1.0.0/16: {error}") from None


def _parse_allowed_host(item: str) -> str:
    """Return the canonical form of a listed name; an international one is converted to its xn-- form."""
    expected = "expected a host name without scheme, port or wildcard, an address, or a CIDR"
    try:
        host = _canonical_host(item.encode("idna").decode() if not item.isascii() else item)
    except (UrlRefused, UnicodeError):
        raise ValueError(f"{item!r} cannot be allowed: {expected}") from None
    if _literal(host) is not None:
        raise ValueError(f"{item!r} cannot be allowed: {expected}; write the address as {host}")
    return host
