// The server's API, relative to the page, so that a prefix of a proxy is kept.

import { signal } from "@preact/signals";
import { apiKey } from "./preferences";
import type { JsonObject } from "./schema";

export const needsKey = signal(false); // the server has rejected the key, or that there was none

/** An answer other than success, or none. */
export class ApiError extends Error {
  constructor(
    message: string,
    readonly status: number, // 0: there was no answer
  ) {
    super(message);
  }
}

export interface Model {
  id: string;
  max_model_len?: number;
  default_sampling_params?: JsonObject; // where the model has other defaults than the server
  chat_sampling_params?: JsonObject; // which `genserve chat` sends too
  [field: string]: unknown;
}

/** The server's address, with a slash at the end. */
export function serverUrl(): string {
  return new URL(".", document.baseURI).href;
}

export async function listModels(): Promise<Model[]> {
  const answer = await call("v1/models");
  return ((await answer.json()) as { data: Model[] }).data;
}

/** The OpenAPI document. */
export async function openApi(): Promise<JsonObject> {
  return (await call("openapi.json")).json();
}

/** The name of a token in the vocabulary. */
export async function detokenize(model: string, tokenId: number): Promise<string> {
  const answer = await call("detokenize", asJson({ model, tokens: [tokenId] }));
  return ((await answer.json()) as { prompt: string }).prompt;
}

/** The token that ends the answers of a model. */
export async function endToken(model: string): Promise<string> {
  const answer = await call(`tokenizer_info?model=${encodeURIComponent(model)}`);
  return String(((await answer.json()) as JsonObject).eos_token);
}

/**
 * Stream a chat completion: its chunks, as they come. Throws ApiError; or AbortError after `signal`.
 *
 * @param onIgnored gets the names of the fields that have no effect.
 */
export async function* streamChat(
  body: JsonObject,
  signal: AbortSignal,
  onIgnored: (names: string) => void,
): AsyncGenerator<JsonObject> {
  const answer = await call("v1/chat/completions", { ...asJson(body), signal });
  onIgnored(answer.headers.get("x-genserve-ignored") ?? "");
  for await (const data of events(answer.body as ReadableStream<Uint8Array>)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data) as JsonObject;
    if (chunk.error) throw new ApiError(messageOf(chunk) ?? "the answer failed", answer.status);
    yield chunk;
  }
  throw new ApiError("the connection ended before the answer was complete", 0);
}

/** The data of server-sent events. */
async function* events(body: ReadableStream<Uint8Array>): AsyncGenerator<string> {
  const reader = body
    .pipeThrough(new TextDecoderStream() as ReadableWritablePair<string, Uint8Array>)
    .getReader();
  let held = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const blocks = (held + value).split(/\r?\n\r?\n/);
    held = blocks.pop() ?? "";
    for (const block of blocks) {
      const lines = block.split(/\r?\n/).filter((line) => line.startsWith("data:"));
      if (lines.length) yield lines.map((line) => line.slice(5).trimStart()).join("\n");
    }
  }
}

function asJson(body: JsonObject): RequestInit {
  return { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) };
}

async function call(path: string, options: RequestInit = {}): Promise<Response> {
  const headers = new Headers(options.headers);
  if (apiKey.value) headers.set("Authorization", `Bearer ${apiKey.value}`);
  let answer: Response;
  try {
    answer = await fetch(new URL(path, serverUrl()), { ...options, headers });
  } catch (error) {
    if ((error as Error).name === "AbortError") throw error;
    throw new ApiError(`The server at ${serverUrl()} does not answer.`, 0);
  }
  if (answer.ok) return answer;
  if (answer.status === 401) needsKey.value = true;
  const problem = await answer.json().then(messageOf, () => undefined);
  throw new ApiError(problem ?? `The server answered with status ${answer.status}.`, answer.status);
}

/** What an error says, and its remedy in another line. */
function messageOf(body: JsonObject): string | undefined {
  const error = body.error as JsonObject | string | undefined;
  const [message, remedy] =
    typeof error === "string" ? [error, body.remedy] : [error?.message, error?.remedy];
  return [message, remedy].filter((line) => typeof line === "string" && line).join("\n") || undefined;
}
