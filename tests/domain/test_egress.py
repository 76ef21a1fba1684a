"""Where the service may send, as tables: every way to write an address, every range, and what the operator can open."""

from collections.abc import Callable
from ipaddress import IPv4Address, IPv6Address

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.domain.egress import Destination, EgressPolicy, Refusal, UrlRefused, absolute_location, check_address, check_url

NOTHING_MORE = EgressPolicy()
LOOPBACK = EgressPolicy.parse("127.0.0.0/8, ::1")

REFUSED_HOSTS = {
    # loopback, in every notation that a resolver or a C library reads
    "127.0.0.1": Refusal.ADDRESS,
    "127.1": Refusal.ADDRESS,
    "127.0.1": Refusal.ADDRESS,
    "127.0.0.1.": Refusal.ADDRESS,
    "127.255.255.254": Refusal.ADDRESS,
    "2130706433": Refusal.ADDRESS,
    "0x7f000001": Refusal.ADDRESS,
    "0X7F000001": Refusal.ADDRESS,
    "0x7f.1": Refusal.ADDRESS,
    "0x7f.0x0.0x0.0x1": Refusal.ADDRESS,
    "017700000001": Refusal.ADDRESS,
    "0177.0.0.1": Refusal.ADDRESS,
    "0177.0.0.01": Refusal.ADDRESS,
    "127.0x000001": Refusal.ADDRESS,
    "00000177.1": Refusal.ADDRESS,
    "[::1]": Refusal.ADDRESS,
    "[0:0:0:0:0:0:0:1]": Refusal.ADDRESS,
    "[0000:0000:0000:0000:0000:0000:0000:0001]": Refusal.ADDRESS,
    "localhost": Refusal.ADDRESS,
    "LOCALHOST": Refusal.ADDRESS,
    "localhost.": Refusal.ADDRESS,
    "metadata.localhost": Refusal.ADDRESS,
    # an IPv4 address inside an IPv6 one, whatever it is
    "[::ffff:127.0.0.1]": Refusal.ADDRESS,
    "[::ffff:7f00:1]": Refusal.ADDRESS,
    "[0:0:0:0:0:ffff:7f00:0001]": Refusal.ADDRESS,
    "[::ffff:8.8.8.8]": Refusal.ADDRESS,
    "[::127.0.0.1]": Refusal.ADDRESS,
    "[::7f00:1]": Refusal.ADDRESS,
    "[64:ff9b::a9fe:a9fe]": Refusal.ADDRESS,
    "[64:ff9b::7f00:1]": Refusal.ADDRESS,
    "[64:ff9b::8.8.8.8]": Refusal.ADDRESS,
    "[64:ff9b:1::a9fe:a9fe]": Refusal.ADDRESS,
    "[2002:7f00:1::]": Refusal.ADDRESS,
    "[2002:a9fe:a9fe::1]": Refusal.ADDRESS,
    "[2001:0:7f00:1::]": Refusal.ADDRESS,
    "[2001::1]": Refusal.ADDRESS,
    "[2600:1f18::5efe:7f00:1]": Refusal.ADDRESS,
    "[2600:1f18::200:5efe:a00:1]": Refusal.ADDRESS,
    # unspecified, private, shared
    "0": Refusal.ADDRESS,
    "0.0.0.0": Refusal.ADDRESS,
    "0x0": Refusal.ADDRESS,
    "0.1.2.3": Refusal.ADDRESS,
    "[::]": Refusal.ADDRESS,
    "10.0.0.1": Refusal.ADDRESS,
    "10.1": Refusal.ADDRESS,
    "012.1.2.3": Refusal.ADDRESS,
    "172.16.0.1": Refusal.ADDRESS,
    "172.31.255.255": Refusal.ADDRESS,
    "192.168.1.1": Refusal.ADDRESS,
    "3232235777": Refusal.ADDRESS,
    "100.64.0.1": Refusal.ADDRESS,
    "100.127.255.255": Refusal.ADDRESS,
    "[fc00::1]": Refusal.ADDRESS,
    "[fd12:3456:789a::1]": Refusal.ADDRESS,
    "[fec0::1]": Refusal.ADDRESS,
    # link-local and metadata
    "169.254.169.254": Refusal.ADDRESS,
    "169.254.169.254.": Refusal.ADDRESS,
    "0xa9fea9fe": Refusal.ADDRESS,
    "2852039166": Refusal.ADDRESS,
    "0251.0376.0251.0376": Refusal.ADDRESS,
    "[::ffff:a9fe:a9fe]": Refusal.ADDRESS,
    "[fe80::1]": Refusal.ADDRESS,
    "[fd00:ec2::254]": Refusal.ADDRESS,
    "100.100.100.200": Refusal.ADDRESS,
    "168.63.129.16": Refusal.ADDRESS,
    "192.0.0.192": Refusal.ADDRESS,
    # not for the public internet
    "192.0.0.1": Refusal.ADDRESS,
    "192.0.2.1": Refusal.ADDRESS,
    "192.88.99.1": Refusal.ADDRESS,
    "198.18.0.1": Refusal.ADDRESS,
    "198.19.255.255": Refusal.ADDRESS,
    "198.51.100.7": Refusal.ADDRESS,
    "203.0.113.7": Refusal.ADDRESS,
    "224.0.0.1": Refusal.ADDRESS,
    "239.255.255.250": Refusal.ADDRESS,
    "240.0.0.1": Refusal.ADDRESS,
    "255.255.255.255": Refusal.ADDRESS,
    "4294967295": Refusal.ADDRESS,
    "[ff02::1]": Refusal.ADDRESS,
    "[ff0e::1]": Refusal.ADDRESS,
    "[100::1]": Refusal.ADDRESS,
    "[2001:2::1]": Refusal.ADDRESS,
    "[2001:20::1]": Refusal.ADDRESS,
    "[2001:db8::1]": Refusal.ADDRESS,
    "[3fff::1]": Refusal.ADDRESS,
    "[4000::1]": Refusal.ADDRESS,
    "[5f00::1]": Refusal.ADDRESS,
    # no host at all
    "": Refusal.HOST,
    ".": Refusal.HOST,
    "a..b": Refusal.HOST,
    "localhost..": Refusal.HOST,
    ".example.com": Refusal.HOST,
    "-a.example": Refusal.HOST,
    "a-.example": Refusal.HOST,
    "ex%61mple.com": Refusal.HOST,
    "127.0.0.1%00.example.com": Refusal.HOST,
    "a*b.example": Refusal.HOST,
    f"{'a' * 64}.example": Refusal.HOST,
    f"{'a.' * 127}example": Refusal.HOST,
    "1.2.3.4.5": Refusal.HOST,
    "256.1.1.1": Refusal.HOST,
    "1.2.3.256": Refusal.HOST,
    "1.2.65536": Refusal.HOST,
    "4294967296": Refusal.HOST,
    "0x100000000": Refusal.HOST,
    "08.8.8.8": Refusal.HOST,
    "1..2.3": Refusal.HOST,
    "example.123": Refusal.HOST,
    "[::1%25eth0]": Refusal.HOST,
    "[fe80::1%25lo]": Refusal.HOST,
    "[1.2.3.4]": Refusal.HOST,
    "[v1.fe]": Refusal.HOST,
    "[]": Refusal.HOST,
    "::1": Refusal.HOST,
    "[::1": Refusal.HOST,
}

