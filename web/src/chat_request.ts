// The body of a chat request, and the same request as curl and Python.

import { serverUrl } from "./api";
import type { ChatRequest, Conversation, Message } from "./conversation";
import { apiKey, asksProbabilities } from "./preferences";
import type { JsonObject } from "./schema";
import { chatParams, modelOf } from "./state";

const NUM_ALTERNATIVES = 10;

/** Raised before a request, by what the user has typed. */
export class InvalidInput extends Error {}

/** The request that the settings make; throws InvalidInput. */
export function requestOf(conversation: Conversation, prefix = ""): ChatRequest {
  const { system, params, toolChoice } = conversation;
  const tools = readTools(conversation.tools);
  const fields = {
    model: modelOf(conversation),
    ...(prefix ? { continue_final_message: true, add_generation_prompt: false } : {}),
    ...(tools.length ? { tools, tool_choice: readToolChoice(toolChoice) } : {}),
    ...chatParams(conversation),
    seed: newSeed(), // so that the answer can be asked for again
    ...params,
    ...(asksProbabilities.value
      ? { logprobs: true, top_logprobs: NUM_ALTERNATIVES, return_token_ids: true }
      : {}),
    stream: true,
    stream_options: { include_usage: true },
  };
  return { system, prefix, fields };
}

function newSeed(): number {
  return crypto.getRandomValues(new Uint32Array(1))[0] ?? 0;
}

/** The body of a request for an answer to messages. */
export function chatBody({ system, prefix, fields }: ChatRequest, answered: Message[]): JsonObject {
  const messages: JsonObject[] = system.trim() ? [{ role: "system", content: system }] : [];
  messages.push(...answered.map(asSent));
  if (prefix) messages.push({ role: "assistant", content: prefix });
  const { model, ...others } = fields;
  return { model, messages, ...others };
}

function asSent(message: Message): JsonObject {
  if (message.role === "tool") {
    return { role: "tool", tool_call_id: message.toolCallId, content: message.content };
  }
  if (message.role === "user") return { role: "user", content: message.content };
  return {
    role: "assistant",
    content: message.toolCalls?.length && !message.content ? null : message.content,
    ...(message.reasoning ? { reasoning_content: message.reasoning } : {}),
    ...(message.toolCalls?.length ? { tool_calls: message.toolCalls } : {}),
  };
}

/** The tools that were pasted; throws InvalidInput. */
export function readTools(text: string): JsonObject[] {
  if (!text.trim()) return [];
  let tools: unknown;
  try {
    tools = JSON.parse(text);
  } catch (error) {
    throw new InvalidInput(`The tools are not valid JSON: ${(error as Error).message}`);
  }
  const list = Array.isArray(tools) ? tools : [tools];
  if (list.some((tool) => typeof tool !== "object" || tool === null)) {
    throw new InvalidInput("The tools are not a list of functions.");
  }
  // A bare function is what many libraries print.
  return list.map((tool) => (tool.type ? tool : { type: "function", function: tool }));
}

function readToolChoice(choice: string): unknown {
  const isWord = ["auto", "required", "none"].includes(choice);
  return isWord ? choice : { type: "function", function: { name: choice } };
}

/** What is wrong with the tools; empty: nothing. */
export function toolsProblem(text: string): string {
  try {
    readTools(text);
    return "";
  } catch (error) {
    return (error as Error).message;
  }
}

/** The names of the tools; none if they are not valid. */
export function toolNames(text: string): string[] {
  try {
    return readTools(text).map((tool) => String((tool.function as JsonObject | undefined)?.name));
  } catch {
    return [];
  }
}

export function asCurl(body: JsonObject): string {
  const key = apiKey.value ? ` \\\n  -H "Authorization: Bearer $GENSERVE_API_KEY"` : "";
  const json = JSON.stringify(body, null, 2).replaceAll("'", "'\\''");
  const url = `${serverUrl()}v1/chat/completions`;
  return `curl -N ${url} \\\n  -H 'Content-Type: application/json'${key} \\\n  -d '${json}'`;
}

// The arguments of openai-python's `create`; the others go into `extra_body`.
const OF_OPENAI = new Set([
  ...["model", "messages", "stream", "stream_options", "logprobs", "top_logprobs", "temperature", "top_p"],
  ...["max_tokens", "max_completion_tokens", "seed", "stop", "tools", "tool_choice", "response_format"],
  ...["frequency_penalty", "presence_penalty", "logit_bias", "parallel_tool_calls", "n", "user"],
]);

export function asPython(body: JsonObject): string {
  const entries = Object.entries(body);
  const own = entries.filter(([name]) => OF_OPENAI.has(name));
  const extra = Object.fromEntries(entries.filter(([name]) => !OF_OPENAI.has(name)));
  const given = Object.keys(extra).length ? [...own, ["extra_body", extra] as const] : own;
  const key = apiKey.value ? 'os.environ["GENSERVE_API_KEY"]' : '"none"';
  return [
    ...(apiKey.value ? ["import os", ""] : []),
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url="${serverUrl()}v1", api_key=${key})`,
    "stream = client.chat.completions.create(",
    ...given.map(([name, value]) => `    ${name}=${asPythonValue(value, 1)},`),
    ")",
    "for chunk in stream:",
    "    if chunk.choices:",
    '        print(chunk.choices[0].delta.content or "", end="", flush=True)',
    "",
  ].join("\n");
}

function asPythonValue(value: unknown, depth: number): string {
  if (value === null || value === undefined) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const indent = "    ".repeat(depth);
  const parts = Array.isArray(value)
    ? value.map((part) => asPythonValue(part, depth + 1))
    : Object.entries(value).map(
        ([name, part]) => `${JSON.stringify(name)}: ${asPythonValue(part, depth + 1)}`,
      );
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  const line = `${open}${parts.join(", ")}${close}`;
  if (line.length < 70 && !line.includes("\n")) return line;
  return `${open}\n${parts.map((part) => `${indent}    ${part},`).join("\n")}\n${indent}${close}`;
}
