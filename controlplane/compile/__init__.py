"""The mesh → resources: one module per kind of resource, pure functions of values.

Equal input gives equal bytes. What is compiled is checked against HTTP/1.1 before anyone sees it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.message import Message

from controlplane.compile.clusters import compile_clusters
from controlplane.compile.endpoints import compile_endpoints
from controlplane.compile.listeners import GatewayOptions, compile_gateway
from controlplane.compile.policy import POLICY, Vectors, compile_policies
from controlplane.compile.routes import compile_routes
from controlplane.errors import Http1Error
from controlplane.lint import find_http1
from controlplane.model import Mesh
from modalmesh.base.settings import split_address
from xds.snapshot import Resource, Snapshot
from xds.types import CLUSTER, ENDPOINT, LISTENER, ROUTE

__all__ = ["Compiled", "GatewayOptions", "Options", "Vectors", "compile_mesh"]


@dataclass(frozen=True, slots=True)
class Options:
    """What the settings say about what is compiled."""

    gateway: GatewayOptions
    router_socket: Path


@dataclass(frozen=True, slots=True)
class Compiled:
    """What each group of clients shall hold; the two belong together."""

    envoy: Snapshot
    router: Snapshot


def compile_mesh(mesh: Mesh, vectors: Vectors | None, options: Options) -> Compiled:
    """Compile everything.

    Args:
        mesh: What shall be.
        vectors: Of all descriptions; None: no policies, requests go where the plain routes send them.
        options: From the settings.

    Raises:
        Http1Error: Something would allow HTTP/1.1.
        KeyError: A description has no vector.
    """
    envoy = list(_for_envoys(mesh, options))
    for _, name, message in envoy:
        for place in find_http1(message):
            raise Http1Error(f"{name}: {place}", hint="this is a mistake in ModalMesh; please report it")
    policies = compile_policies(mesh.semantic_routes, vectors) if vectors else []
    return Compiled(
        envoy=Snapshot(Resource.of(type_url, name, message) for type_url, name, message in envoy),
        router=Snapshot(Resource.of(POLICY, policy.name, policy) for policy in policies),
    )


def _for_envoys(mesh: Mesh, options: Options) -> Iterator[tuple[str, str, Message]]:
    for cluster in compile_clusters(mesh, router_socket=options.router_socket):
        yield CLUSTER, cluster.name, cluster
    for assignment in compile_endpoints(mesh):
        yield ENDPOINT, assignment.cluster_name, assignment
    routes = compile_routes(mesh, split_address(options.gateway.listen)[1])
    yield ROUTE, routes.name, routes
    gateway = compile_gateway(options.gateway)
    yield LISTENER, gateway.name, gateway
