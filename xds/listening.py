"""Where the server listens: a bound socket, and TLS contexts for it and for its clients.

A peer that is not authenticated is admitted from this machine only. With mutual TLS, any address may be listened on.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from modalmesh.base.settings import Xds, split_address
from xds.errors import ListenError, TlsError

__all__ = ["Tls", "bound", "client_context", "context_of", "server_context"]

_PROBE: Final = 1.0
_ALPN: Final = ["h2"]


@dataclass(frozen=True, slots=True)
class Tls:
    """Files in PEM form.

    Attributes:
        certificate: Own certificate and what is between it and its root.
        key: Its private key.
        ca: Roots that the peer's certificate must lead to; on a server None: clients need no certificate.
    """

    certificate: Path
    key: Path
    ca: Path | None = None


def server_context(tls: Tls) -> ssl.SSLContext:
    """Return the server's context: TLS 1.2 or later, ALPN h2 only, and client certificates if ``ca`` is given.

    Raises:
        TlsError: A file is missing or not what it should be.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _load(context, tls)
    if tls.ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_context(ca: Path, own: Tls | None = None) -> ssl.SSLContext:
    """Return a client's context: the server's certificate must lead to ``ca``, and name the host.

    Raises:
        TlsError: A file is missing or not what it should be.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if own is not None:
        _load(context, own)
    else:
        context.set_alpn_protocols(_ALPN)
    _trust(context, ca)
    return context


def context_of(settings: Xds) -> ssl.SSLContext | None:
    """Return the context that the mesh's own clients use; None: cleartext.

    Raises:
        TlsError: A file is missing or not what it should be.
    """
    if settings.ca is None:
        return None
    own = None
    if settings.client_certificate is not None and settings.client_key is not None:
        own = Tls(settings.client_certificate, settings.client_key)
    return client_context(settings.ca, own)


def _load(context: ssl.SSLContext, tls: Tls) -> None:
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(_ALPN)
    try:
        context.load_cert_chain(tls.certificate, tls.key)
    except (OSError, ssl.SSLError) as error:
        raise TlsError(f"certificate {tls.certificate} with key {tls.key} can't be used: {error}") from error
    if tls.ca is not None:
        _trust(context, tls.ca)


def _trust(context: ssl.SSLContext, ca: Path) -> None:
    try:
        context.load_verify_locations(ca)
    except (OSError, ssl.SSLError) as error:
        raise TlsError(f"root certificates {ca} can't be used: {error}") from error


def bound(listen: str, *, anywhere: bool = False) -> socket.socket:
    """Return a socket bound to ``host:port`` (port 0: any free one) or ``unix:PATH``.

    Args:
        listen: The address.
        anywhere: Also where other machines can reach it.

    Raises:
        ListenError: The address is taken, not on loopback, or not an address.
    """
    try:
        # Port 0 is no address for anyone else, so split_address refuses it.
        host, port = (listen[:-2].strip("[]"), 0) if listen.endswith(":0") else split_address(listen)
    except ValueError as error:
        raise ListenError(f"xDS server can't listen: {error}") from error
    try:
        if listen.startswith("unix:"):
            return _bound_unix(Path(host))
        if not anywhere and not _is_loopback(host):
            raise ListenError(
                f"xDS server must not listen on {host}: its clients are not authenticated",
                hint="choose a loopback address or unix:PATH with MODALMESH_XDS__LISTEN, or ask clients for "
                "certificates with MODALMESH_XDS__CLIENT_CA",
            )
        address = "127.0.0.1" if host == "localhost" else host
        return socket.create_server((address, port), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        raise ListenError(
            f"xDS server can't listen on {listen}: {'the address is in use' if taken else error.strerror or error}",
            hint="choose another with MODALMESH_XDS__LISTEN",
        ) from error


def _bound_unix(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    try:
        # A socket file outlives its process; only one that nobody answers may be replaced (bind refuses the other).
        if path.is_socket() and not _answers(path):
            path.unlink(missing_ok=True)
        sock.bind(str(path))
        path.chmod(0o600)  # before listen(): nobody else ever connects
    except OSError:
        sock.close()
        raise
    sock.setblocking(False)
    return sock


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(_PROBE)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return False
        return True


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
