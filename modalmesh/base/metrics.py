"""The registry of Prometheus metrics of this process, and its scrape endpoint.

Why a registry of our own: prometheus-client's default one carries process and platform collectors that differ between
machines, and tests want an empty one. Names begin with ``modalmesh_``; labels come from an allow-list of the module
that owns the metric.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, start_http_server

from modalmesh.base.errors import MachineError

__all__ = ["REGISTRY", "serve"]

REGISTRY = CollectorRegistry()


def serve(port: int) -> None:
    """Serve the registry on 127.0.0.1 (HTTP/1.1, a named exception); port 0: don't.

    Raises:
        MachineError: The port is taken.
    """
    if not port:
        return
    try:
        start_http_server(port, addr="127.0.0.1", registry=REGISTRY)
    except OSError as error:
        raise MachineError(
            f"metrics port {port} can't be opened: {error.strerror}",
            hint="choose another with MODALMESH_METRICS__CONTROLPLANE, …__ROUTER or …__ENCODER",
        ) from error