REFUSED_URLS = {
    "": Refusal.MALFORMED,
    "//host.example/": Refusal.MALFORMED,
    "/undo": Refusal.MALFORMED,
    "host.example/undo": Refusal.MALFORMED,
    "http:host.example": Refusal.MALFORMED,
    "http:/host.example": Refusal.MALFORMED,
    " http://host.example": Refusal.MALFORMED,
    "http://host.example ": Refusal.MALFORMED,
    "http://host.example/a b": Refusal.MALFORMED,
    "http://host.example/a\tb": Refusal.MALFORMED,
    "http://host.example/a\r\nHost: evil": Refusal.MALFORMED,
    "http://host.example/\x00": Refusal.MALFORMED,
    "http://host.example\\@evil.example/": Refusal.MALFORMED,
    "http://host.example/%zz": Refusal.MALFORMED,
    "http://host.example/%": Refusal.MALFORMED,
    'http://host.example/"': Refusal.MALFORMED,
    "http://bücher.example/": Refusal.MALFORMED,
    "http://127。0。0。1/": Refusal.MALFORMED,
    "http://①②⑦.0.0.1/": Refusal.MALFORMED,
    "http://host.example/ü": Refusal.MALFORMED,
    f"http://host.example/{'a' * 2048}": Refusal.MALFORMED,
    "ftp://host.example/": Refusal.SCHEME,
    "file:///etc/passwd": Refusal.SCHEME,
    "gopher://host.example:6379/_x": Refusal.SCHEME,
    "httpx://host.example/": Refusal.SCHEME,
    "http+unix://host.example/": Refusal.SCHEME,
    "http://user@host.example/": Refusal.USERINFO,
    "http://user:secret@host.example/": Refusal.USERINFO,
    "http://@host.example/": Refusal.USERINFO,
    "http://host.example@127.0.0.1/": Refusal.USERINFO,
    "http://host.example#@evil.example/": Refusal.FRAGMENT,
    "http://host.example/a#b": Refusal.FRAGMENT,
    "http://host.example/a#": Refusal.FRAGMENT,
    "http://host.example:/": Refusal.PORT,
    "http://host.example:0/": Refusal.PORT,
    "http://host.example:65536/": Refusal.PORT,
    "http://host.example:080000/": Refusal.PORT,
    "http://host.example:+80/": Refusal.PORT,
    "http://host.example:-1/": Refusal.PORT,
    "http://host.example:80:81/": Refusal.HOST,
    "http://[::1]x/": Refusal.PORT,
    "http://[::1]x:80/": Refusal.HOST,
    "http://[::1]:x/": Refusal.PORT,
}

