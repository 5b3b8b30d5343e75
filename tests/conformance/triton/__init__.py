"""Conformance with Triton: exchanges recorded from the real server, replayed against genserve.

    models/         the model repository that both serve
    scenarios/      the requests, one module per topic
    record.py       sends them to a running Triton and writes exchanges/
    exchanges/      what it answered, one file per topic
    differences.py  where genserve answers otherwise on purpose, and why
    replay.py       sends them again and compares; test_replay.py does so with genserve

An exchange is a name and a list of steps; a step is a request and the expected answer. What each
of them looks like is told in exchange.py.
"""
