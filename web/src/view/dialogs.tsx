// The dialogs: key, shortcuts, raw request, deletion.

import type { ComponentChildren } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { needsKey } from "../api";
import { asCurl, asPython, chatBody } from "../chat_request";
import { ROOT } from "../conversation";
import { Code } from "../markdown";
import { apiKey } from "../preferences";
import { connect, conversation, dialog, dialogSubject, removeConversation, shown, summaries } from "../state";
import { IconButton } from "./icons";

export function Dialogs() {
  if (needsKey.value)
    return <KeyDialog asks={apiKey.value ? "The server rejected the key." : "This server needs a key."} />;
  if (dialog.value === "key") return <KeyDialog asks="Requests are sent with this key." />;
  if (dialog.value === "shortcuts") return <Shortcuts />;
  if (dialog.value === "raw") return <RawRequest />;
  if (dialog.value === "delete") return <Deletion />;
  return null;
}

const close = () => {
  dialog.value = "";
};

interface DialogProps {
  title: string;
  onClose: () => void;
  wide?: boolean;
  children: ComponentChildren;
}

function Dialog({ title, onClose, wide, children }: DialogProps) {
  const element = useRef<HTMLDialogElement>(null);
  useEffect(() => element.current?.showModal(), []);
  return (
    <dialog ref={element} class={wide ? "is-wide" : ""} aria-label={title} onClose={onClose}>
      <div class="dialog-top">
        <h2>{title}</h2>
        <IconButton icon="close" label="Close" onClick={onClose} />
      </div>
      {children}
    </dialog>
  );
}

function KeyDialog({ asks }: { asks: string }) {
  const closeKey = () => {
    needsKey.value = false;
    close();
  };
  const onSubmit = (event: SubmitEvent & { currentTarget: HTMLFormElement }) => {
    event.preventDefault();
    apiKey.value = String(new FormData(event.currentTarget).get("key")).trim();
    closeKey();
    connect();
  };
  return (
    <Dialog title="API key" onClose={closeKey}>
      <form onSubmit={onSubmit}>
        <p>{asks}</p>
        <input name="key" type="password" aria-label="API key" autocomplete="off" required />
        <p class="faint">It is kept in this browser, and sent to this server only.</p>
        <div class="buttons">
          <button type="submit" class="primary">
            Use the key
          </button>
        </div>
      </form>
    </Dialog>
  );
}

const SHORTCUTS = [
  ["Enter", "send the message"],
  ["Shift+Enter", "begin a new line"],
  ["Esc", "stop the answer, or close what is open"],
  ["Alt+N", "new chat"],
  ["Alt+L", "show or hide the list of conversations"],
  ["Alt+S", "show or hide the settings"],
  ["Alt+P", "show or hide token probabilities"],
  ["Alt+R", "answer again"],
  ["←  →", "between tokens, with probabilities shown"],
  ["Alt+K", "show this list"],
] as const;

function Shortcuts() {
  return (
    <Dialog title="Keyboard shortcuts" onClose={close}>
      <dl class="shortcuts">
        {SHORTCUTS.map(([keys, effect]) => (
          <div key={keys}>
            <dt>
              <kbd>{keys}</kbd>
            </dt>
            <dd>{effect}</dd>
          </div>
        ))}
      </dl>
    </Dialog>
  );
}

/** The request of an answer, or the one that the next message would send. */
function RawRequest() {
  const [language, setLanguage] = useState<"curl" | "Python">("curl");
  const message = conversation.value.messages[dialogSubject.value];
  let text: string;
  try {
    const body = chatBody(conversation.value, message ? message.parent : (shown.value.at(-1)?.id ?? ROOT));
    text = language === "curl" ? asCurl(body) : asPython(body);
  } catch (error) {
    text = (error as Error).message;
  }
  return (
    <Dialog title="Request" onClose={close} wide>
      <div class="tabs" role="group" aria-label="Language">
        {(["curl", "Python"] as const).map((name) => (
          <button type="button" key={name} aria-pressed={name === language} onClick={() => setLanguage(name)}>
            {name}
          </button>
        ))}
      </div>
      <Code text={text} language={language === "curl" ? "bash" : "python"} />
      <p class="faint">It has the current settings.</p>
    </Dialog>
  );
}

function Deletion() {
  const id = dialogSubject.value;
  const title = summaries.value.find((summary) => summary.id === id)?.title;
  return (
    <Dialog title="Delete the conversation?" onClose={close}>
      <p>“{title}” will be deleted from this browser.</p>
      <div class="buttons">
        <button type="button" onClick={close}>
          Keep
        </button>
        <button
          type="button"
          class="danger"
          onClick={() => {
            close();
            removeConversation(id);
          }}
        >
          Delete
        </button>
      </div>
    </Dialog>
  );
}
