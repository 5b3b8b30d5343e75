// @huggingface/inference: the library of Hugging Face for JavaScript.

import { InferenceClient } from "@huggingface/inference";
import { MODEL, URL_OF_SERVER, expect, expectText, main, row } from "./rows.mjs";

const client = new InferenceClient("hf_none").endpoint(URL_OF_SERVER);
const byModel = new InferenceClient("hf_none", { endpointUrl: URL_OF_SERVER });
const HELLO = [{ role: "user", content: "Say hello to Ada." }];
const WEATHER = [{ role: "user", content: "What is the weather in Paris?" }];
const PARAMETERS = {
  type: "object",
  properties: { city: { type: "string", maxLength: 30 } },
  required: ["city"],
};
const TOOLS = [{ type: "function", function: { name: "get_weather", parameters: PARAMETERS } }];

row("chatCompletion, the endpoint's model", async () => {
  const answer = await client.chatCompletion({ messages: HELLO, max_tokens: 16 });
  expect(answer.choices[0].message.content, "the answer is empty");
});

row("chatCompletion, a model by name", async () => {
  const answer = await byModel.chatCompletion({ model: MODEL, messages: HELLO, max_tokens: 16 });
  expect(answer.choices[0].message.content, "the answer is empty");
});

row("chatCompletionStream", async () => {
  let text = "";
  let finish = null;
  for await (const chunk of client.chatCompletionStream({ messages: HELLO, max_tokens: 16 })) {
    text += chunk.choices[0]?.delta.content ?? "";
    finish = chunk.choices[0]?.finish_reason ?? finish;
  }
  expect(text, "the answer is empty");
  expect(finish === "stop" || finish === "length", `finish_reason is ${finish}`);
});

row("tools", async () => {
  const answer = await client.chatCompletion({
    messages: WEATHER, tools: TOOLS, tool_choice: "required", max_tokens: 256,
  });
  const [call] = answer.choices[0].message.tool_calls;
  expect(call.function.name === "get_weather", `the call is ${JSON.stringify(call)}`);
  return call.function.arguments;
});

row("tools, auto, streamed", async () => {
  let written = "";
  const request = { messages: WEATHER, tools: TOOLS, max_tokens: 256 };
  for await (const chunk of client.chatCompletionStream(request)) {
    for (const call of chunk.choices[0]?.delta.tool_calls ?? []) written += call.function.arguments ?? "";
  }
  expectText(written, "no call");
  JSON.parse(written);
});

row("response_format", async () => {
  const properties = { name: { type: "string", maxLength: 20 } };
  const schema = { type: "object", properties, required: ["name"] };
  const answer = await client.chatCompletion({
    messages: HELLO, max_tokens: 128,
    response_format: { type: "json_schema", json_schema: { name: "person", schema, strict: true } },
  });
  return JSON.parse(answer.choices[0].message.content).name;
});

row("textGeneration", async () => {
  const answer = await client.textGeneration({ inputs: "The sea is", parameters: { max_new_tokens: 8 } });
  expect(answer.generated_text, "the answer is empty");
});

row("textGenerationStream", async () => {
  let text = ""; // the client yields the chunks of /v1/completions as they are
  const request = { inputs: "The sea is", parameters: { max_new_tokens: 8 } };
  for await (const chunk of client.textGenerationStream(request)) text += chunk.choices[0].text;
  expect(text, "the answer is empty");
});

await main();
