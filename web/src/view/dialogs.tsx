// The dialogs: key, shortcuts, raw request, comparison, deletion.

import { useState } from "preact/hooks";
import { compare } from "../answering";
import { needsKey } from "../api";
import { asCurl, asPython, chatBody, requestOf } from "../chat_request";
import { childrenOf, type Message, pathTo } from "../conversation";
import { Code } from "../markdown";
import { apiKey } from "../preferences";
import type { JsonObject } from "../schema";
import {
  beside,
  connect,
  conversation,
  dialog,
  dialogSubject,
  modelOf,
  models,
  removeConversation,
  shown,
  summaries,
} from "../state";
import { focusComposer } from "./composer";
import { Dialog } from "./dialog";
import { Models } from "./models";

export function Dialogs() {
  if (needsKey.value)
    return (
      <KeyDialog
        asks={
          apiKey.value
            ? "The server rejected the key."
            : "This server needs a key: ask whoever runs it for one."
        }
      />
    );
  if (dialog.value === "key") return <KeyDialog asks="Requests are sent with this key." />;
  if (dialog.value === "shortcuts") return <Shortcuts />;
  if (dialog.value === "raw") return <RawRequest />;
  if (dialog.value === "compare") return <Comparison />;
  if (dialog.value === "models") return <Models />;
  if (dialog.value === "delete") return <Deletion />;
  return null;
}

const close = () => {
  dialog.value = "";
};

function KeyDialog({ asks }: { asks: string }) {
  const closeKey = () => {
    needsKey.value = false;
    close();
  };
  const onSubmit = (event: SubmitEvent & { currentTarget: HTMLFormElement }) => {
    event.preventDefault();
    apiKey.value = String(new FormData(event.currentTarget).get("key")).trim();
    closeKey();
    connect().then(focusComposer);
  };
  return (
    <Dialog title="API key" onClose={closeKey}>
      <form onSubmit={onSubmit}>
        <p>{asks}</p>
        <input name="key" type="password" aria-label="API key" autocomplete="off" required autofocus />
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

/** The request of an answer; without one, that of the last answer shown, or else an example. */
function RawRequest() {
  const [language, setLanguage] = useState<"curl" | "Python">("curl");
  const asked = conversation.value.messages[dialogSubject.value];
  const answer = asked ?? shown.value.findLast(({ role }) => role === "assistant");
  let text: string;
  try {
    const body = answer ? bodyOf(answer) : exampleBody();
    text = language === "curl" ? asCurl(body) : asPython(body);
  } catch (error) {
    text = (error as Error).message;
  }
  const origin = !answer
    ? "An example with the settings of this chat."
    : answer.request
      ? "As it was sent for this answer."
      : "With the settings of today: those of this answer were not kept.";
  return (
    <Dialog title="Request" onClose={close} wide>
      <div class="tabs" role="group" aria-label="Language">
        {(["curl", "Python"] as const).map((name) => (
          <button type="button" key={name} aria-pressed={name === language} onClick={() => setLanguage(name)}>
            {name}
          </button>
        ))}
      </div>
      <p class="faint origin">{origin}</p>
      <Code text={text} language={language === "curl" ? "bash" : "python"} />
    </Dialog>
  );
}

/** The body that an answer has answered. */
function bodyOf(answer: Message): JsonObject {
  return chatBody(answer.request ?? requestOf(conversation.value), pathTo(conversation.value, answer.parent));
}

function exampleBody(): JsonObject {
  const body = chatBody(requestOf(conversation.value), shown.value);
  return shown.value.length ? body : { ...body, messages: [...(body.messages as JsonObject[]), HELLO] };
}

/** What to show beside an answer. */
function Comparison() {
  const message = conversation.value.messages[dialogSubject.value];
  if (!message) return null;
  const own = message.model ?? modelOf(conversation.value);
  const siblings = childrenOf(conversation.value, message.parent).filter(({ id }) => id !== message.id);
  const isGreedy = message.request?.fields.temperature === 0;
  const begin = (model: string) => () => {
    close();
    compare(message, model);
  };
  return (
    <Dialog title="Compare this answer" onClose={close}>
      <p>A second answer to the same question is shown beside it; you go on with the one that you like.</p>
      <div class="choices">
        <button type="button" disabled={isGreedy} onClick={begin(own)}>
          With another seed
        </button>
        {isGreedy && <p class="faint">At temperature 0 every seed gives the same answer.</p>}
        {models.value
          .filter(({ id }) => id !== own)
          .map(({ id }) => (
            <button type="button" key={id} onClick={begin(id)}>
              With {id}
            </button>
          ))}
        {siblings.map((sibling) => (
          <button
            type="button"
            key={sibling.id}
            onClick={() => {
              close();
              beside.value = [sibling.id, message.id];
            }}
          >
            With branch {branchNumber(sibling)}
          </button>
        ))}
      </div>
      {models.value.length < 2 && <p class="faint">To compare with another model, load one: More, Models.</p>}
    </Dialog>
  );
}

function branchNumber({ id, parent }: Message): number {
  return childrenOf(conversation.value, parent).findIndex((sibling) => sibling.id === id) + 1;
}

const HELLO = { role: "user", content: "Hello!" };

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
