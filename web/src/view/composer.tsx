// The field for the next message, with the texts attached to it.

import { computed, type Signal } from "@preact/signals";
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { send, stop } from "../answering";
import { toolsProblem } from "../chat_request";
import { type TextFile, withFiles } from "../conversation";
import { draftFiles, drafts } from "../preferences";
import { conversation, isBusy, isRefused, modelOf, settingsOpen, shown } from "../state";
import { Chips, pastedFile, readFiles } from "./attachments";
import { ContextMeter } from "./context";
import { Icon, IconButton } from "./icons";

const draftId = computed(() => (shown.value.length ? conversation.value.id : ""));
const draft = computed(() => drafts.value[draftId.value] ?? "");
const files = computed(() => draftFiles.value[draftId.value] ?? []);

function setDraft(text: string): void {
  keep(drafts, text);
}

function setFiles(list: TextFile[]): void {
  keep(draftFiles, list);
}

function keep<T extends { length: number }>(all: Signal<Record<string, T>>, value: T): void {
  const { [draftId.value]: _old, ...others } = all.value;
  all.value = value.length ? { ...others, [draftId.value]: value } : others;
}

async function attach(added: Iterable<File>): Promise<void> {
  const read = await readFiles(added, files.value);
  setFiles([...files.value, ...read]);
  focusComposer();
}

const isTouched = matchMedia("(hover: none) and (pointer: coarse)"); // Enter begins a line there, as in other apps

/** Whether the last answer waits for the results of tools. */
function waitsForTools(): boolean {
  const last = shown.value.at(-1);
  return Boolean(last?.toolCalls?.length && last.role === "assistant" && !isBusy.value && !last.error);
}

export function Composer() {
  const area = useRef<HTMLTextAreaElement>(null);
  const isEmpty = draft.value.trim() === "" && !files.value.length;
  const canSend = !isEmpty && !isBusy.value && modelOf(conversation.value) !== "";
  const submit = () => {
    if (!canSend) return;
    const [text, attached] = [draft.value, files.value];
    setDraft(""); // before the first message changes whose draft it is
    setFiles([]);
    if (send(text.trim(), attached)) return;
    setDraft(text);
    setFiles(attached);
  };
  useEffect(focusComposer, [conversation.value.id]);
  useLayoutEffect(() => {
    if (!area.current) return;
    area.current.style.height = "auto";
    area.current.style.height = `${area.current.scrollHeight}px`;
  }, [draft.value]);
  const drop = useDrop();
  return (
    <>
      <Refusal />
      <form
        class={`composer ${drop.isOver ? "is-over" : ""}`}
        onSubmit={(event) => {
          event.preventDefault();
          submit();
        }}
      >
        <Chips
          files={files.value}
          onRemove={(file) => setFiles(files.value.filter(({ name }) => name !== file.name))}
        />
        <div class="composer-line">
          <AttachButton />
          <textarea
            ref={area}
            id="composer"
            rows={1}
            aria-label="Message"
            placeholder={waitsForTools() ? "Answer the call above, or write a message" : "Write a message"}
            value={draft.value}
            onInput={(event) => setDraft(event.currentTarget.value)}
            onPaste={onPaste}
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
        </div>
      </form>
      <ContextMeter text={withFiles(draft.value, files.value)} />
    </>
  );
}

function AttachButton() {
  const input = useRef<HTMLInputElement>(null);
  return (
    <>
      <IconButton icon="attach" label="Attach text files" onClick={() => input.current?.click()} />
      <input
        ref={input}
        type="file"
        multiple
        hidden
        aria-label="Text files"
        onChange={(event) => {
          attach([...(event.currentTarget.files ?? [])]);
          event.currentTarget.value = "";
        }}
      />
    </>
  );
}

/** A pasted file, or a long text, is attached. */
function onPaste(event: ClipboardEvent): void {
  const { clipboardData } = event;
  if (clipboardData?.files.length) {
    event.preventDefault();
    attach([...clipboardData.files]);
    return;
  }
  const file = pastedFile(clipboardData?.getData("text/plain") ?? "", files.value);
  if (!file) return;
  event.preventDefault();
  setFiles([...files.value, file]);
}

/** Attach what is dropped anywhere on the page. */
function useDrop(): { isOver: boolean } {
  const [isOver, setIsOver] = useState(false);
  useEffect(() => {
    const hasFiles = (event: DragEvent) => event.dataTransfer?.types.includes("Files");
    const onOver = (event: DragEvent) => {
      if (!hasFiles(event)) return;
      event.preventDefault();
      setIsOver(true);
    };
    const onLeave = (event: DragEvent) => {
      if (!event.relatedTarget) setIsOver(false);
    };
    const onDrop = (event: DragEvent) => {
      setIsOver(false);
      if (!hasFiles(event)) return;
      event.preventDefault();
      attach([...(event.dataTransfer?.files ?? [])]);
    };
    document.addEventListener("dragover", onOver);
    document.addEventListener("dragleave", onLeave);
    document.addEventListener("drop", onDrop);
    return () => {
      document.removeEventListener("dragover", onOver);
      document.removeEventListener("dragleave", onLeave);
      document.removeEventListener("drop", onDrop);
    };
  }, []);
  return { isOver };
}

/** Put the focus into the field, but on phones, where that opens the keyboard. */
export function focusComposer(): void {
  if (!isTouched.matches) document.getElementById("composer")?.focus();
}

/** Why the last message was not sent. */
function Refusal() {
  if (!isRefused.value || !toolsProblem(conversation.value.tools)) return null;
  const edit = () => {
    settingsOpen.value = true;
    requestAnimationFrame(() => document.getElementById("tools")?.focus());
  };
  return (
    <div class="error refusal" role="alert">
      <p>Nothing was sent: the tools in the settings are not valid.</p>
      <button type="button" onClick={edit}>
        Edit the tools
      </button>
    </div>
  );
}
