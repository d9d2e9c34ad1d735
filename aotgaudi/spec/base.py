"""The base of every value of a spec."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import SerializerFunctionWrapHandler, model_serializer

from aotgaudi.document import Value


class SpecValue(Value):
    """A value that the user writes.

    `ABSENT_BY_DEFAULT` names the fields that JSON leaves out while they have their default. Put a new field there, so that
    a spec that does not use it keeps its manifest id and its program keys.
    """

    ABSENT_BY_DEFAULT: ClassVar[frozenset[str]] = frozenset()

    @model_serializer(mode="wrap")
    def _without_absent(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        values: dict[str, Any] = serialize(self)
        for name in self.ABSENT_BY_DEFAULT:
            if getattr(self, name) == type(self).model_fields[name].get_default(call_default_factory=True):
                values.pop(name, None)
        return values
