"""How connections are opened, with TLS too."""

import asyncio
import errno
import os
import socket
import ssl
import subprocess

import pytest
from http_server import OK, get, opened, post, serving, sockets

import art_gym_agents._connections as connections
import art_gym_agents._http as http
from art_gym_agents._connections import ConnectFailed

# Connecting


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


async def test_a_refused_connection_says_so():
    async with opened() as session:
        with pytest.raises(ConnectFailed, match=r"refused|Connect call failed") as caught:
            await get(session, f"http://127.0.0.1:{free_port()}/")
    assert caught.value.errno == errno.ECONNREFUSED


async def test_a_name_that_does_not_resolve_says_so(monkeypatch):
    async def nowhere(*args, **options):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", nowhere)
    async with opened() as session:
        with pytest.raises(ConnectFailed, match=r"no-such-host\.invalid.*not known"):
            await get(session, "http://no-such-host.invalid/")


def resolve_to(monkeypatch, *hosts):
    asked = []

    async def getaddrinfo(host, port, **options):
        asked.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in hosts]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    return asked


async def test_a_name_is_resolved_once_for_many_connections(monkeypatch):
    asked = resolve_to(monkeypatch, "127.0.0.1")
    async with serving(OK) as server, opened() as session:
        await asyncio.gather(*(get(session, f"http://name.invalid:{server.port}/") for _ in range(50)))
    assert asked == ["name.invalid"]


async def test_the_next_address_is_tried_and_the_good_one_remembered(monkeypatch):
    tried = []
    connect = asyncio.SelectorEventLoop.sock_connect

    async def sock_connect(self, sock, address):
        tried.append(address[0])
        await connect(self, sock, address)

    monkeypatch.setattr(asyncio.SelectorEventLoop, "sock_connect", sock_connect)
    async with serving([OK, None]) as server, opened() as session:
        resolve_to(monkeypatch, "127.0.0.77", "127.0.0.1")
        for _ in range(2):
            await get(session, f"http://name.invalid:{server.port}/")
            await asyncio.sleep(0.02)
    assert tried == ["127.0.0.77", "127.0.0.1", "127.0.0.1"]


async def test_an_address_that_swallows_everything_leaves_time_for_the_next(monkeypatch):
    monkeypatch.setattr(connections, "_CONNECT_TIMEOUT", 0.6)
    connect = asyncio.SelectorEventLoop.sock_connect

    async def sock_connect(self, sock, address):
        if address[0] == "127.0.0.77":
            await asyncio.sleep(30.0)
        await connect(self, sock, address)

    monkeypatch.setattr(asyncio.SelectorEventLoop, "sock_connect", sock_connect)
    async with serving(OK) as server, opened() as session:
        resolve_to(monkeypatch, "127.0.0.77", "127.0.0.1")
        assert (await get(session, f"http://name.invalid:{server.port}/")).status == 200


@pytest.mark.parametrize(("timeout", "seconds", "error"), [(0.1, 5.0, ConnectFailed), (5.0, 0.1, TimeoutError)])
async def test_connecting_takes_no_longer_than_it_may(monkeypatch, timeout, seconds, error):
    async def never(self, sock, address):
        await asyncio.sleep(30.0)

    monkeypatch.setattr(connections, "_CONNECT_TIMEOUT", timeout)
    monkeypatch.setattr(asyncio.SelectorEventLoop, "sock_connect", never)
    before = sockets()
    async with opened() as session:
        with pytest.raises(error):
            await get(session, "http://127.0.0.1:9/", seconds)
        asked = asyncio.create_task(get(session, "http://127.0.0.1:9/"))
        await asyncio.sleep(0.02)
        asked.cancel()
        await asyncio.wait([asked])
        assert asked.cancelled()
    assert sockets() == before


async def test_a_flood_of_requests_opens_its_connections_by_and_by_and_by_server(monkeypatch):
    opening, most = {}, {}

    async def connect(self, sock, address):
        opening[address] = opening.get(address, 0) + 1
        most[address[0]] = max(most.get(address[0], 0), opening[address])
        await asyncio.sleep(0.01)
        opening[address] -= 1
        raise ConnectionRefusedError(errno.ECONNREFUSED, "refused")

    monkeypatch.setattr(asyncio.SelectorEventLoop, "sock_connect", connect)
    async with opened() as session:
        asked = [get(session, f"http://127.0.0.{n}:9/", 60.0) for n in (1, 2) for _ in range(500)]
        assert {type(result) for result in await asyncio.gather(*asked, return_exceptions=True)} == {ConnectFailed}
    assert most == {"127.0.0.1": 128, "127.0.0.2": 128}


