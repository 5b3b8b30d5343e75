"""Load: runs `genserve.cli.load_generator` in a separate process.

    python benchmarks/load.py --port 8000 --model smollm2 --concurrency 32 --requests 64

prints one JSON object: raw times in seconds, for `serving.py` to summarise.
"""

from __future__ import annotations

import argparse
import json

from genserve.cli.load_generator import APIS, Load, LoadResult, run_load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--api", choices=APIS, default="chat")
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--requests", dest="num_requests", type=int, default=4)
    parser.add_argument("--answers", dest="num_answers", type=int, help="stop after this number of answers")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--prompt-words", type=int, default=32)
    parser.add_argument("--shared-words", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-keep-alive", dest="keep_alive", action="store_false")
    parser.add_argument("--extra", type=json.loads, default={}, help="additional fields of the body, as JSON")
    measured = run_load(Load(**vars(parser.parse_args())))
    print(json.dumps({name: getattr(measured, name) for name in LoadResult.__slots__}))


if __name__ == "__main__":
    main()
