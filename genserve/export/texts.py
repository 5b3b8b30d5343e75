"""Texts: what an export runs a model over, to see which numbers it computes with and what it predicts.

They were written for this purpose: prose, dialogue, instructions, code, tables, numbers, other languages. No
sentence of the one is in the other.
"""

from __future__ import annotations

from genserve.prompt import Message

__all__ = ["CALIBRATION", "CALIBRATION_CHAT", "HELD_OUT", "HELD_OUT_CHAT"]

CALIBRATION = """\
The river had been rising since Monday. By Thursday evening it stood two hands below the sill of the mill, and
Anna, who had lived there for forty years, began to carry the flour upstairs. "You should have started
yesterday," said her brother from the doorway. He was right, as he often was, and as always it did not help.
They worked until midnight. The sacks were heavy and the stairs were steep; the lamp kept going out. When the
water finally came under the door, it came slowly and almost politely, like a guest who knows that he is too
early. In the morning the whole valley was a lake, with the tops of the apple trees standing in rows above it.

Photosynthesis takes place in two stages. In the first, light is absorbed by chlorophyll and its energy is
used to split water, which releases oxygen and stores energy in ATP and NADPH. In the second, known as the
Calvin cycle, that energy is used to bind carbon dioxide into sugars. The first stage needs light directly;
the second does not, but it stops soon after the light is gone because its supply of energy runs out.

# Configuration

The service reads its settings from a file and then from the environment; the latter wins.

| name         | default   | meaning                                    |
| ------------ | --------- | ------------------------------------------ |
| `port`       | 8080      | where it listens for connections           |
| `timeout`    | 30.0      | seconds until a request is given up        |
| `log_level`  | "info"    | one of debug, info, warning and error      |

1. Install the package with `pip install .` in a fresh environment.
2. Copy `settings.example.toml` to `settings.toml` and change what you need.
3. Start it: `python -m service --config settings.toml`.

```python
import json
from pathlib import Path


class Inventory:
    \"\"\"Counts what is in stock, by the name of the article.\"\"\"

    def __init__(self, path: Path) -> None:
        self._path = path
        self._counts: dict[str, int] = json.loads(path.read_text()) if path.exists() else {}

    def add(self, article: str, count: int = 1) -> None:
        if count < 1:
            raise ValueError(f"cannot add {count} of {article!r}")
        self._counts[article] = self._counts.get(article, 0) + count

    def save(self) -> None:
        self._path.write_text(json.dumps(self._counts, indent=2, sort_keys=True))
```

SELECT customers.name, COUNT(*) AS orders, SUM(orders.total) AS revenue
FROM customers JOIN orders ON orders.customer_id = customers.id
WHERE orders.placed_at >= '2021-01-01' GROUP BY customers.name HAVING COUNT(*) > 3 ORDER BY revenue DESC;

for (let i = 0; i < rows.length; i++) {
  const { id, title } = rows[i];
  list.append(`<li data-id="${id}">${title.trim()}</li>`);
}

Dear Mr. Okafor,

Thank you for your letter of 12 May. We are sorry that the two chairs arrived with scratches on the legs. A
replacement will leave our warehouse in Leeds on Friday; please leave the damaged ones outside, and the driver
will take them back at no cost to you. As an apology we have refunded the delivery charge of 18.50 pounds.

Yours sincerely,
Margaret Hill, Customer Service

If 3 workers paint 5 rooms in 4 days, then one worker paints 5 / (3 x 4) = 5/12 of a room per day. For 10
rooms in 6 days one needs 10 / (6 x 5/12) = 4 workers. The square root of 2 is about 1.41421, that of 10
about 3.16228; 17 x 23 = 391, 144 / 12 = 12, and 2^16 = 65536. The sum of the first n odd numbers is n^2.

Le marché ouvre à sept heures. On y trouve du pain, des fromages de la région, et parfois un vieil homme qui
vend des montres. Mañana iremos a la playa si no llueve; lleva una toalla y algo de fruta. Der Zug nach
Hamburg fährt heute von Gleis neun ab und hat etwa zwanzig Minuten Verspätung. 東京は今日とても暑いです。
Сегодня хорошая
погода.

Recipe for a simple tomato soup (serves four): heat two spoons of olive oil in a large pot, add one chopped
onion and two cloves of garlic, and cook until soft. Add 800 g of tomatoes, half a litre of stock, salt,
pepper and a pinch of sugar. Simmer for twenty minutes, blend until smooth, and stir in a little cream
before serving. Tip: a slice of old bread, blended with the rest, makes it thicker.

The Treaty of Westphalia, signed in 1648, ended the Thirty Years' War. Historians still argue about what it
meant. For some it is the birth of the modern state; for others it changed little, and the idea was made up
much later by people who needed an old date for a new thing. Both sides agree that the war was terrible: in
parts of Germany more than half of the people died, most of them not in battle but from hunger and disease.

BREAKING: Local team wins 3-2 after extra time! Full report, photos & interviews at 9pm. #football #cupfinal
"Who are you?" asked the cat. "Nobody," said the mouse. "Then nobody will be missed," said the cat, and
smiled.
"""