ACCEPTED_URLS = {
    "https://billing.example/undo/credit": Destination(scheme="https", host="billing.example", port=443, target="/undo/credit"),
    "HTTPS://Billing.EXAMPLE./x": Destination(scheme="https", host="billing.example", port=443, target="/x"),
    "http://billing.example": Destination(scheme="http", host="billing.example", port=80, target="/"),
    "http://billing.example?a=1&b[]=2": Destination(scheme="http", host="billing.example", port=80, target="/?a=1&b[]=2"),
    "http://billing.example:8080/a/../b;c=1?x=/?@:": Destination(
        scheme="http", host="billing.example", port=8080, target="/a/../b;c=1?x=/?@:"
    ),
    "https://billing.example:00443/%2e%2E": Destination(scheme="https", host="billing.example", port=443, target="/%2e%2E"),
    "http://xn--bcher-kva.example/": Destination(scheme="http", host="xn--bcher-kva.example", port=80, target="/"),
    "http://my_service/": Destination(scheme="http", host="my_service", port=80, target="/"),
    "http://example.0x1g/": Destination(scheme="http", host="example.0x1g", port=80, target="/"),
    "http://0x7f.example/": Destination(scheme="http", host="0x7f.example", port=80, target="/"),
    "http://8.8.8.8/": Destination(scheme="http", host="8.8.8.8", port=80, target="/"),
    "http://134744072/": Destination(scheme="http", host="8.8.8.8", port=80, target="/"),
    "http://0x08.010.2056/": Destination(scheme="http", host="8.8.8.8", port=80, target="/"),
    "https://[2606:4700:4700::1111]:8443/": Destination(scheme="https", host="2606:4700:4700::1111", port=8443, target="/"),
    "https://[2606:4700:4700:0:0:0:0:1111]/": Destination(scheme="https", host="2606:4700:4700::1111", port=443, target="/"),
    "http://notlocalhost/": Destination(scheme="http", host="notlocalhost", port=80, target="/"),
    "http://localhost.example/": Destination(scheme="http", host="localhost.example", port=80, target="/"),
}

