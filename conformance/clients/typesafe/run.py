"""typesafe: the SDK of System One, over /v1/systemone."""

import asyncio

from rows import MODEL, URL, expect, main, row
from typesafe_sdk import (
    AsyncTypeSafeClient,
    Choice,
    Noul,
    Score,
    TypeSafeBadRequestError,
    TypeSafeClient,
    TypeSafeNotFoundError,
)

OPTIONS = {"api_key": "none", "base_url": URL, "model": MODEL}
client = TypeSafeClient(**OPTIONS)
STATE = {"message": "I was charged twice. Please help."}
TEAM = Choice(instructions="Who answers it?", criteria={"billing": "money", "delivery": None})
BILLING = Noul(instructions="Is it about billing?", criteria={"true": "It mentions a charge."})
URGENCY = Score(instructions="How urgent is it?", criteria=["can wait", "this week", "today"])
QUESTIONS = {"team": TEAM, "billing": BILLING, "urgency": URGENCY}


@row("choice")
def choice():
    answer = client.system_one(STATE, {"team": TEAM}).choices["team"]
    expect(answer.choice in TEAM.criteria and 0 <= answer.confidence <= 1, f"{answer}")
    expect(abs(sum(answer.probabilities.values()) - 1) < 1e-6, f"{answer.probabilities}")


@row("noul")
def noul():
    answer = client.system_one(STATE, {"billing": BILLING}).nouls["billing"]
    expect(0 <= answer.noul <= 1, f"{answer}")


@row("score")
def score():
    answer = client.system_one(STATE, {"urgency": URGENCY}).scores["urgency"]
    expect(0 <= answer.score <= 2 and len(answer.probabilities) == 3, f"{answer}")
    expect([*answer.legend.values()] == [*URGENCY.criteria], f"{answer.legend}")


@row("several questions")
def several_questions():
    response = client.system_one("A short letter.", QUESTIONS)
    expect(response.answers.keys() == QUESTIONS.keys(), f"{response.answers}")
    expect(response.model == MODEL and response.usage.input_tokens > 0, f"{response}")


@row("async")
def asynchronous():
    async def ask():
        async with AsyncTypeSafeClient(**OPTIONS) as asked:
            return await asked.system_one(STATE, QUESTIONS)

    expect(asyncio.run(ask()).answers.keys() == QUESTIONS.keys(), "no answers")


@row("errors")
def errors():
    for fields, kind in (
        ({"questions": {"urgency": Score(criteria=["only one"])}}, TypeSafeBadRequestError),
        ({"questions": QUESTIONS, "model": "no-such-model"}, TypeSafeNotFoundError),
    ):
        try:
            client.system_one(STATE, **fields)
        except kind:
            continue
        expect(condition=False, detail=f"{fields} was not rejected with {kind.__name__}")


main()
