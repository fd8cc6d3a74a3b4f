"""Where a URL leads."""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import quote, unquote, urlsplit

_HOST = re.compile(r"[!$&'()*+,;=._~0-9A-Za-z:%-]+")
# What a path or a query may hold as it is, of which % begins what is quoted already.
_AS_IT_IS = "%/:=&?+!$,;'@()*[]~"


class Location(NamedTuple):
    """To whom a request goes, and what it asks for there.

    Attributes:
        tls: Whether over TLS.
        host: A name in ASCII, or an address, IPv6 without brackets.
        port: A TCP port.
        header: What the Host header says.
        target: Path and query.
    """

    tls: bool
    host: str
    port: int
    header: str
    target: str


def locate(url: str) -> Location:
    """Take a URL apart.

    Raises:
        ValueError: It is none, or not one of HTTP. The text goes on where the URL's name ends: "holds a user name".
    """
    try:
        parts = urlsplit(url)
        scheme, name = parts.scheme, parts.hostname
    except ValueError as error:
        raise ValueError(f"is no URL ({error})") from error
    if scheme not in ("http", "https"):
        raise ValueError("doesn't start with http:// or https://")
    if "@" in parts.netloc:
        raise ValueError("holds a user name; a key is given apart from the URL")
    if not name:
        raise ValueError("names no host")
    if "#" in url:
        raise ValueError("holds a #, which ends what a server is sent")
    try:
        port = parts.port
    except ValueError:
        port = 0
    if port == 0:
        raise ValueError("has no valid port")
    try:
        host = unquote(name).encode("idna").decode()
    except UnicodeError as error:
        raise ValueError(f"has an impossible host ({error})") from error
    if not _HOST.fullmatch(host):
        raise ValueError("has an impossible host")
    tls = scheme == "https"
    default = 443 if tls else 80
    port = port or default
    header = host.partition("%")[0]  # a zone means something on this machine only
    header = f"[{header}]" if ":" in header else header
    target = quote(parts.path or "/", _AS_IT_IS) + (f"?{quote(parts.query, _AS_IT_IS)}" if parts.query else "")
    return Location(tls, host, port, header if port == default else f"{header}:{port}", target)