# policy, address, name it was reached by, whether it passes
ADDRESSES_UNDER_A_POLICY = [
    ("", "8.8.8.8", "billing.example", True),
    ("", "2606:4700:4700::1111", "billing.example", True),
    ("", "10.1.2.3", "billing.internal", False),
    ("", "fe80::1%eth0", "billing.example", False),
    ("", "not an address", "billing.example", False),
    ("billing.internal", "10.1.2.3", "billing.internal", True),
    ("Billing.Internal.", "10.1.2.3", "billing.internal", True),
    ("billing.internal", "10.1.2.3", "billing.internal.evil.example", False),
    ("billing.internal", "10.1.2.3", "evil.billing.internal", False),
    ("billing.internal", "127.0.0.1", "billing.internal", True),
    ("billing.internal", "fd12::1", "billing.internal", True),
    ("billing.internal", "169.254.169.254", "billing.internal", False),
    ("billing.internal", "::ffff:169.254.169.254", "billing.internal", False),
    ("billing.internal", "64:ff9b::a9fe:a9fe", "billing.internal", False),
    ("billing.internal", "2002:a9fe:a9fe::", "billing.internal", False),
    ("billing.internal", "fe80::1", "billing.internal", False),
    ("billing.internal", "fd00:ec2::254", "billing.internal", False),
    ("billing.internal", "168.63.129.16", "billing.internal", False),
    ("10.1.0.0/16", "10.1.2.3", "billing.internal", True),
    ("10.1.0.0/16", "10.2.2.3", "billing.internal", False),
    ("10.1.0.0/16", "::ffff:10.1.2.3", "billing.internal", False),
    ("10.0.0.7", "10.0.0.7", "billing.internal", True),
    ("10.0.0.7", "10.0.0.8", "billing.internal", False),
    ("fd12::/16", "fd12::7", "billing.internal", True),
    ("::ffff:10.0.0.0/104", "::ffff:10.0.0.7", "billing.internal", True),
    ("64:ff9b::/96", "64:ff9b::808:808", "billing.example", True),
    ("64:ff9b::/96", "64:ff9b::a9fe:a9fe", "billing.example", False),
    ("0.0.0.0/0, ::/0", "10.1.2.3", "billing.internal", True),
    ("0.0.0.0/0, ::/0", "169.254.169.254", "billing.internal", False),
    ("100.64.0.0/10", "100.64.0.1", "billing.internal", True),
    ("100.64.0.0/10", "100.100.100.200", "billing.internal", False),
    ("fc00::/7", "fd00:ec2::254", "billing.internal", False),
    ("169.254.0.0/16", "169.254.169.254", "billing.internal", True),
    ("169.254.170.2", "169.254.170.2", "billing.internal", True),
    ("169.254.170.2", "169.254.169.254", "billing.internal", False),
    ("fe80::/10", "fe80::1", "billing.internal", True),
]


@pytest.mark.parametrize(("host", "reason"), REFUSED_HOSTS.items())
def test_host_is_refused_when_it_is_not_public(host: str, reason: Refusal) -> None:
    """No notation leads to an address that the operator has not opened."""
    with pytest.raises(UrlRefused) as caught:
        check_url(f"http://{host}/undo", NOTHING_MORE)

    assert caught.value.reason is reason
    assert caught.value.detail


