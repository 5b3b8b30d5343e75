// The field for the next message.

import { signal } from "@preact/signals";
import { useEffect, useLayoutEffect, useRef } from "preact/hooks";
import { send, stop } from "../answering";
import { conversation, isBusy, modelOf, shown } from "../state";
import { Icon } from "./icons";

const draft = signal("");
const isTouched = matchMedia("(hover: none) and (pointer: coarse)"); // Enter begins a line there, as in other apps

/** Whether the last answer waits for the results of tools. */
function waitsForTools(): boolean {
  const last = shown.value.at(-1);
  return Boolean(last?.toolCalls?.length && last.role === "assistant" && !isBusy.value && !last.error);
}

export function Composer() {
  const area = useRef<HTMLTextAreaElement>(null);
  const canSend = draft.value.trim() !== "" && !isBusy.value && modelOf(conversation.value) !== "";
  const submit = () => {
    if (!canSend) return;
    send(draft.value.trim());
    draft.value = "";
  };
  useEffect(() => {
    if (!isTouched.matches) area.current?.focus(); // on phones it would open the keyboard
  }, [conversation.value.id]);
  useLayoutEffect(() => {
    if (!area.current) return;
    area.current.style.height = "auto";
    area.current.style.height = `${area.current.scrollHeight}px`;
  }, [draft.value]);
  return (
    <form
      class="composer"
      onSubmit={(event) => {
        event.preventDefault();
        submit();
      }}
    >
      <textarea
        ref={area}
        id="composer"
        rows={1}
        aria-label="Message"
        placeholder={waitsForTools() ? "Answer the call above, or write a message" : "Write a message"}
        value={draft.value}
        onInput={(event) => (draft.value = event.currentTarget.value)}
        onKeyDown={(event) => {
          if (event.key !== "Enter" || event.shiftKey || event.isComposing || isTouched.matches) return;
          event.preventDefault();
          submit();
        }}
      />
      {isBusy.value ? (
        <button type="button" class="round" onClick={stop} aria-label="Stop" title="Stop (Esc)">
          <Icon name="stop" />
        </button>
      ) : (
        <button
          type="submit"
          class="round primary"
          disabled={!canSend}
          aria-label="Send"
          title="Send (Enter)"
        >
          <Icon name="send" />
        </button>
      )}
    </form>
  );
}
