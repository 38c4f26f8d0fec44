from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from controlplane.bootstrap import as_json, build, check, write
from controlplane.compile import authored
from controlplane.envoy_binary import EnvoyNotFoundError, find_envoy
from controlplane.errors import Http1Error
from modalmesh.base.settings import Envoy, Settings, Xds


def settings(runtime_dir: Path, listen: str = "127.0.0.1:18000") -> Settings:
    return Settings(runtime_dir=runtime_dir, xds=Xds(listen=listen), envoy=Envoy(node_id="node-7"))


def as_dict(given: Settings) -> Any:
    return json.loads(as_json(build(given)))


def test_the_node_says_what_it_is(tmp_path: Path) -> None:
    assert as_dict(settings(tmp_path))["node"] == {
        "id": "node-7",
        "cluster": "modalmesh",
        "metadata": {"role": "envoy"},
    }


def test_xds_passes_through_the_decompressing_listener(tmp_path: Path) -> None:
    found = as_dict(settings(tmp_path))
    (listener,) = found["staticResources"]["listeners"]
    clusters = {item["name"]: item for item in found["staticResources"]["clusters"]}
    (service,) = found["dynamicResources"]["adsConfig"]["grpcServices"]

    def target(cluster: Any) -> Any:
        return cluster["loadAssignment"]["endpoints"][0]["lbEndpoints"][0]["endpoint"]["address"]

    assert found["dynamicResources"]["adsConfig"]["apiType"] == "DELTA_GRPC"
    assert target(clusters[service["envoyGrpc"]["clusterName"]]) == listener["address"]
    assert listener["address"] == {"pipe": {"path": str(tmp_path / "envoy-xds.sock")}}
    manager = listener["filterChains"][0]["filters"][0]["typedConfig"]
    assert [item["name"].rpartition(".")[2] for item in manager["httpFilters"]] == ["decompressor", "router"]
    (route,) = manager["routeConfig"]["virtualHosts"][0]["routes"]
    assert target(clusters[route["route"]["cluster"]])["socketAddress"]["portValue"] == 18000


@pytest.mark.parametrize(
    ("listen", "kind", "address"),
    [
        ("127.0.0.1:1", "STATIC", {"socketAddress": {"address": "127.0.0.1", "portValue": 1}}),
        ("[::1]:1", "STATIC", {"socketAddress": {"address": "::1", "portValue": 1}}),
        ("localhost:1", "STRICT_DNS", {"socketAddress": {"address": "localhost", "portValue": 1}}),
        ("unix:/run/x.sock", "STATIC", {"pipe": {"path": "/run/x.sock"}}),
    ],
)
def test_the_control_plane_is_reached_where_it_listens(
    tmp_path: Path, listen: str, kind: str, address: dict[str, Any]
) -> None:
    cluster = as_dict(settings(tmp_path, listen))["staticResources"]["clusters"][1]
    assert cluster["type"] == kind
    assert cluster["loadAssignment"]["endpoints"][0]["lbEndpoints"][0]["endpoint"]["address"] == address


def test_the_admin_interface_is_on_a_unix_socket(tmp_path: Path) -> None:
    assert as_dict(settings(tmp_path))["admin"]["address"] == {"pipe": {"path": str(tmp_path / "envoy-admin.sock")}}


def test_an_admin_interface_that_others_could_reach_is_refused(tmp_path: Path) -> None:
    message = build(settings(tmp_path))
    assert message.admin is not None
    message.admin.address = authored.address("10.0.0.1:9901")
    with pytest.raises(Http1Error, match="admin"):
        check(message)


def test_equal_settings_give_equal_bytes(tmp_path: Path) -> None:
    assert as_json(build(settings(tmp_path))) == as_json(build(settings(tmp_path)))


@pytest.mark.e2e
@pytest.mark.parametrize("listen", ["127.0.0.1:18000", "localhost:18000", "unix:/run/x.sock"])
def test_envoy_accepts_it(tmp_path: Path, listen: str) -> None:
    path = tmp_path / "envoy.json"
    write(settings(tmp_path, listen), path)
    command = [str(find_envoy(None)), "--mode", "validate", "--config-path", str(path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    assert "deprecated" not in result.stderr.lower()


def test_an_envoy_that_is_to_look_as_usual_asks_the_control_plane_itself(tmp_path: Path) -> None:
    given = settings(tmp_path).model_copy(update={"envoy": Envoy(xds="plain")})
    found = as_dict(given)
    assert "listeners" not in found["staticResources"]
    (cluster,) = found["staticResources"]["clusters"]
    (service,) = found["dynamicResources"]["adsConfig"]["grpcServices"]
    assert service["envoyGrpc"]["clusterName"] == cluster["name"]
    # Envoy's own limit: it is ready only when it is configured.
    assert "initialFetchTimeout" not in found["dynamicResources"]["cdsConfig"]


def test_the_packaged_envoy_is_found_unless_another_is_configured(tmp_path: Path) -> None:
    assert find_envoy(None).stat().st_size > 10 << 20
    own = tmp_path / "envoy"
    own.write_text("#!/bin/sh\n")
    with pytest.raises(EnvoyNotFoundError, match="not an executable"):
        find_envoy(own)
    own.chmod(0o755)
    assert find_envoy(own) == own


def test_envoy_on_the_path_is_the_last_resort(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("controlplane.envoy_binary._PACKAGE", "no-such-package")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EnvoyNotFoundError) as caught:
        find_envoy(None)
    assert "modalmesh[envoy]" in caught.value.hint
    own = tmp_path / "envoy"
    own.write_text("#!/bin/sh\n")
    own.chmod(0o755)
    assert find_envoy(None) == own
