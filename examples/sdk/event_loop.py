"""genserve's SDK in an event loop: a stream, while other requests run."""

import asyncio
import os

from genserve import AsyncClient

URL = os.environ.get("GENSERVE_URL", "http://127.0.0.1:8000")


async def main():
    async with AsyncClient(URL) as client:
        others = [client.generate(f"{number} and {number} is", max_tokens=8) for number in range(4)]
        running = asyncio.gather(*others)
        async with client.stream("The sea is", max_tokens=16, temperature=0.7, seed=1) as stream:
            async for text in stream.text_stream:
                print(text, end="", flush=True)
        print()
        for answer in await running:
            print(answer.text)


asyncio.run(main())