@pytest.mark.parametrize(("url", "reason"), REFUSED_URLS.items())
def test_url_is_refused_when_its_text_is_ambiguous_or_wrong(url: str, reason: Refusal) -> None:
    """What two parsers could read differently is not read at all."""
    with pytest.raises(UrlRefused) as caught:
        check_url(url, LOOPBACK)

    assert caught.value.reason is reason


@pytest.mark.parametrize(("url", "destination"), ACCEPTED_URLS.items())
def test_url_is_canonical_when_accepted(url: str, destination: Destination) -> None:
    """Host and port are normalised, path and query are left exactly as written."""
    assert check_url(url, NOTHING_MORE) == destination


@pytest.mark.parametrize(
    ("policy", "host", "passes"),
    [
        ("", "localhost", False),
        ("127.0.0.0/8", "localhost", False),
        ("::1", "localhost", False),
        ("127.0.0.0/8, ::1", "localhost", True),
        ("127.0.0.1, ::1", "localhost", True),
        ("127.0.0.0/8, ::1", "a.localhost", True),
        ("localhost", "localhost", True),
        ("localhost", "a.localhost", False),
        ("localhost", "127.0.0.1", False),
        ("127.0.0.1", "127.1", True),
        ("127.0.0.1", "2130706433", True),
        ("127.0.0.1", "127.0.0.2", False),
        ("127.0.0.1", "[::ffff:127.0.0.1]", False),
        ("::1", "[::1]", True),
    ],
)
def test_loopback_passes_when_listed(policy: str, host: str, *, passes: bool) -> None:
    """`localhost` is judged like both loopback addresses, since nobody knows which one it will be."""
    assert _passes(lambda: check_url(f"http://{host}/", EgressPolicy.parse(policy))) is passes


@pytest.mark.parametrize(("policy", "address", "host", "passes"), ADDRESSES_UNDER_A_POLICY)
def test_address_is_judged_when_connecting(policy: str, address: str, host: str, *, passes: bool) -> None:
    """A listed name may lead inside, a listed network may be reached by any name, metadata only by its own CIDR."""
    assert _passes(lambda: check_address(address, host, EgressPolicy.parse(policy))) is passes


def test_refusal_names_range_and_setting_when_an_address_is_private() -> None:
    """The person who reads the refusal learns what was found and who can change it."""
    with pytest.raises(UrlRefused, match=r"10\.1\.2\.3 is not public \(private, 10\.0\.0\.0/8\).*COUNTERMAND_EGRESS_ALLOW"):
        check_address("10.1.2.3", "billing.internal", NOTHING_MORE)


def test_refusal_repeats_no_credentials_when_the_url_holds_some() -> None:
    """A refused URL may be logged by its detail."""
    with pytest.raises(UrlRefused) as caught:
        check_url("https://user:hunter2@billing.example/", NOTHING_MORE)

    assert "hunter2" not in str(caught.value)


def test_policy_holds_hosts_and_networks_when_parsed() -> None:
    """One setting lists names, addresses and CIDRs; blanks and a last comma do no harm."""
    policy = EgressPolicy.parse(" Billing.internal. , 10.1.0.0/16, 127.0.0.1,::1, bücher.example,")

    assert policy.allowed_hosts == {"billing.internal", "xn--bcher-kva.example"}
    assert [str(network) for network in policy.allowed_networks] == ["10.1.0.0/16", "127.0.0.1/32", "::1/128"]
    assert EgressPolicy.parse("") == EgressPolicy()


@pytest.mark.parametrize(
    "item",
    [
        "10.1.2.3/16",
        "10.0.0.0/33",
        "*.example.com",
        "https://billing.internal",
        "billing.internal:8080",
        "127.0.0.1:8080",
        "[::1]",
        "127.1",
        "billing internal",
        "a/b",
    ],
)
def test_policy_is_refused_when_an_item_is_unclear(item: str) -> None:
    """A typing error in the setting is loud and names the item."""
    with pytest.raises(ValueError, match=r"^'") as caught:
        EgressPolicy.parse(f"billing.internal, {item}")

    assert item in str(caught.value)


