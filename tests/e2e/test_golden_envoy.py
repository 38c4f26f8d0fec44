"""The real Envoy accepts every golden output, and those of the examples."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from controlplane.envoy_binary import find_envoy
from tests.golden import render
from xds.pb.envoy.config.bootstrap.v3 import bootstrap_pb2
from xds.pb.envoy.config.cluster.v3 import cluster_pb2
from xds.pb.envoy.config.endpoint.v3 import endpoint_pb2
from xds.pb.envoy.config.listener.v3 import listener_pb2
from xds.pb.envoy.config.route.v3 import route_pb2
from xds.pb.envoy.extensions.filters.network.http_connection_manager.v3 import http_connection_manager_pb2 as hcm
from xds.types import CLUSTER, ENDPOINT, LISTENER, ROUTE

pytestmark = pytest.mark.e2e


def static(name: str) -> bytes:
    """A bootstrap, as protobuf, that holds what would come over xDS."""
    found = render.compiled(name).envoy
    bootstrap = bootstrap_pb2.Bootstrap()
    for resource in found.of_type(CLUSTER).values():
        cluster = cluster_pb2.Cluster.FromString(resource.body)
        if cluster.type == cluster_pb2.Cluster.EDS:
            wanted = cluster.eds_cluster_config.service_name or cluster.name
            assignment = endpoint_pb2.ClusterLoadAssignment.FromString(found.of_type(ENDPOINT)[wanted].body)
            cluster.load_assignment.CopyFrom(assignment)
            cluster.ClearField("eds_cluster_config")
            cluster.type = cluster_pb2.Cluster.STATIC
        bootstrap.static_resources.clusters.append(cluster)
    for resource in found.of_type(LISTENER).values():
        listener = listener_pb2.Listener.FromString(resource.body)
        for chain in listener.filter_chains:
            manager = hcm.HttpConnectionManager()
            assert chain.filters[0].typed_config.Unpack(manager)
            routes = found.of_type(ROUTE)[manager.rds.route_config_name].body
            manager.route_config.CopyFrom(route_pb2.RouteConfiguration.FromString(routes))
            chain.filters[0].typed_config.Pack(manager)
        bootstrap.static_resources.listeners.append(listener)
    return bootstrap.SerializeToString()


@pytest.mark.parametrize("name", render.names())
def test_envoy_accepts_it(name: str, tmp_path: Path) -> None:
    path = tmp_path / "bootstrap.pb"
    path.write_bytes(static(name))
    command = [str(find_envoy(None)), "--mode", "validate", "--config-path", str(path), "--log-level", "error"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
