"""Render chart: renders charts/genserve into charts/manifests/, for `kubectl apply` without Helm.

    python scripts/render_chart.py              # write
    python scripts/render_chart.py --check      # exit 1 if a file is out of date

charts/manifests/values.yaml has the values. Helm's own library renders, from the package helm-python-sdk.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import yaml

CHARTS = Path(__file__).parents[1] / "charts"
MANIFESTS = CHARTS / "manifests"
_HEADER = "# Written by `make manifests` from charts/genserve with charts/manifests/values.yaml.\n"
_NOT_RENDERED = ("kustomization.yaml", "values.yaml")
# Labels of Helm releases, which do not apply to plain manifests.
_LABELS_OF_HELM = ("helm.sh/chart:", "app.kubernetes.io/managed-by:")


def main() -> int:
    """Write the files, or check them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    rendered = render_manifests()
    written = [path for path in MANIFESTS.glob("*.yaml") if path.name not in _NOT_RENDERED]
    stale = [path for path in written if path.name not in rendered]
    outdated = [
        path
        for name, text in rendered.items()
        if not (path := MANIFESTS / name).exists() or path.read_text(encoding="utf-8") != text
    ]
    if check:
        for path in [*stale, *outdated]:
            print(f"{path.relative_to(CHARTS.parent)} is out of date: run `make manifests`", file=sys.stderr)
        return 1 if stale or outdated else 0
    for path in stale:
        path.unlink()
    for path in outdated:
        path.write_text(rendered[path.name], encoding="utf-8")
    return 0


def render_manifests() -> dict[str, str]:
    """Return the text of each manifest, by the name of its file."""
    from helm_python import Chart

    values = yaml.safe_load((MANIFESTS / "values.yaml").read_text(encoding="utf-8"))
    with Chart.load(CHARTS / "genserve") as chart:
        rendered = chart.render(values, name="genserve")
    return {
        Path(name).name: _HEADER + _plain(text)
        for name, text in rendered.items()
        if name.endswith(".yaml") and text.strip()
    }


def _plain(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if not line.strip().startswith(_LABELS_OF_HELM)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
