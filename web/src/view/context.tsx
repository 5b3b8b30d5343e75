// How full the context of the model is, and what to do when it is.

import { signal } from "@preact/signals";
import { useEffect } from "preact/hooks";
import { tokenize } from "../api";
import { type Message, newestTurns, numChars } from "../conversation";
import { continueInNewChat, conversation, entryOf, modelOf, shown, startConversation } from "../state";

const NEARLY_FULL = 0.8;
const KEPT_SHARE = 0.4; // of the context, when a chat goes on without its oldest messages
const COUNTED_CHARS = 400; // of a text that is worth counting
const PAUSE_MS = 400;
const USUAL_CHARS_PER_TOKEN = 4;

/** How many tokens the message has that is being written; 0 while it is short. */
const numTyped = signal(0);

export function ContextMeter({ text }: { text: string }) {
  useTypedTokens(text);
  const limit = contextLength();
  const used = usedTokens(shown.value) + numTyped.value;
  if (!limit || !used) return null;
  const share = used / limit;
  const words = `${used.toLocaleString("en")} of ${limit.toLocaleString("en")} tokens of the context`;
  return (
    <div class={`context ${share >= NEARLY_FULL ? "is-full" : ""}`}>
      <meter
        min={0}
        max={limit}
        high={NEARLY_FULL * limit}
        optimum={0}
        value={Math.min(used, limit)}
        aria-label={words}
      />
      <span>{words}</span>
      {share >= NEARLY_FULL && (
        <div class="context-advice" role="status">
          <span>
            {share > 1
              ? "This message does not fit."
              : "The context is nearly full: answers will be cut, then messages rejected."}
          </span>
          <ContextActions />
        </div>
      )}
    </div>
  );
}

/** What to do when the context is full. */
export function ContextActions() {
  const counted = shown.value.slice(0, 1 + shown.value.findLastIndex(isCounted));
  const charsPerToken = numChars(counted) / Math.max(1, usedTokens(counted)) || USUAL_CHARS_PER_TOKEN;
  const kept = newestTurns(shown.value, KEPT_SHARE * (contextLength() ?? 0) * charsPerToken);
  return (
    <span class="context-actions">
      {kept.length > 0 && kept.length < shown.value.length && (
        <button type="button" onClick={() => continueInNewChat(kept)}>
          Go on in a new chat with the last messages
        </button>
      )}
      <button type="button" onClick={startConversation}>
        New chat
      </button>
    </span>
  );
}

function contextLength(): number | undefined {
  return entryOf(conversation.value)?.max_model_len;
}

/** How many tokens the messages have; those after the last whole answer, such as a stopped one, are estimated. */
function usedTokens(messages: Message[]): number {
  const at = messages.findLastIndex(isCounted);
  const { promptTokens = 0, completionTokens = 0 } = messages[at]?.stats ?? {};
  const numBehind = Math.round(numChars(messages.slice(at + 1)) / USUAL_CHARS_PER_TOKEN);
  return promptTokens + completionTokens + numBehind;
}

function isCounted({ stats }: Message): boolean {
  return Boolean(stats?.promptTokens);
}

function useTypedTokens(text: string): void {
  const model = modelOf(conversation.value);
  useEffect(() => {
    if (text.length < COUNTED_CHARS) {
      numTyped.value = 0;
      return;
    }
    let isCurrent = true;
    const timer = setTimeout(async () => {
      const count = await tokenize(model, text).catch(() => Math.round(text.length / USUAL_CHARS_PER_TOKEN));
      if (isCurrent) numTyped.value = count;
    }, PAUSE_MS);
    return () => {
      isCurrent = false;
      clearTimeout(timer);
    };
  }, [text, model]);
}
