"""What a client of delta ADS holds, and how it answers: the protocol's other side, without I/O.

Rules are those of Envoy's «xDS REST and gRPC protocol», «Incremental xDS». A response that a handler refuses is
answered with a NACK, and what the handler had stays in force. The server does not send the refused resources again
unless they change, so they are kept here and handed over with the next update of the type.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from modalmesh.base.errors import ModalMeshError
from modalmesh.base.logging import get_logger
from xds import metrics
from xds.errors import BadResponseError
from xds.pb.envoy.config.core.v3 import base_pb2
from xds.pb.envoy.service.discovery.v3 import discovery_pb2
from xds.pb.google.rpc import status_pb2
from xds.subscription import WILDCARD
from xds.types import push_rank, short_name

__all__ = ["Consumer", "Handler", "Update"]

_log = get_logger()

_INVALID_ARGUMENT: Final = 3


@dataclass(frozen=True, slots=True)
class Update:
    """What changed for one type.

    Attributes:
        type_url: The type.
        changed: Name → serialised message, of resources that are new or different.
        removed: Names that don't exist (any more); may hold names that were never there.
    """

    type_url: str
    changed: Mapping[str, bytes]
    removed: frozenset[str]


Handler = Callable[[Update], None]
"""Takes an update as a whole, or raises a ModalMeshError and keeps what it had. Called once per type even when there
is nothing, so that a consumer knows that it has everything."""


@dataclass(slots=True)
class _Held:
    names: tuple[str, ...]
    versions: dict[str, str] = field(default_factory=dict)
    refused: dict[str, tuple[bytes, str] | None] = field(default_factory=dict)
    """Name → body and version, or None for a removal, of what a handler has not taken."""
    delivered: bool = False


class Consumer:
    """State of one client over all its streams.

    Args:
        node: Sent with the first request of a stream.
        handlers: Type URL → what takes its updates.
        names: Type URL → names to subscribe to; default ``*``.
    """

    def __init__(
        self,
        node: base_pb2.Node,
        handlers: Mapping[str, Handler],
        names: Mapping[str, Iterable[str]] | None = None,
    ) -> None:
        if not handlers:
            raise ValueError("a client without a handler has nothing to ask for")
        self._node = node
        self._handlers = dict(handlers)
        self._held = {
            type_url: _Held(tuple((names or {}).get(type_url, (WILDCARD,))))
            for type_url in sorted(handlers, key=push_rank)
        }

    def first_requests(self) -> list[discovery_pb2.DeltaDiscoveryRequest]:
        """Return the requests that open a stream; what is held is named, so that equal resources are not resent."""
        requests: list[discovery_pb2.DeltaDiscoveryRequest] = []
        for type_url, held in self._held.items():
            # Refused resources differ from the versions named here: the server sends them again.
            held.refused.clear()
            request = discovery_pb2.DeltaDiscoveryRequest(
                type_url=type_url,
                resource_names_subscribe=held.names,
                initial_resource_versions=held.versions,
            )
            if not requests:
                request.node.CopyFrom(self._node)
            requests.append(request)
        return requests

    def on_response(self, response: discovery_pb2.DeltaDiscoveryResponse) -> discovery_pb2.DeltaDiscoveryRequest:
        """Hand a response to its handler; return the ACK or NACK."""
        answer = discovery_pb2.DeltaDiscoveryRequest(type_url=response.type_url, response_nonce=response.nonce)
        try:
            self._take(response)
        except ModalMeshError as error:
            self._refuse(answer, str(error))
        except Exception as error:
            _log.exception("xds update failed", type=short_name(response.type_url))
            self._refuse(answer, f"{type(error).__name__}: {error}")
        else:
            metrics.CLIENT_UPDATES.labels("ack").inc()
        return answer

    def _take(self, response: discovery_pb2.DeltaDiscoveryResponse) -> None:
        held = self._held.get(response.type_url)
        if held is None:
            raise BadResponseError(f"type {response.type_url!r} was not asked for")
        held.refused |= _content(response)
        changed = {name: item[0] for name, item in held.refused.items() if item is not None}
        removed = frozenset(name for name, item in held.refused.items() if item is None)
        if changed or removed or not held.delivered:
            self._handlers[response.type_url](Update(response.type_url, changed, removed))
        for name, item in held.refused.items():
            if item is None:
                held.versions.pop(name, None)
            else:
                held.versions[name] = item[1]
        held.refused.clear()
        held.delivered = True

    @staticmethod
    def _refuse(answer: discovery_pb2.DeltaDiscoveryRequest, message: str) -> None:
        metrics.CLIENT_UPDATES.labels("nack").inc()
        _log.warning("xds update refused; what was in force stays", type=short_name(answer.type_url), error=message)
        answer.error_detail.CopyFrom(status_pb2.Status(code=_INVALID_ARGUMENT, message=message))


def _content(response: discovery_pb2.DeltaDiscoveryResponse) -> dict[str, tuple[bytes, str] | None]:
    content: dict[str, tuple[bytes, str] | None] = dict.fromkeys(response.removed_resources)
    for resource in response.resources:
        if resource.name in content:
            raise BadResponseError(f"resource {resource.name!r} occurs twice in one response")
        if resource.resource.type_url != response.type_url:
            raise BadResponseError(f"resource {resource.name!r} is a {resource.resource.type_url!r}")
        content[resource.name] = (resource.resource.value, resource.version)
    return content