CALIBRATION_CHAT = (
    Message(role="user", content="Can you explain what a hash table is, in simple words?"),
    Message(
        role="assistant",
        content="Sure! A hash table is a way to store things so that you can find them again very quickly. "
        "Imagine a wall of numbered drawers:\n\n1. **Hashing**: a rule turns the name of a thing into the "
        "number "
        "of a drawer.\n2. **Storing**: you put the thing into that drawer.\n3. **Looking up**: you apply "
        "the same "
        "rule to the name, and open only that drawer.\n\nSometimes two names lead to the same drawer. "
        "This is "
        "called a *collision*; the usual remedy is to keep a short list in each drawer.",
    ),
    Message(role="user", content="Thanks. Write a poem about autumn, and then tell me the capital of Peru."),
    Message(
        role="assistant",
        content="The leaves let go, the light grows thin,\nThe garden folds its colours in.\nA kettle "
        "sings, the "
        "windows grey,\nAnd evening comes at noon today.\n\nThe capital of Peru is Lima.",
    ),
    Message(role="user", content="What are three ways to save money on groceries?"),
    Message(
        role="assistant",
        content="Here are three ways to spend less on groceries:\n\n- Plan your meals for the week and "
        "buy only what "
        "is on your list.\n- Compare the price per kilogram, not the price per package.\n- Buy fruits and "
        "vegetables that are in season, and freeze what you cannot eat in time.\n\nIs there anything else "
        "I can help "
        "you with?",
    ),
)

HELD_OUT = """\
The lighthouse keeper wrote in his book every evening: the height of the tide, the direction of the wind,
and the names of the ships that had passed. On the 14th of March 1897 he counted 23 of them, which was more
than in any year before. "It cannot last," he said to his daughter, who did not believe him. By the summer
of 1903 the harbour had silted up, and the trade had moved 60 miles to the south.

def fibonacci(n: int) -> list[int]:
    numbers = [0, 1]
    while len(numbers) < n:
        numbers.append(numbers[-1] + numbers[-2])
    return numbers[:n]

Water boils at 100 degrees Celsius at sea level; on a mountain of 3000 metres, at about 90. The reason is
the lower pressure of the air. Der Wind dreht nach Norden, und die Fischer bleiben zu Hause. Le phare
éclaire la mer. 海は静か です。 Question: which gas do plants take from the air? Answer: carbon dioxide, from
which, with water and the light of the sun, they make sugar. They give back oxygen, on which all animals
depend.

Volcanoes form where melted rock rises through the crust of the Earth. Most of them stand along the edges of
tectonic plates, where one plate slides under another or where two move apart. Some, like those of Hawaii,
lie far from any edge, above a plume of hot rock that stays in place while the plate moves over it; this is
why the islands form a chain, the oldest of which lies farthest from the fire. An eruption may be gentle,
with lava that flows like honey, or violent, when gas that was dissolved in the melt expands all at once and
blows it into ash.

To change a tire, first stop on level ground, put on the handbrake and switch on the warning lights. Loosen
the nuts of the wheel by half a turn while it still stands on the road. Then lift the car with the jack
until the tire is free, take off the nuts and the wheel, and put on the spare. Tighten the nuts by hand, let
the car down, and tighten them again in the order of a star. Check the pressure as soon as you can.

<html>
  <head><title>Opening hours</title></head>
  <body>
    <p>We are open from <b>Monday</b> to <b>Friday</b>, 9:00 to 17:30, and on Saturday until noon.</p>
  </body>
</html>

The committee met on Tuesday to discuss the budget for the coming year. After a long debate the members
agreed to spend less on printing and more on the library, whose roof has been leaking since the storm in
November. The treasurer reminded everybody that the reserve must not fall below ten thousand dollars. A
proposal to raise the membership fee was rejected by seven votes to four. The next meeting will take place
on the first Monday of September.

Honey bees tell each other where to find food by dancing. A bee that has found a field of flowers comes home
and runs in a figure of eight on the comb; the direction of the middle run shows the angle between the sun
and the field, and its length shows the distance. Other bees follow the dancer in the dark, touch her with
their antennae, and then fly out. Karl von Frisch, who worked this out in the 1940s, was not believed at
first, and received the Nobel Prize for it in 1973.

Once upon a time there was a king who could not sleep. He offered a bag of gold to anyone who could tell him
a story without an end. Many came, and all of them failed, until a shepherd sat down beside his bed and
began to count the sheep that jumped, one after the other, over a very low fence. "And then?" asked the king
after a while. "And then," said the shepherd, "another one jumped." Before the hundredth had reached the
other side, the king was asleep.
"""

HELD_OUT_CHAT = (
    Message(role="user", content="Why is the sky blue?"),
    Message(
        role="assistant",
        content="The sky looks blue because of the way that sunlight is scattered by the air. Sunlight is "
        "made up of "
        "all the colors of the rainbow. When it enters the atmosphere, the molecules of the air scatter "
        "the light "
        "with short wavelengths, such as blue, much more strongly than the light with long wavelengths, "
        "such as red. "
        "As a result, blue light reaches our eyes from every direction.\n\nAt sunset the light travels a "
        "longer way "
        "through the air. Most of the blue is scattered out of the beam, and what is left is red and orange.",
    ),
    Message(role="user", content="Write a Python function that tells whether a word is a palindrome."),
    Message(
        role="assistant",
        content="Here is a function that checks whether a word is a palindrome:\n\n```python\ndef "
        "is_palindrome(word):"
        "\n    word = word.lower()\n    return word == word[::-1]\n```\n\nIt converts the word to lower "
        "case and then "
        "compares it with its reverse. For example, `is_palindrome(\"Level\")` returns `True`.",
    ),
)
