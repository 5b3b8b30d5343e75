// The messages of the shown branch, which scrolls with the answer until the reader scrolls up.

import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { send } from "../answering";
import { conversation, isBusy, modelOf, models, serverProblem, shown } from "../state";
import { Icon } from "./icons";
import { MessageView } from "./message";

const NEAR_PX = 60;

export function Thread() {
  const scroller = useRef<HTMLDivElement>(null);
  const follows = useRef(true);
  const lastTop = useRef(0);
  const [isAway, setIsAway] = useState(false);
  const messages = shown.value;
  const writes = isBusy.value;

  const onScroll = () => {
    const box = scroller.current;
    if (!box) return;
    const distance = box.scrollHeight - box.scrollTop - box.clientHeight;
    if (box.scrollTop < lastTop.current && distance > 1) follows.current = false;
    if (distance <= 2) follows.current = true;
    lastTop.current = box.scrollTop;
    setIsAway(distance > NEAR_PX);
  };
  const toEnd = () => {
    const box = scroller.current;
    if (!box) return;
    follows.current = true;
    box.scrollTop = box.scrollHeight;
  };
  const wrote = useRef(false);
  useLayoutEffect(() => {
    if (follows.current && (writes || wrote.current)) toEnd();
    wrote.current = writes;
  }, [messages, writes]);
  useEffect(toEnd, [conversation.value.id]); // another conversation shows its end
  useEffect(() => {
    if (writes) toEnd(); // a new answer
  }, [writes]);

  return (
    <div class="thread-area">
      <div
        class="thread"
        ref={scroller}
        onScroll={onScroll}
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
  if (serverProblem.value) return null;
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
