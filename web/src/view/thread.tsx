// The messages of the shown branch, which scrolls with the answer until the reader scrolls up.

import { useEffect, useLayoutEffect, useRef } from "preact/hooks";
import { send } from "../answering";
import { conversation, isBusy, isConnecting, modelOf, models, serverProblem, shown } from "../state";
import { useFollowing } from "./following";
import { Icon } from "./icons";
import { MessageView } from "./message";

export function Thread() {
  const scroller = useRef<HTMLDivElement>(null);
  const { isAway, follows, toEnd, handlers } = useFollowing(scroller);
  const wrote = useRef(false);
  const messages = shown.value;
  const writes = isBusy.value;
  useLayoutEffect(() => {
    const begins = writes && !wrote.current;
    if (begins || (follows.current && (writes || wrote.current))) toEnd();
    wrote.current = writes;
  }, [messages, writes]);
  useEffect(toEnd, [conversation.value.id]); // another conversation shows its end

  return (
    <div class="thread-area">
      <div
        class="thread"
        ref={scroller}
        {...handlers}
        tabIndex={0}
        role="log"
        aria-label="Messages"
        aria-live="off"
      >
        {messages.length ? (
          messages.map((message, index) => (
            <MessageView key={message.id} message={message} isLast={index === messages.length - 1} />
          ))
        ) : (
          <Empty />
        )}
      </div>
      {isAway && messages.length > 0 && (
        <button
          type="button"
          class="to-end"
          onClick={toEnd}
          aria-label="Scroll to the end"
          title="Scroll to the end"
        >
          <Icon name="down" />
        </button>
      )}
    </div>
  );
}

const EXAMPLES = [
  "What is the capital of France?",
  "Explain in three sentences why the sky is blue.",
  "Write a Python function that reverses a string.",
];

function Empty() {
  const name = modelOf(conversation.value);
  const length = models.value.find(({ id }) => id === name)?.max_model_len;
  if (serverProblem.value || isConnecting.value) return null;
  return (
    <div class="welcome">
      <h1>{name ? `Chat with ${name}` : "No text model is loaded"}</h1>
      {length && <p class="faint">Its context has {length.toLocaleString("en")} tokens.</p>}
      {name && (
        <div class="examples">
          {EXAMPLES.map((text) => (
            <button type="button" key={text} onClick={() => send(text)}>
              {text}
            </button>
          ))}
        </div>
      )}
    </div>
  );
}
