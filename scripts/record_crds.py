"""Record CRDs: the schemas of other projects' resources by which tests/deploy validates examples.

    python scripts/record_crds.py FILE.yaml ...     # CustomResourceDefinitions, of releases of these projects

writes tests/deploy/crds/KIND.json.gz: {"apiVersion": schema, ...}, without the descriptions.
"""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parents[1] / "tests" / "deploy" / "crds"
# Keys to leave out: texts, fields that the API server fills in, and rules in a language of their own.
_LEFT_OUT = ("description", "default", "x-kubernetes-validations")


def main() -> int:
    """Record the files of the command line."""
    for file in sys.argv[1:]:
        for definition in yaml.safe_load_all(Path(file).read_text(encoding="utf-8")):
            if definition:
                _record(definition["spec"])
    return 0


def _record(spec: dict[str, Any]) -> None:
    schemas = {
        f"{spec['group']}/{version['name']}": _reduced(version["schema"]["openAPIV3Schema"])
        for version in spec["versions"]
    }
    text = json.dumps(schemas, separators=(",", ":"), sort_keys=True)
    path = FOLDER / f"{spec['names']['kind']}.json.gz"
    path.write_bytes(gzip.compress(text.encode(), mtime=0))


def _reduced(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_reduced(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    left_out = (*_LEFT_OUT, "properties")
    reduced = {name: _reduced(part) for name, part in schema.items() if name not in left_out}
    if "properties" in schema:      # a property may have a name in _LEFT_OUT
        reduced["properties"] = {field: _reduced(part) for field, part in schema["properties"].items()}
    return reduced


if __name__ == "__main__":
    sys.exit(main())
