"""What the router counts and says: metrics, and a limit on log lines.

Labels come from two enumerations (``Reason``, ``Modality``), so their number is bounded whatever clients send.
"""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from modalmesh.base.metrics import REGISTRY

__all__ = ["ACTIVE", "DECISIONS", "DECISION_SECONDS", "POLICIES", "POLICY_UPDATES", "LogLimit"]

DECISIONS = Counter(
    "modalmesh_router_decisions",
    "Requests decided, by reason and modality.",
    ["reason", "modality"],
    registry=REGISTRY,
)
DECISION_SECONDS = Histogram(
    "modalmesh_router_decision_seconds",
    "Time from a request's body to the answer, the encoder's part included.",
    ["modality"],
    # From a named model (tens of microseconds) to the encoder's time limit.
    buckets=(0.0001, 0.0005, 0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5),
    registry=REGISTRY,
)
ACTIVE = Gauge("modalmesh_router_active_requests", "Requests that Envoy has open here.", registry=REGISTRY)
POLICIES = Gauge("modalmesh_router_policies", "Policies in force.", registry=REGISTRY)
POLICY_UPDATES = Counter(
    "modalmesh_router_policy_updates", "Updates of policies, by result.", ["result"], registry=REGISTRY
)


class LogLimit:
    """Lets one line for each subject through in an interval, and says how many it held back."""

    __slots__ = ("_interval", "_seen")

    def __init__(self, interval: float = 10.0) -> None:
        """Set the limit up.

        Args:
            interval: Seconds between two lines on one subject.
        """
        self._interval = interval
        self._seen: dict[str, tuple[float, int]] = {}

    def pass_through(self, subject: str, now: float) -> int | None:
        """Return how many lines were held back since the last one that passed, None if this one must not pass.

        Args:
            subject: One of a bounded set.
            now: Seconds on a monotonic clock.
        """
        last, held = self._seen.get(subject, (-self._interval, 0))
        if now - last < self._interval:
            self._seen[subject] = (last, held + 1)
            return None
        self._seen[subject] = (now, 0)
        return held
