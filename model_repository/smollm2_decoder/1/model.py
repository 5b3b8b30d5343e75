"""Decoder stage: how the next token is picked from the logits. Edit it: it is yours.

`decode` is one coroutine per token sequence. All that wait at the same time share one forward of the model,
so a loop that looks like it runs alone is batched with everybody else's.
"""


class TritonPythonModel:
    async def decode(self, sequence):
        # `sample` follows the request (temperature, top_p, penalties ...), in one pass for all who wait.
        while not sequence.finished:
            sequence.append(await sequence.sample())

    # A rule of your own, here greedy:
    #
    #     while not sequence.finished:
    #         logits = await sequence.logits()   # [vocab] float32, a view, valid until the next await
    #         sequence.append(int(logits.argmax()))
