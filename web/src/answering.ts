// Answering: sends a chat request, and writes what comes into a message of the conversation.

import { ApiError, endReasoning, streamChat } from "./api";
import { chatBody, requestOf, toolsProblem } from "./chat_request";
import {
  type ChatRequest,
  type Conversation,
  isThinking,
  type Message,
  newId,
  pathTo,
  ROOT,
  rawText,
  type Setup,
  type Stats,
  separated,
  type TextFile,
  type Token,
  type ToolCall,
  UNFINISHED,
  withChange,
  withFiles,
  withMessage,
} from "./conversation";
import type { JsonObject } from "./schema";
import {
  answerIds,
  beside,
  change,
  connect,
  conversation,
  flush,
  isBusy,
  isRefused,
  isUnloaded,
  load,
  readShares,
  running,
  shown,
} from "./state";

/** Send what the user has typed, unless the settings do not allow it. */
export function send(text: string, files: TextFile[] = []): boolean {
  if (!mayAsk()) return false;
  const parent = shown.value.at(-1)?.id ?? ROOT;
  add({ role: "user", parent, ...written(text, files) });
  answer();
  return true;
}

function written(text: string, files: TextFile[] = []): Pick<Message, "content" | "typed" | "files"> {
  return files.length ? { content: withFiles(text, files), typed: text, files } : { content: text };
}

/** Write a message with another text, as another branch; unless it is an answer, it is sent, as by `send`. */
export function resend({ role, parent, toolCallId, name, files }: Message, text: string): boolean {
  const asks = role !== "assistant";
  if (asks && !mayAsk()) return false;
  add({ role, parent, toolCallId, name, ...written(text, files) });
  if (asks) answer();
  return true;
}

/** Add the results of tools, in the order of the calls, and let the model go on. */
export function sendResults(calls: ToolCall[], results: string[]): void {
  if (!mayAsk()) return;
  for (const [index, call] of calls.entries()) {
    const parent = shown.value.at(-1)?.id ?? ROOT;
    const content = results[index] ?? "";
    add({ role: "tool", parent, content, toolCallId: call.id, name: call.function.name });
  }
  answer();
}

/** Answer again, as another branch. */
export function regenerate(message: Message): void {
  begin(message.parent, {});
}

/** Answer again with another seed or by another model, beside an answer. */
export function compare(message: Message, model: string): void {
  const { seed: _same, ...others } = conversation.value.params;
  const params = model === message.model ? others : conversation.value.params;
  const added = begin(message.parent, {}, "", { model, params });
  if (added) beside.value = [message.id, added];
}

/** Whether an answer comes out the same when its request is sent again. */
export interface Replay {
  numSame: number; // tokens
  numCompared: number;
  isExact: boolean; // with the same log-probabilities
}

/** Send the request of an answer again, and compare what comes; throws ApiError. */
export async function replay(message: Message, signal: AbortSignal): Promise<Replay> {
  const { request, tokens = [], stats } = message;
  if (!request) throw new Error("The request of this answer was not kept.");
  const body = chatBody(request, pathTo(conversation.value, message.parent));
  const length = stats?.completionTokens;
  const sent = message.finish === "stopped" ? { ...body, max_tokens: length } : body;
  const again: Pick<Message, "content" | "reasoning"> & { tokens: Token[] } = { content: "", tokens: [] };
  for await (const chunk of streamChat(sent, signal, () => {})) {
    const [choice] = chunk.choices as Choice[];
    if (!choice) continue;
    again.content += choice.delta.content ?? "";
    again.tokens.push(...tokensOf(choice));
  }
  if (!again.tokens.length) {
    const isSame = message.content.endsWith(again.content);
    return { numSame: isSame ? 1 : 0, numCompared: 1, isExact: false };
  }
  const first = tokens.slice(tokens.length - (length ?? again.tokens.length));
  const place = again.tokens.findIndex(({ text }, index) => text !== first[index]?.text);
  const numSame = place < 0 ? again.tokens.length : place;
  const isExact = again.tokens.slice(0, numSame).every((one, index) => one.logprob === first[index]?.logprob);
  return { numSame, numCompared: Math.max(first.length, again.tokens.length), isExact };
}

/** Continue an answer that was stopped, or reached its limit, as another branch. */
export function continueAnswer(message: Message): void {
  const prefix = rawText(message);
  begin(message.parent, { ...separated(prefix), tokens: message.tokens }, prefix);
}

