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
    readonly kind = "", // one of ADVICE
  ) {
    super(message);
  }
}

export interface Model {
  id: string;
  capabilities?: string[];
  max_model_len?: number;
  default_sampling_params?: JsonObject; // where the model has other defaults than the server
  chat_sampling_params?: JsonObject; // which `genserve chat` sends too
  status?: { value: string; memory_bytes?: number; remaining_s?: number }; // the value is loaded, loading or unloaded
  [field: string]: unknown;
}

/** The server's address, with a slash at the end. */
export function serverUrl(): string {
  return new URL(".", document.baseURI).href;
}

/** The models that generate text. */
export async function listModels(): Promise<Model[]> {
  const answer = await call("v1/models");
  const { data } = (await answer.json()) as { data: Model[] };
  return data.filter(({ capabilities = ["completion"] }) => capabilities.includes("completion"));
}

/** The OpenAPI document. */
export async function openApi(): Promise<JsonObject> {
  return (await call("openapi.json")).json();
}

/** One version of a model in the server's repository. */
export interface IndexEntry {
  name: string;
  version?: string;
  state?: string; // "" or absent: it was never loaded
  reason?: string;
}

export async function modelIndex(): Promise<IndexEntry[]> {
  return (await call("v2/repository/index", asJson({}))).json();
}

/** Load a model; resolves once it is ready. */
export async function loadModel(name: string): Promise<void> {
  await call(`v2/repository/models/${encodeURIComponent(name)}/load`, asJson({}));
}

/** Have a model on demand loaded by naming it, which needs no right to control the server. */
export async function loadOnDemand(name: string, signal: AbortSignal): Promise<void> {
  await call("api/generate", { ...asJson({ model: name, stream: false }), signal });
}

/** Begin to unload a model. */
export async function unloadModel(name: string): Promise<void> {
  await call(`v2/repository/models/${encodeURIComponent(name)}/unload`, asJson({}));
}

/** The name of a token in the vocabulary. */
export async function detokenize(model: string, tokenId: number): Promise<string> {
  const answer = await call("detokenize", asJson({ model, tokens: [tokenId] }));
  return ((await answer.json()) as { prompt: string }).prompt;
}

/** How many tokens a text has. */
export async function tokenize(model: string, prompt: string): Promise<number> {
  const answer = await call("tokenize", asJson({ model, prompt, add_special_tokens: false }));
  return ((await answer.json()) as { count: number }).count;
}

/** The token that ends the answers of a model. */
export async function endToken(model: string): Promise<string> {
  const answer = await call(`tokenizer_info?model=${encodeURIComponent(model)}`);
  return String(((await answer.json()) as JsonObject).eos_token);
}

/** End the reasoning of an answer that runs. */
export async function endReasoning(id: string): Promise<void> {
  await call("v1/chat/completions/control", asJson({ id, action: "reasoning_end" }));
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
    if (chunk.error) throw problemOf(chunk, answer.status);
    yield chunk;
  }
  throw new ApiError(BROKEN, 0);
}

const BROKEN = "The connection to the server broke before the answer was complete.";

/** The data of server-sent events. */
async function* events(body: ReadableStream<Uint8Array>): AsyncGenerator<string> {
  const reader = body
    .pipeThrough(new TextDecoderStream() as ReadableWritablePair<string, Uint8Array>)
    .getReader();
  let held = "";
  for (;;) {
    const { done, value } = await reader.read().catch((error) => {
      throw error.name === "AbortError" ? error : new ApiError(BROKEN, 0);
    });
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
  if (answer.status === 401) {
    needsKey.value = true;
    throw new ApiError(
      apiKey.value ? "The server rejected the API key." : "This server needs an API key.",
      401,
    );
  }
  throw problemOf(await answer.json().catch(() => ({})), answer.status);
}

/** The error of a body, in the page's words where the server's are not for readers of a chat. */
function problemOf(body: JsonObject, status: number): ApiError {
  const error = (typeof body.error === "string" ? { ...body, message: body.error } : body.error) as
    | JsonObject
    | undefined;
  const { message, remedy, code, param } = error ?? {};
  if (!message) return new ApiError(`The server answered with status ${status}.`, status);
  const kind = [`${code} ${param}`, `${code}`].find((name) => name in ADVICE) ?? "";
  const lines = [withoutAdvice(`${message}`, `${remedy ?? ""}`), `${ADVICE[kind] ?? remedy ?? ""}`];
  return new ApiError(lines.filter(Boolean).map(sentence).join("\n"), status, kind);
}

/** A message that may end with the advice, for clients that show nothing else, without it. */
function withoutAdvice(message: string, advice: string): string {
  const at = advice ? message.toLowerCase().lastIndexOf(advice.toLowerCase()) : -1;
  return at > 0 ? message.slice(0, at).replace(/[\s(:;,.]+$/, "") : message;
}

export const CONTEXT_FULL = "context_length_exceeded";
/** What a reader can do, in place of the server's advice to whoever runs it or writes a program; by code. */
const ADVICE: Record<string, string> = {
  [CONTEXT_FULL]: "Start a new chat, or edit an earlier message to go on from there.",
  model_not_ready: "Try again once it is loaded, or choose another model.",
};

/** A text of the server as a sentence. A name of a field at its beginning stays as it is. */
function sentence(text: string): string {
  const plain = text.replaceAll("`", "").trim();
  const begun = /^[a-z]+[ ,:;]/.test(plain) ? plain.charAt(0).toUpperCase() + plain.slice(1) : plain;
  return /[.!?…]$/.test(begun) ? begun : `${begun}.`;
}
