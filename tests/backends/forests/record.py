"""Records the forests of `test_fil.py`, with the predictions of the libraries that trained them.

    pip install xgboost-cpu lightgbm && python tests/backends/forests/record.py

`predictions.json` has the rows of features, of which one lacks a value, and the predictions by model.
"""

from __future__ import annotations

import json
from pathlib import Path

import lightgbm
import numpy as np
import xgboost

FOLDER = Path(__file__).parent
NUM_ROWS, NUM_FEATURES = 30, 4


def main() -> None:
    rows = np.random.default_rng(0).normal(size=(NUM_ROWS, NUM_FEATURES)).astype(np.float32).round(3)
    rows[3, 1] = np.nan
    sums = np.nan_to_num(rows).sum(axis=1)
    is_positive, thirds = (sums > 0).astype(int), np.digitize(sums, [-1, 1])
    objectives = {
        "xgboost.json": ({"objective": "binary:logistic"}, is_positive),
        "xgboost.ubj": ({"objective": "multi:softprob", "num_class": 3}, thirds),
    }
    predictions: dict[str, list[float] | list[list[float]]] = {}
    for name, (objective, labels) in objectives.items():
        data = xgboost.DMatrix(rows, label=labels)
        booster = xgboost.train({"max_depth": 2, **objective}, data, num_boost_round=2)
        booster.save_model(FOLDER / name)
        predictions[name] = booster.predict(data).tolist()
    options = {"objective": "regression", "num_leaves": 4, "min_data_in_leaf": 5, "verbose": -1}
    forest = lightgbm.train(options, lightgbm.Dataset(rows, label=sums), num_boost_round=2)
    forest.save_model(FOLDER / "model.txt")
    predictions["model.txt"] = forest.predict(rows).tolist()
    recorded = {"rows": np.where(np.isnan(rows), None, rows).tolist(), "predictions": predictions}
    (FOLDER / "predictions.json").write_text(json.dumps(recorded))


if __name__ == "__main__":
    main()