/** Continue an answer from one of the alternatives at a token, as another branch. */
export function continueFrom(message: Message, index: number, [text, logprob]: [string, number]): void {
  const prefix = rawText(message, index) + text;
  const { tokens = [] } = message;
  const chosen: Token = { text, logprob, top: tokens[index]?.top ?? [], chosen: true };
  begin(message.parent, { ...separated(prefix), tokens: [...tokens.slice(0, index), chosen] }, prefix);
}

/** End an answer at a token, as another branch. */
export function endAt(message: Message, index: number, logprob: number): void {
  const { parent, model, tokens = [] } = message;
  const end: Token = { text: "", logprob, top: tokens[index]?.top ?? [], chosen: true };
  const text = separated(rawText(message, index));
  add({
    role: "assistant",
    parent,
    model,
    ...text,
    tokens: [...tokens.slice(0, index), end],
    finish: "stop",
  });
}

/** Stop the answer of the shown conversation. */
export function stop(): void {
  running.value[conversation.value.id]?.abort();
}

/** Have an answer end its reasoning, and go on; it may have ended by itself. */
export function answerNow(message: Message): void {
  const id = answerIds.value[message.id];
  if (id) endReasoning(id).catch(() => {});
}

/** Whether the settings make a request; if they do not, the page says why. */
function mayAsk(): boolean {
  isRefused.value = toolsProblem(conversation.value.tools) !== "";
  return !isRefused.value;
}

function answer(): void {
  begin(shown.value.at(-1)?.id ?? ROOT, {});
}

function add(message: Pick<Message, "role" | "parent" | "content"> & Partial<Message>): Message {
  const added: Message = { id: newId(), created: Date.now(), ...message };
  change(conversation.value.id, (old) => withMessage(old, added));
  flush();
  return added;
}

/**
 * Begin an answer behind a message, with the fields of its beginning and the prefix as raw text.
 * Returns the id of its message; undefined: it does not begin.
 */
function begin(
  parent: string,
  start: Partial<Message>,
  prefix = "",
  setup: Partial<Setup> = {}, // what differs from the conversation's
): string | undefined {
  if (isBusy.value || !mayAsk()) return undefined;
  beside.value = null;
  const { value } = conversation;
  const ask = () => requestOf({ ...value, ...setup }, prefix);
  const request = ask();
  const model = String(request.fields.model);
  const begun = { content: "", model, request, finish: UNFINISHED, ...start };
  const message = add({ role: "assistant", parent, ...begun });
  const stopper = new AbortController();
  running.value = { ...running.value, [value.id]: stopper };
  const answered = pathTo(value, parent);
  new Answer(value.id, message, prefix).run(request, ask, answered, stopper.signal).finally(() => {
    const { [value.id]: _ended, ...others } = running.value;
    running.value = others;
    showRead(message.id, 0);
    flush();
  });
  return message.id;
}

/** Show which share of an answer's prompt the model has read. */
function showRead(id: string, share: number): void {
  readShares.value = { ...readShares.value, [id]: share };
}

interface Choice {
  delta: {
    content?: string;
    reasoning_content?: string;
    tool_calls?: (Partial<ToolCall> & { index: number })[];
  };
  logprobs: { content: { token: string; logprob: number | null; top_logprobs: TopToken[] }[] } | null;
  finish_reason: string | null;
  stop_reason?: string | number | null;
}
type TopToken = { token: string; logprob: number };
interface Usage {
  prompt_tokens?: number;
  completion_tokens: number;
  prompt_tokens_details?: { cached_tokens?: number };
}

const FRAME_MS = 40;

function tokensOf({ logprobs }: Choice): Token[] {
  return (logprobs?.content ?? []).map(({ token, logprob, top_logprobs }) => ({
    text: token,
    logprob,
    top: top_logprobs.map((top) => [top.token, top.logprob]),
  }));
}

/** One answer: collects chunks, and shows them some times per second. */
class Answer {
  private sentMs = 0;
  private firstMs = 0;
  private lastMs = 0;
  private numTokens = 0;
  private timer = 0;
  private readonly continuesThought: boolean;

  constructor(
    private readonly conversationId: string,
    private readonly message: Message,
    prefix: string,
  ) {
    this.continuesThought = isThinking(prefix);
    message.tokens = [...(message.tokens ?? [])];
    message.toolCalls = [];
  }

