"""Record: asks a real Triton server everything that scenarios/ has, and writes exchanges/.

A real server comes from the PyPI package nvidia-pytriton (its tritonserver binary with the python
backend; see the package's own `pytriton/tritonserver` folder) or from NVIDIA's container. For each
run of runs.py, lay out its repository and start the server with its flags:

    python -m tests.conformance.triton.record --lay-out all ./repository     # prints the flags
    tritonserver --model-repository ./repository FLAGS
    python -m tests.conformance.triton.record --run all

The server should be a fresh one without byte code caches (PYTHONDONTWRITEBYTECODE=1): caches that
appear in a version's folder look like a new model to it. Recording twice gives the same files.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from tests.conformance.triton.conversation import Addresses, Conversation, last_of_settled
from tests.conformance.triton.counts import counts_of, difference
from tests.conformance.triton.exchange import Exchange, Topic
from tests.conformance.triton.runs import RUNS, lay_out
from tests.conformance.triton.scenarios import TOPICS


def main() -> None:
    """Parse the command line and do what it says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--http", default="localhost:8000")
    parser.add_argument("--grpc", default="localhost:8001")
    parser.add_argument("--metrics", default="localhost:8002")
    parser.add_argument("--run", choices=RUNS, help="the run that the server was started for")
    parser.add_argument("--topic", action="append", help="only this one of the run; repeatable")
    parser.add_argument("--lay-out", nargs=2, metavar=("RUN", "DIRECTORY"))
    arguments = parser.parse_args()
    if arguments.lay_out:
        run, directory = RUNS[arguments.lay_out[0]], Path(arguments.lay_out[1])
        lay_out(run, directory)
        print(*run.flags())
        return
    addresses = Addresses(http=arguments.http, grpc=arguments.grpc, metrics=arguments.metrics)
    with Conversation(addresses) as conversation:
        for topic in TOPICS:
            if topic.run == arguments.run and topic.name in (arguments.topic or [topic.name]):
                record(topic, conversation)


def record(topic: Topic, conversation: Conversation) -> None:
    """Write what the server answers to the exchanges of one topic."""
    exchanges = tuple(answered(exchange, conversation) for exchange in topic.exchanges)
    replace(topic, exchanges=exchanges).save(server=RUNS[topic.run].options())
    print(f"{topic.name}: {len(exchanges)}")


def answered(exchange: Exchange, conversation: Conversation) -> Exchange:
    """The exchange with the answers and the counts of the server."""
    try:
        return _answered(exchange, conversation)
    except Exception as error:
        error.add_note(f"in the exchange {exchange.name}")
        raise


def _answered(exchange: Exchange, conversation: Conversation) -> Exchange:
    before = last_of_settled(lambda: counts_of(conversation, exchange.counted)) if exchange.counted else {}
    answers = conversation.hold(exchange.steps)
    after = last_of_settled(lambda: counts_of(conversation, exchange.counted)) if exchange.counted else {}
    return replace(
        exchange,
        steps=tuple(
            replace(step, expect=answer) for step, answer in zip(exchange.steps, answers, strict=True)
        ),
        counts=difference(before, after),
    )


if __name__ == "__main__":
    main()
