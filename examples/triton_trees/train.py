"""Trains gradient-boosted trees with scikit-learn, and writes them as models/risk/1/model.onnx.

    pip install scikit-learn==1.9.1 skl2onnx==1.20.0
    python examples/triton_trees/train.py
"""

from pathlib import Path

import numpy as np
from skl2onnx import to_onnx
from sklearn.ensemble import GradientBoostingClassifier

MODEL = Path(__file__).parent / "models" / "risk" / "1" / "model.onnx"

# Tickets of customers: hours that they wait, messages so far, tickets of the last year, and whether they pay.
rng = np.random.default_rng(0)
features = np.column_stack(
    [rng.exponential(12, 4000), rng.poisson(3, 4000), rng.poisson(2, 4000), rng.integers(0, 2, 4000)]
).astype(np.float32)
odds = 0.08 * features[:, 0] + 0.5 * features[:, 1] + 0.3 * features[:, 2] + 1.2 * features[:, 3] - 4.5
leaves = rng.random(4000) < 1 / (1 + np.exp(-odds))

trees = GradientBoostingClassifier(n_estimators=40, max_depth=3, random_state=0)
trees.fit(features[:3000], leaves[:3000])
print(f"right for {trees.score(features[3000:], leaves[3000:]):.0%} of the tickets that it has not seen")
graph = to_onnx(trees, features[:1], options={"zipmap": False})    # a tensor, not a list of dicts
MODEL.write_bytes(graph.SerializeToString())