  /** Send a request. If its model has to be loaded first, `ask` makes it again, with the defaults known then. */
  async run(
    asked: ChatRequest,
    ask: () => ChatRequest,
    answered: Message[],
    signal: AbortSignal,
  ): Promise<void> {
    const { message } = this;
    try {
      let request = asked;
      if (isUnloaded(message.model ?? "")) {
        await load(message.model ?? "", signal);
        request = message.request = ask();
      }
      this.sentMs = performance.now();
      const body = { ...chatBody(request, answered), return_progress: true, return_cache_match: true };
      const onIgnored = (names: string) => {
        message.ignored = names;
      };
      for await (const chunk of streamChat(body, signal, onIgnored)) this.read(chunk);
    } catch (error) {
      if ((error as Error).name === "AbortError") message.finish = "stopped";
      else if (error instanceof ApiError) this.fail(error);
      else message.error = `The page failed: ${(error as Error).message}`;
    }
    clearTimeout(this.timer);
    this.show();
  }

  private fail(error: ApiError): void {
    this.message.error = error.message;
    this.message.errorKind = error.kind;
    if (error.status === 0 || error.status === 503) connect(); // the server is gone, or its model is
  }

  private read(chunk: JsonObject): void {
    const { id } = this.message;
    if (answerIds.value[id] !== chunk.id) answerIds.value = { ...answerIds.value, [id]: String(chunk.id) };
    const progress = chunk.prompt_progress as { processed: number; total: number } | undefined;
    if (progress) showRead(id, progress.processed / progress.total);
    const [choice] = chunk.choices as Choice[];
    if (choice) this.readChoice(choice);
    if (chunk.usage) {
      const { usage, timings, cache_match: cacheMatch } = chunk;
      this.readUsage(usage as Usage, { timings, cacheMatch } as Partial<Stats>);
    } else if (this.numTokens) this.readUsage({ completion_tokens: this.numTokens }); // it may be stopped
    this.timer ||= setTimeout(this.show, FRAME_MS);
  }

  private readChoice(choice: Choice): void {
    const { delta, logprobs, finish_reason, stop_reason } = choice;
    const { message } = this;
    const adds = delta.content || delta.reasoning_content || delta.tool_calls || logprobs?.content.length;
    if (adds) {
      this.lastMs = performance.now();
      this.firstMs ||= this.lastMs;
      this.numTokens += logprobs?.content.length ?? 1;
    }
    message.content += delta.content ?? "";
    if (delta.reasoning_content) message.reasoning = (message.reasoning ?? "") + delta.reasoning_content;
    message.tokens?.push(...tokensOf(choice));
    // The server strips the whitespace at the joint.
    if (this.continuesThought && logprobs) Object.assign(message, separated(rawText(message)));
    for (const part of delta.tool_calls ?? []) this.readToolCall(part);
    if (finish_reason) message.finish = finish_reason;
    if (finish_reason && stop_reason != null) message.stopReason = String(stop_reason);
  }

  private readToolCall({ index, id, function: added }: Partial<ToolCall> & { index: number }): void {
    const calls = this.message.toolCalls ?? [];
    calls[index] ??= { id: "", type: "function", function: { name: "", arguments: "" } };
    const call = calls[index];
    calls[index] = {
      ...call,
      id: call.id || id || "",
      function: {
        name: call.function.name + (added?.name ?? ""),
        arguments: call.function.arguments + (added?.arguments ?? ""),
      },
    };
  }

  private readUsage(usage: Usage, measured: Partial<Stats> = {}): void {
    const seconds = (this.lastMs - this.firstMs) / 1000;
    const behindFirst = usage.completion_tokens - 1;
    this.message.stats = {
      firstTokenMs: this.firstMs - this.sentMs,
      tokensPerSecond: behindFirst > 0 && seconds > 0 ? behindFirst / seconds : null,
      completionTokens: usage.completion_tokens,
      promptTokens: usage.prompt_tokens,
      cachedTokens: usage.prompt_tokens_details?.cached_tokens,
      ...measured,
    };
  }

  private readonly show = (): void => {
    this.timer = 0;
    const { message } = this;
    const tokens = message.tokens?.length ? [...message.tokens] : undefined;
    const toolCalls = message.toolCalls?.length ? [...message.toolCalls] : undefined;
    change(this.conversationId, (old: Conversation) =>
      withChange(old, message.id, { ...message, tokens, toolCalls }),
    );
  };
}
