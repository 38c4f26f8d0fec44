"""What must hold before anything is started: a mistake is said at once, not by the process that trips over it."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

from controlplane import directory
from controlplane.envoy_binary import find_envoy
from controlplane.merge import merge
from controlplane.model import Mesh
from modalmesh.base.errors import DocumentError, MachineError
from modalmesh.base.settings import Settings, split_address
from router.encoder import files as encoder_files

__all__ = ["AddressTakenError", "DocumentsRefusedError", "check"]


class AddressTakenError(MachineError):
    """An address or socket of the mesh is another process's."""

    code = "MM1303"


class DocumentsRefusedError(DocumentError):
    """The documents can't be served."""

    code = "MM1209"


def check(settings: Settings) -> list[str]:
    """Check addresses, sockets, documents, Envoy and the encoder's files; return what deserves a warning.

    Raises:
        AddressTakenError: Names the first one.
        DocumentsRefusedError: Names the first problem, and how many there are.
        MachineError: There is no Envoy.
        EncoderError: The encoder's directory is not complete.
    """
    _check_addresses(settings)
    _check_sockets(settings)
    find_envoy(settings.envoy.binary)
    encoder_files.find(settings.encoder.path)
    mesh = _read_documents(settings.controlplane.documents)
    host, port = split_address(settings.triton.listen)
    if any(endpoint.port == port for service in mesh.services for endpoint in service.endpoints):
        return []
    documents = settings.controlplane.documents
    warning = f"no document names an endpoint with port {port}, where Triton will listen ({host}:{port})"
    return [f"{warning}: change the ports in {documents}, or set MODALMESH_TRITON__LISTEN to theirs"]


def _check_addresses(settings: Settings) -> None:
    """Bind every address, all at the same time: two of ours could also be the same."""
    with contextlib.ExitStack() as stack:
        for variable, address in (
            ("MODALMESH_GATEWAY__LISTEN", settings.gateway.listen),
            ("MODALMESH_XDS__LISTEN", settings.xds.listen),
            ("MODALMESH_TRITON__LISTEN", settings.triton.listen),
        ):
            if address.startswith("unix:"):
                continue  # whoever binds it removes a stale one and refuses a live one
            host, port = split_address(address)
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            probe = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
                probe.listen(1)
            except OSError as error:
                raise AddressTakenError(
                    f"{address} can't be used: {error.strerror}", hint=f"choose another with {variable}"
                ) from error


def _check_sockets(settings: Settings) -> None:
    """Refuse sockets that are answered: an old process would be taken for the new one that can't have its socket."""
    for path in (
        settings.admin_socket,
        settings.encoder_socket,
        settings.router_socket,
        settings.envoy_admin_socket,
        settings.envoy_xds_socket,
    ):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(1.0)
            try:
                probe.connect(str(path))
            except TimeoutError:
                pass  # somebody listens and does not accept: taken, too
            except OSError:
                continue
        raise AddressTakenError(
            f"an older process still serves {path}",
            hint=f"end it (`fuser {path}` names it), or choose another directory with MODALMESH_RUNTIME_DIR",
        )


def _read_documents(documents: Path) -> Mesh:
    if not documents.is_dir():
        raise DocumentsRefusedError(
            f"{documents} is not a directory of documents", hint="name one with MODALMESH_CONTROLPLANE__DOCUMENTS"
        )
    merged = merge(directory.read(documents))
    if merged.mesh is None:
        first, *others = merged.problems
        more = f", and {len(others)} more" if others else ""
        raise DocumentsRefusedError(f"{first}{more}", hint=f"`modalmesh validate {documents}` shows all")
    return merged.mesh
