"""Names of compiled clusters: stable, since metrics, logs and policies carry them.

``SERVICE``, ``SERVICE/SUBSET``, and either with ``@TIER`` for the requests of a tier. Names of documents hold neither
«/» nor «@», so no two things get the same name.
"""

from __future__ import annotations

__all__ = ["cluster_name"]


def cluster_name(service: str, subset: str | None = None, tier: str | None = None) -> str:
    """Return the name of the cluster of a service or subset, for all requests or for those of a tier."""
    name = f"{service}/{subset}" if subset else service
    return f"{name}@{tier}" if tier else name
