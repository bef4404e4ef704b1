"""In which fields things differ."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

Document = dict[str, Any]


def differing(fields: Mapping[str, Mapping[str, Any]]) -> list[Document]:
    """The fields in which flat documents differ, `{"field": …, "values": {"A": …}}`; where a document lacks the field,
    its key is missing.
    """
    names = dict.fromkeys(name for own in fields.values() for name in own)
    rows: list[Document] = [
        {"field": name, "values": {key: own[name] for key, own in fields.items() if name in own}} for name in names
    ]
    return [row for row in rows if len(row["values"]) < len(fields) or distinct(row["values"].values()) > 1]


def distinct(values: Iterable[Any]) -> int:
    """How many of some JSON values are different."""
    return len({json.dumps(value, sort_keys=True) for value in values})
