// openai: the library of OpenAI for JavaScript.

import OpenAI from "openai";
import { zodFunction, zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";
import { MODEL, URL_OF_SERVER, expect, expectText, main, row } from "./rows.mjs";

const client = new OpenAI({ baseURL: `${URL_OF_SERVER}/v1`, apiKey: "none", maxRetries: 0 });
const HELLO = [{ role: "user", content: "Say hello to Ada." }];
const WEATHER = [{ role: "user", content: "What is the weather in Paris?" }];
const PARAMETERS = {
  type: "object",
  properties: { city: { type: "string", maxLength: 30 }, unit: { enum: ["celsius", "fahrenheit"] } },
  required: ["city", "unit"],
  additionalProperties: false,
};
const FUNCTION = { name: "get_weather", description: "The weather of a city.", parameters: PARAMETERS };
const TOOLS = [{ type: "function", function: FUNCTION }];
const Continent = z.enum(["Africa", "America", "Asia", "Europe"]);
const City = z.object({ name: z.string().max(30), continent: Continent });

function checkCall(call) {
  expect(call.function.name === "get_weather", `the call is of ${call.function.name}`);
  const read = JSON.parse(call.function.arguments);
  expect(["celsius", "fahrenheit"].includes(read.unit), `the arguments are ${call.function.arguments}`);
  return call.function.arguments;
}

row("models", async () => {
  const listed = [];
  for await (const model of client.models.list()) listed.push(model.id);
  expect(listed.includes(MODEL), `models.list() has ${listed}`);
});

row("chat", async () => {
  const answer = await client.chat.completions.create({ model: MODEL, messages: HELLO, max_tokens: 16 });
  expect(answer.choices[0].message.content, "the answer is empty");
  expect(answer.usage.total_tokens > 0, "no usage");
});

row("chat, stream helper", async () => {
  const stream = client.chat.completions.stream({
    model: MODEL, messages: HELLO, max_tokens: 16, stream_options: { include_usage: true },
  });
  let text = "";
  stream.on("content", (delta) => (text += delta));
  const message = await stream.finalMessage();
  expect(text && text === message.content, `the deltas are ${text}, the message ${message.content}`);
  expect((await stream.totalUsage()).completion_tokens > 0, "no usage");
});

row("chat, aborted", async () => {
  const stream = await client.chat.completions.create({ model: MODEL, messages: HELLO, stream: true });
  for await (const chunk of stream) {
    expect(chunk.object === "chat.completion.chunk", `the object is ${chunk.object}`);
    break;
  }
});

row("tools, required", async () => {
  const answer = await client.chat.completions.create({
    model: MODEL, messages: WEATHER, tools: TOOLS, tool_choice: "required", max_tokens: 256,
  });
  expect(answer.choices[0].finish_reason === "tool_calls", `finish: ${answer.choices[0].finish_reason}`);
  return checkCall(answer.choices[0].message.tool_calls[0]);
});

row("tools, stream helper", async () => {
  const stream = client.chat.completions.stream({
    model: MODEL, messages: WEATHER, tools: TOOLS, tool_choice: "required", max_tokens: 256,
  });
  let done = null;
  stream.on("tool_calls.function.arguments.done", (event) => (done = event));
  const message = await stream.finalMessage();
  expect(done?.name === "get_weather", "no event for the arguments");
  return checkCall(message.tool_calls[0]);
});

row("tools, runTools", async () => {
  let asked = null;
  const runner = client.chat.completions.runTools({
    model: MODEL, messages: WEATHER, max_tokens: 256,
    tools: [
      { type: "function", function: { ...FUNCTION, parse: JSON.parse, function: (read) => {
        asked = read;
        return "18 degrees and sunny";
      } } },
    ],
  }, { maxChatCompletions: 3 });
  const text = await runner.finalContent().catch((error) => {
    expectText(asked, `no call: ${error.message}`);
    throw error;
  });
  expectText(asked, "no call");
  expectText(text.includes("18 degrees"), `the answer is ${text}`);
});

row("tools, zodFunction", async () => {
  const tool = zodFunction({ name: "get_weather", parameters: z.object({ city: z.string().max(30) }) });
  const answer = await client.chat.completions.parse({
    model: MODEL, messages: WEATHER, tools: [tool], tool_choice: "required", max_tokens: 256,
  });
  const read = answer.choices[0].message.tool_calls[0].function.parsed_arguments;
  expect(typeof read.city === "string", `the arguments are ${JSON.stringify(read)}`);
});

row("structured output, parsed", async () => {
  const answer = await client.chat.completions.parse({
    model: MODEL, messages: WEATHER, response_format: zodResponseFormat(City, "city"), max_tokens: 256,
  });
  expect(answer.choices[0].message.parsed?.continent, "no continent");
  return JSON.stringify(answer.choices[0].message.parsed);
});

row("responses", async () => {
  const answer = await client.responses.create({ model: MODEL, input: "Say hello.", max_output_tokens: 16 });
  expect(answer.output_text, "the answer is empty");
});

row("responses, stream helper", async () => {
  const stream = client.responses.stream({ model: MODEL, input: "Say hello.", max_output_tokens: 16 });
  let text = "";
  stream.on("response.output_text.delta", (event) => (text += event.delta));
  const answer = await stream.finalResponse();
  expect(text && text === answer.output_text, `the deltas are ${text}, the text ${answer.output_text}`);
});

row("responses, tools", async () => {
  const tools = [{ type: "function", ...FUNCTION, strict: true }];
  const options = { model: MODEL, tools, max_output_tokens: 256 };
  const asked = await client.responses.create({
    ...options, input: "What is the weather in Paris?", tool_choice: "required",
  });
  const call = asked.output.find((item) => item.type === "function_call");
  expect(call?.name === "get_weather", `the output is ${JSON.stringify(asked.output)}`);
  JSON.parse(call.arguments);
  const answer = await client.responses.create({
    ...options, previous_response_id: asked.id, tool_choice: "none",
    input: [{ type: "function_call_output", call_id: call.call_id, output: "18 degrees and sunny" }],
  });
  expectText(answer.output_text.includes("18 degrees"), `the answer is ${answer.output_text}`);
});

row("responses, parsed", async () => {
  const answer = await client.responses.parse({
    model: MODEL, input: "A city?", text: { format: zodTextFormat(City, "city") }, max_output_tokens: 256,
  });
  expect(answer.output_parsed?.continent, "no continent");
});

row("errors", async () => {
  const error = await client.chat.completions
    .create({ model: "nobody", messages: HELLO })
    .catch((raised) => raised);
  expect(error instanceof OpenAI.NotFoundError, `the error is ${error}`);
  expect(error.code, "no code");
});

await main();
