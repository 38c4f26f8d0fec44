"""What the control plane counts."""

from __future__ import annotations

from prometheus_client import Counter, Gauge

from modalmesh.base.metrics import REGISTRY

__all__ = ["PROBLEMS", "RESOURCES", "UPDATES"]

UPDATES = Counter(
    "modalmesh_controlplane_updates",
    "Updates by result: published, unchanged, refused, without_policies, failed.",
    ("result",),
    registry=REGISTRY,
)
PROBLEMS = Gauge(
    "modalmesh_controlplane_problems", "Problems in the documents as they are now; 0: served.", registry=REGISTRY
)
RESOURCES = Gauge("modalmesh_controlplane_resources", "Resources served, by group.", ("group",), registry=REGISTRY)
