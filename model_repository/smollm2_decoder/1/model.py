"""Decoder stage: picks the next token from the logits. Edit it: it is yours.

`decode` is one coroutine per token sequence. Sequences that wait at the same time share one forward of the
model, so a loop that looks as if it ran alone is batched with all others.
"""


class TritonPythonModel:
    async def decode(self, sequence):
        # `sample` follows the request (temperature, top_p, penalties ...), in one pass for all that wait.
        while not sequence.finished:
            sequence.append(await sequence.sample())

    # Your own rule, here greedy:
    #
    #     while not sequence.finished:
    #         logits = await sequence.logits()   # [vocab] float32, a view, valid until the next await
    #         sequence.append(int(logits.argmax()))
