"""Decoder stage: how tokens follow from the logits. Edit it: it is yours.

Without a `decode` of its own, each token is sampled as the request asks (temperature, top_p, penalties ...),
in one pass for all sequences that wait at the same time.
"""


class TritonPythonModel:
    """A place for plug-ins, and for a decoding loop of your own."""

    # One coroutine per token sequence. Sequences that wait at the same time share one forward of the model,
    # so a loop that looks as if it ran alone is batched with all others. Here a greedy one:
    #
    # async def decode(self, sequence):
    #     while not sequence.finished:
    #         logits = await sequence.logits()   # [vocab] float32, a view, valid until the next await
    #         sequence.append(int(logits.argmax()))