@pytest.mark.parametrize(
    ("location", "expected"),
    [
        ("/jobs/1", "https://billing.example/jobs/1"),
        ("jobs/1?x=1#part", "https://billing.example/undo/jobs/1?x=1"),
        ("//other.example/jobs", "https://other.example/jobs"),
        ("http://10.0.0.1/jobs", "http://10.0.0.1/jobs"),
        ("?state=1", "https://billing.example/undo/credit?state=1"),
        ("http://[bad", "http://[bad"),
    ],
)
def test_location_is_absolute_when_joined(location: str, expected: str) -> None:
    """A 202's Location may be relative; what comes out is checked like any other URL."""
    assert absolute_location("https://billing.example/undo/credit", location) == expected


@given(st.integers(0, 2**32 - 1), st.sampled_from(["dotted", "decimal", "hex", "octal", "short", "mixed"]))
def test_ipv4_host_is_judged_by_number_when_written_in_any_notation(number: int, notation: str) -> None:
    """All spellings of one address get one judgement."""
    first, *rest = number.to_bytes(4)
    text = {
        "dotted": str(IPv4Address(number)),
        "decimal": str(number),
        "hex": hex(number),
        "octal": f"0{number:o}",
        "short": f"{first}.{int.from_bytes(rest)}",
        "mixed": f"0{first:o}.{rest[0]:#x}.{int.from_bytes(rest[1:])}.",
    }[notation]

    try:
        found = check_url(f"http://{text}/", NOTHING_MORE).host
    except UrlRefused as refused:
        assert refused.reason is Refusal.ADDRESS  # noqa: PT017 (both outcomes are right, depending on the number)
        assert not _passes(lambda: check_address(str(IPv4Address(number)), "", NOTHING_MORE))
    else:
        assert found == str(IPv4Address(number))
        check_address(found, found, NOTHING_MORE)


@given(st.one_of(st.ip_addresses(v=4), st.ip_addresses(v=6), st.ip_addresses(network="2000::/3"), st.ip_addresses(network="2001::/16")))
def test_address_is_global_unicast_when_it_passes_without_a_policy(address: IPv4Address | IPv6Address) -> None:
    """Our table is never laxer than the standard library's."""
    if not _passes(lambda: check_address(str(address), "billing.example", NOTHING_MORE)):
        return
    assert address.is_global
    assert True not in {address.is_multicast, address.is_reserved, address.is_private, address.is_link_local}
    assert address.version == 4 or (address.ipv4_mapped, address.sixtofour, address.teredo) == (None, None, None)


@given(st.text(max_size=40) | st.text(alphabet="http:/.@[]#?%01279xfan-", max_size=40).map("http://{}".format))
def test_url_is_judged_or_refused_when_it_is_any_text(url: str) -> None:
    """No text makes the check fail in another way, and the HTTP client reads the canonical URL as we do."""
    try:
        destination = check_url(url, LOOPBACK)
    except UrlRefused:
        return
    parsed = httpx.URL(destination.url)
    assert (parsed.scheme, parsed.raw_host.decode()) == (destination.scheme, destination.host)
    assert (parsed.port or {"http": 80, "https": 443}[parsed.scheme]) == destination.port
    assert check_url(destination.url, LOOPBACK) == destination


@given(st.ip_addresses(v=6))
def test_ipv6_host_is_judged_by_number_when_written_out(address: IPv6Address) -> None:
    """Long and short forms are the same address."""
    expected = _passes(lambda: check_address(str(address), "", NOTHING_MORE))

    assert _passes(lambda: check_url(f"http://[{address}]/", NOTHING_MORE)) is expected
    assert _passes(lambda: check_url(f"http://[{address.exploded}]/", NOTHING_MORE)) is expected


def _passes(check: Callable[[], object]) -> bool:
    try:
        check()
    except UrlRefused:
        return False
    return True
