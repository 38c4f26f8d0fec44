"""Both bootstraps bring a stock Envoy up, and it counts as ready when it is configured and not before."""

from __future__ import annotations

import asyncio
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest

from controlplane import bootstrap
from controlplane.envoy_binary import find_envoy
from controlplane.server import tls_of
from modalmesh.base.settings import Envoy, Settings, Xds
from modalmesh.launcher.envoy_admin import configured
from tests.e2e.test_envoy_ads import cluster, endpoints, listener, routes, until
from xds.server import AdsServer
from xds.snapshot import Snapshot

pytestmark = pytest.mark.e2e


@pytest.fixture(params=["zstd", "plain", "zstd over TLS"])
def settings(request: pytest.FixtureRequest, short_dir: Path, certificates: Path) -> Settings:
    kind: Literal["zstd", "plain"] = "plain" if request.param == "plain" else "zstd"
    xds = Xds(listen=f"unix:{short_dir}/cp.sock")
    if request.param == "zstd over TLS":
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        ca = certificates / "ca.pem"
        xds = Xds(
            listen=f"127.0.0.1:{port}",
            certificate=certificates / "server.pem",
            key=certificates / "server.key",
            client_ca=ca,
            ca=ca,
            client_certificate=certificates / "client.pem",
            client_key=certificates / "client.key",
        )
    return Settings(runtime_dir=short_dir, xds=xds, envoy=Envoy(xds=kind))


@pytest.fixture
def envoy(settings: Settings) -> Iterator[Path]:
    path = settings.runtime_dir / "bootstrap.json"
    bootstrap.write(settings, path)
    binary = find_envoy(settings.envoy.binary)
    command = [str(binary), "-c", str(path), "--concurrency", "1", "--use-dynamic-base-id", "--log-level", "error"]
    with subprocess.Popen(command) as process:
        yield settings.envoy_admin_socket
        process.kill()


async def test_ready_means_configured(settings: Settings, envoy: Path) -> None:
    own = 1 if settings.envoy.xds == "zstd" else 0

    def ready() -> bool:
        return configured(envoy, own_listeners=own)

    await until(envoy.is_socket)
    await asyncio.sleep(0.5)
    assert not await asyncio.to_thread(ready)  # there is no control plane
    server = AdsServer(settings.xds.listen, lambda _: "envoy", tls=tls_of(settings))
    await server.start()
    try:
        resources = [cluster("a"), endpoints("a", 9001), listener(settings.runtime_dir / "in.sock"), routes("a")]
        server.set_snapshot("envoy", Snapshot(resources))
        await until(ready, 20.0)
        (client,) = server.clients()
        assert client.encoding == ("zstd" if own else "identity")
    finally:
        await server.close()