async def test_one_that_waits_to_connect_takes_what_becomes_free(monkeypatch):
    monkeypatch.setattr(connections, "_OPENING", 1)
    connect = asyncio.SelectorEventLoop.sock_connect

    async def sock_connect(self, sock, address):
        await asyncio.sleep(0.01)
        await connect(self, sock, address)

    monkeypatch.setattr(asyncio.SelectorEventLoop, "sock_connect", sock_connect)
    async with serving([0.02, OK]) as server, opened() as session:
        await asyncio.gather(*(get(session, server.url, 30.0) for _ in range(100)))
    assert server.connections < 60


async def test_one_that_is_cancelled_while_it_waits_for_its_turn_gives_it_up(monkeypatch):
    monkeypatch.setattr(connections, "_OPENING", 1)
    connect = asyncio.SelectorEventLoop.sock_connect

    async def sock_connect(self, sock, address):
        await asyncio.sleep(0.1)
        await connect(self, sock, address)

    monkeypatch.setattr(asyncio.SelectorEventLoop, "sock_connect", sock_connect)
    async with serving(OK) as server, opened() as session:
        asked = [asyncio.create_task(get(session, server.url)) for _ in range(3)]
        await asyncio.sleep(0.05)
        for task in asked[:2]:  # one connects, one waits
            task.cancel()
        with pytest.raises(TimeoutError):
            await get(session, server.url, 0.05)
        results = await asyncio.gather(*asked, get(session, server.url), return_exceptions=True)
    assert [type(result).__name__ for result in results] == ["CancelledError", "CancelledError", "Response", "Response"]


async def test_a_thousand_at_once_leave_few_sockets(monkeypatch):
    monkeypatch.setattr(http, "_KEEP_ALIVE", 0.2)
    before = sockets()
    async with serving([0.1, OK]) as server, opened() as session:
        responses = await asyncio.gather(*(post(session, server.url, b"x" * 1000, 60.0) for _ in range(1000)))
        assert {response.body for response in responses} == {b"hi"}
        await asyncio.sleep(0.8)
        # The test's own listener, the server's ends, and no more than one sweep's rest.
        assert sockets() - before < 20
        assert session.open < 10


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6")
async def test_a_host_may_be_an_ipv6_address():
    try:
        async with serving(OK, host="::1") as server, opened() as session:
            assert (await get(session, server.url)).status == 200
            assert b"Host: [::1]:%d\r\n" % server.port in server.requests[0][0]
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")


# TLS


@pytest.fixture(scope="session")
def certificate(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    key, cert = folder / "key.pem", folder / "cert.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)),
        ],
        check=True,
        capture_output=True,
    )
    return key, cert


@pytest.fixture
def server_tls(certificate):
    key, cert = certificate
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    return context


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
async def test_a_certificate_of_the_users_own_is_trusted_if_the_environment_names_it(certificate, server_tls, host, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate[1]))
    body = os.urandom(300_000)
    async with serving(b"HTTP/1.1 200 OK\r\nContent-Length: 300000\r\n\r\n" + body, ssl=server_tls) as server, opened() as session:
        for _ in range(3):
            assert (await post(session, f"https://{host}:{server.port}/v1", body)).body == body
    assert server.connections == 1
    assert server.requests[0][1] == body


async def test_a_certificate_nobody_vouches_for_is_refused_with_the_way_out(server_tls):
    async with serving(OK, ssl=server_tls) as server, opened() as session:
        with pytest.raises(ConnectFailed, match=r"(?s)certificate.*SSL_CERT_FILE"):
            await get(session, f"https://127.0.0.1:{server.port}/")
        await asyncio.sleep(0.05)
        assert session.open == 0
    assert server.requests == []


async def test_a_certificate_for_another_host_is_refused(certificate, server_tls, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate[1]))
    async with serving(OK, host="127.0.0.2", ssl=server_tls) as server, opened() as session:
        with pytest.raises(ConnectFailed, match="certificate"):
            await get(session, f"https://127.0.0.2:{server.port}/")


async def test_https_of_a_server_that_speaks_http_fails_to_connect():
    async with serving(OK) as server, opened() as session:
        with pytest.raises((ConnectFailed, TimeoutError)):
            await get(session, f"https://127.0.0.1:{server.port}/", 2.0)


async def test_a_handshake_that_hangs_ends_with_the_deadline_or_the_cancel():
    before = sockets()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"https://127.0.0.1:{listener.getsockname()[1]}/"
        async with opened() as session:
            with pytest.raises(TimeoutError):
                await get(session, url, 0.2)
            asked = asyncio.create_task(get(session, url))
            await asyncio.sleep(0.1)
            asked.cancel()
            await asyncio.wait([asked])
            assert asked.cancelled()
    await asyncio.sleep(0.05)
    assert sockets() == before


@pytest.mark.parametrize("ending", [None, "reset"])
async def test_a_connection_under_tls_that_died_while_idle_is_replaced(certificate, server_tls, monkeypatch, ending):
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate[1]))
    async with serving(OK, [ending], OK, ssl=server_tls) as server, opened() as session:
        for _ in range(2):
            assert (await get(session, f"https://localhost:{server.port}/")).body == b"hi"
    assert server.connections == 2
