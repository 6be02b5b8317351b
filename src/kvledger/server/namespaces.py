"""Descriptors of the namespaces seen, and which one is nearest to which. Pure, and bounded.

"Why does this engine find nothing?" is answered here: the namespace nearest to its own, and the
fields in which the two differ.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvledger.naming import DISPLAY_PREFIX, Descriptor, NamespaceId, differing_fields

MAX_DESCRIPTORS = 256
"""Older ones are forgotten (the namespace itself goes on); a comparison costs some microseconds."""


@dataclass(slots=True)
class Known:
    """One namespace and its nearest neighbour.

    Attributes:
        descriptor: all its fields.
        nearest: the namespace that differs in the fewest fields; None while it is alone.
        fields: those fields.
    """

    descriptor: Descriptor
    nearest: NamespaceId | None = None
    fields: tuple[str, ...] = ()

    @property
    def display(self) -> dict[str, str]:
        """Fields for people, without their prefix."""
        return {
            name.removeprefix(DISPLAY_PREFIX): value
            for name, value in self.descriptor.items()
            if name.startswith(DISPLAY_PREFIX)
        }


class NamespaceDirectory:
    """See the module."""

    def __init__(self) -> None:
        self._known: dict[NamespaceId, Known] = {}

    def add(self, namespace: NamespaceId, descriptor: Descriptor) -> Known:
        """Remember a namespace (again: as the latest); compares it with all others once."""
        known = self._known.pop(namespace, None)
        if known is None:
            known = Known(descriptor)
            for other, other_known in self._known.items():
                fields = tuple(differing_fields(descriptor, other_known.descriptor))
                _bring_nearer(known, other, fields)
                _bring_nearer(other_known, namespace, fields)
        self._known[namespace] = known
        if len(self._known) > MAX_DESCRIPTORS:
            self._forget(next(iter(self._known)))
        return known

    def get(self, namespace: NamespaceId) -> Known | None:
        """What is known of a namespace; None if it has been forgotten."""
        return self._known.get(namespace)

    def _forget(self, namespace: NamespaceId) -> None:
        del self._known[namespace]
        for known in self._known.values():
            if known.nearest == namespace:
                known.nearest, known.fields = None, ()


def _bring_nearer(known: Known, other: NamespaceId, fields: tuple[str, ...]) -> None:
    if known.nearest is None or len(fields) < len(known.fields):
        known.nearest, known.fields = other, fields
