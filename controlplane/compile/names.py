"""Names of compiled clusters: stable, since metrics, logs and policies carry them.

``SERVICE``, ``SERVICE/SUBSET``. Names of documents hold no «/», so no two things get the same name.
"""

from __future__ import annotations

__all__ = ["cluster_name"]


def cluster_name(service: str, subset: str | None = None) -> str:
    """Return the name of a service's cluster, or of one of its subsets'."""
    return f"{service}/{subset}" if subset else service
