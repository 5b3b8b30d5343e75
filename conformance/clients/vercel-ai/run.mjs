// ai: Vercel's AI SDK, with its default provider (OpenAI's Responses) and with those of other dialects.

import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { MODEL, URL_OF_SERVER, expect, expectText, main, row } from "./rows.mjs";

globalThis.AI_SDK_LOG_WARNINGS = false;
const settings = { baseURL: `${URL_OF_SERVER}/v1`, apiKey: "none" };
const openai = createOpenAI(settings);
const compatible = createOpenAICompatible({
  ...settings, name: "genserve", includeUsage: true, supportsStructuredOutputs: true,
});
const anthropic = createAnthropic(settings);
const MODELS = {
  "default provider": openai(MODEL),
  "openai.chat": openai.chat(MODEL),
  "openai-compatible": compatible(MODEL),
  anthropic: anthropic(MODEL),
};
const Continent = z.enum(["Africa", "America", "Asia", "Europe"]);
const City = z.object({ name: z.string().max(30), continent: Continent });
const OPTIONS = { maxRetries: 0, maxOutputTokens: 256 };

for (const [provider, model] of Object.entries(MODELS)) {
  row(`${provider}: generateText`, async () => {
    const { text, usage } = await generateText({ ...OPTIONS, model, prompt: "Say hello." });
    expect(text, "the answer is empty");
    expect(usage.outputTokens > 0, `the usage is ${JSON.stringify(usage)}`);
  });

  row(`${provider}: streamText`, async () => {
    let failure = null;
    const result = streamText({
      ...OPTIONS, model, prompt: "Say hello.", maxOutputTokens: 16, onError: ({ error }) => (failure = error),
    });
    let text = "";
    for await (const delta of result.textStream) text += delta;
    if (failure) throw failure;
    expect(text, "the answer is empty");
    expect((await result.usage).outputTokens > 0, "no usage");
  });

  row(`${provider}: tools`, async () => {
    let asked = null;
    const weather = tool({
      description: "The weather of a city.",
      inputSchema: z.object({ city: z.string().max(30) }),
      execute: async (read) => {
        asked = read;
        return "18 degrees and sunny";
      },
    });
    const { text } = await generateText({
      ...OPTIONS, model, prompt: "What is the weather in Paris?", tools: { weather },
      stopWhen: stepCountIs(3),
    });
    expectText(asked, `no call: ${text}`);
    expectText(text.includes("18 degrees"), `the answer is ${text}`);
  });

  row(`${provider}: tools, required, streamed`, async () => {
    let failure = null;
    const weather = tool({ inputSchema: z.object({ city: z.string().max(30) }) });
    const result = streamText({
      ...OPTIONS, model, prompt: "What is the weather in Paris?", tools: { weather }, toolChoice: "required",
      onError: ({ error }) => (failure = error),
    });
    const calls = await Promise.resolve(result.toolCalls).catch((error) => {
      throw failure ?? error;
    });
    expect(calls[0]?.toolName === "weather", `the calls are ${JSON.stringify(calls)}`);
    return JSON.stringify(calls[0].input);
  });

  row(`${provider}: structured output`, async () => {
    const { output } = await generateText({
      ...OPTIONS, model, prompt: "Describe a city.", output: Output.object({ schema: City }),
    });
    return JSON.stringify(output);
  });
}

await main();
