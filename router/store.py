"""The policies that are in force, as updates come and encoders change. No I/O.

``current`` is one immutable set that an update replaces in a single assignment; an update that is refused leaves
everything as it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from router.errors import EncoderMismatchError
from router.policy import Policy, PolicySet, check_encoder, parse

__all__ = ["PolicyStore"]


class PolicyStore:
    """Policies by resource name, and the identity of the encoder that runs here, once it is known."""

    def __init__(self) -> None:
        self.current = PolicySet()
        self.refused_for_encoder = False
        """Whether an update was refused because of the encoder: with another encoder it would be welcome."""
        self._by_name: dict[str, Policy] = {}
        self._encoder: tuple[str, int] | None = None

    @property
    def encoder(self) -> tuple[str, int] | None:
        """Fingerprint and dimension of the encoder, None while it is not known."""
        return self._encoder

    def apply(self, changed: Mapping[str, bytes], removed: Iterable[str] = ()) -> None:
        """Take an update as a whole, or refuse it as a whole.

        Args:
            changed: Serialised SemanticPolicy messages by resource name.
            removed: Names that are no more.

        Raises:
            PolicyError: A policy can't be used, or was computed with another encoder; what is in force stays.
        """
        gone = frozenset(removed)
        kept = {name: policy for name, policy in self._by_name.items() if name not in gone}
        fresh = {name: parse(name, body) for name, body in changed.items()}
        if self._encoder:
            try:
                for policy in fresh.values():
                    check_encoder(policy, *self._encoder)
            except EncoderMismatchError:
                self.refused_for_encoder = True
                raise
        by_name = kept | fresh
        self.current = PolicySet(by_name.values())  # raises before anything is changed
        self._by_name = by_name
        self.refused_for_encoder = False

    def encoder_is(self, fingerprint: str, dimension: int) -> list[EncoderMismatchError]:
        """Note which encoder runs; return what is wrong with the policies that were accepted before it was known.

        Those stay in force: requests then take their default routes, which is better than none.
        """
        self._encoder = (fingerprint, dimension)
        wrong = []
        for policy in self.current.policies:
            try:
                check_encoder(policy, fingerprint, dimension)
            except EncoderMismatchError as error:
                wrong.append(error)
        return wrong
