// Answering: sends a chat request, and writes what comes into a message of the conversation.

import { ApiError, streamChat } from "./api";
import { chatBody, InvalidInput } from "./chat_request";
import {
  type Conversation,
  isThinking,
  type Message,
  newId,
  ROOT,
  rawText,
  separated,
  type Token,
  type ToolCall,
  withChange,
  withMessage,
} from "./conversation";
import type { JsonObject } from "./schema";
import { change, conversation, flush, isBusy, modelOf, notice, running, shown } from "./state";

/** Send what the user has typed. */
export function send(text: string): void {
  const parent = shown.value.at(-1)?.id ?? ROOT;
  add({ role: "user", parent, content: text });
  answer();
}

/** Write a message with another text, as another branch; unless it is an answer, it is answered. */
export function resend({ role, parent, toolCallId, name }: Message, content: string): void {
  add({ role, parent, toolCallId, name, content });
  if (role !== "assistant") answer();
}

/** Add the results of tools, in the order of the calls, and let the model go on. */
export function sendResults(calls: ToolCall[], results: string[]): void {
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

function answer(): void {
  begin(shown.value.at(-1)?.id ?? ROOT, {});
}

function add(message: Pick<Message, "role" | "parent" | "content"> & Partial<Message>): Message {
  const added: Message = { id: newId(), created: Date.now(), ...message };
  change(conversation.value.id, (old) => withMessage(old, added));
  flush();
  return added;
}

/** Begin an answer behind a message, with the fields of its beginning and the prefix as raw text. */
function begin(parent: string, start: Partial<Message>, prefix = ""): void {
  if (isBusy.value) return;
  const { value } = conversation;
  let body: JsonObject;
  try {
    body = chatBody(value, parent, prefix);
  } catch (error) {
    if (!(error instanceof InvalidInput)) throw error;
    notice.value = { text: error.message };
    return;
  }
  const message = add({ role: "assistant", parent, content: "", model: modelOf(value), ...start });
  const stopper = new AbortController();
  running.value = { ...running.value, [value.id]: stopper };
  new Answer(value.id, message, prefix).run(body, stopper.signal).finally(() => {
    const { [value.id]: _ended, ...others } = running.value;
    running.value = others;
    flush();
  });
}

interface Choice {
  delta: {
    content?: string;
    reasoning_content?: string;
    tool_calls?: (Partial<ToolCall> & { index: number })[];
  };
  logprobs: { content: { token: string; logprob: number | null; top_logprobs: TopToken[] }[] } | null;
  finish_reason: string | null;
}
type TopToken = { token: string; logprob: number };
interface Usage {
  prompt_tokens?: number;
  completion_tokens: number;
  prompt_tokens_details?: { cached_tokens?: number };
}

const FRAME_MS = 40;

/** One answer: collects chunks, and shows them some times per second. */
class Answer {
  private readonly sentMs = performance.now();
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

  async run(body: JsonObject, signal: AbortSignal): Promise<void> {
    try {
      const onIgnored = (names: string) => {
        this.message.ignored = names;
      };
      for await (const chunk of streamChat(body, signal, onIgnored)) this.read(chunk);
    } catch (error) {
      if ((error as Error).name === "AbortError") this.message.finish = "stopped";
      else if (error instanceof ApiError) this.message.error = error.message;
      else this.message.error = `The page failed: ${(error as Error).message}`;
    }
    clearTimeout(this.timer);
    this.show();
  }

  private read(chunk: JsonObject): void {
    const [choice] = chunk.choices as Choice[];
    if (choice) this.readChoice(choice);
    if (chunk.usage) this.readUsage(chunk.usage as Usage);
    else if (this.numTokens) this.readUsage({ completion_tokens: this.numTokens }); // it may be stopped
    this.timer ||= setTimeout(this.show, FRAME_MS);
  }

  private readChoice({ delta, logprobs, finish_reason }: Choice): void {
    const { message } = this;
    const adds = delta.content || delta.reasoning_content || delta.tool_calls || logprobs?.content.length;
    if (adds) {
      this.lastMs = performance.now();
      this.firstMs ||= this.lastMs;
      this.numTokens += logprobs?.content.length ?? 1;
    }
    message.content += delta.content ?? "";
    if (delta.reasoning_content) message.reasoning = (message.reasoning ?? "") + delta.reasoning_content;
    for (const { token, logprob, top_logprobs } of logprobs?.content ?? []) {
      message.tokens?.push({
        text: token,
        logprob,
        top: top_logprobs.map((top) => [top.token, top.logprob]),
      });
    }
    // The server strips the whitespace at the joint.
    if (this.continuesThought && logprobs) Object.assign(message, separated(rawText(message)));
    for (const part of delta.tool_calls ?? []) this.readToolCall(part);
    if (finish_reason) message.finish = finish_reason;
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

  private readUsage(usage: Usage): void {
    const seconds = (this.lastMs - this.firstMs) / 1000;
    const behindFirst = usage.completion_tokens - 1;
    this.message.stats = {
      firstTokenMs: this.firstMs - this.sentMs,
      tokensPerSecond: behindFirst > 0 && seconds > 0 ? behindFirst / seconds : null,
      completionTokens: usage.completion_tokens,
      promptTokens: usage.prompt_tokens,
      cachedTokens: usage.prompt_tokens_details?.cached_tokens,
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
