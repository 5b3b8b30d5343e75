// The tokens of an answer, coloured by probability, and the alternatives at each.

import { useEffect, useRef, useState } from "preact/hooks";
import { continueFrom } from "../answering";
import type { Message, Token } from "../conversation";
import { isBusy } from "../state";
import { IconButton } from "./icons";

// From the surest colour to the least sure, by the least probability of each.
const LEVELS = [0.9, 0.6, 0.3, 0.1, 0.02, 0];
const NO_TEXT = "token_id:"; // how the server names a token without a text of its own

export function TokenView({ message, tokens }: { message: Message; tokens: Token[] }) {
  const [selected, setSelected] = useState<number | null>(null);
  const box = useRef<HTMLDivElement>(null);
  const focusToken = (index: number) => {
    const next = box.current?.querySelectorAll<HTMLElement>(".token")[index];
    next?.focus();
  };
  const onKeyDown = (event: KeyboardEvent) => {
    const at = Number((event.target as HTMLElement).dataset.index);
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 }[event.key];
    if (step === undefined || Number.isNaN(at)) return;
    event.preventDefault();
    focusToken(Math.max(0, Math.min(tokens.length - 1, at + step)));
  };
  const close = () => {
    if (selected !== null) focusToken(selected);
    setSelected(null);
  };
  const token = selected === null ? undefined : tokens[selected];
  return (
    <div class="token-view">
      <div
        class="tokens"
        ref={box}
        role="group"
        aria-label="Tokens; arrows move, Enter shows alternatives"
        onKeyDown={onKeyDown}
      >
        {tokens.map((one, index) => (
          <TokenButton
            key={index}
            token={one}
            index={index}
            isSelected={index === selected}
            isEntry={index === (selected ?? 0)}
            isEnd={index === tokens.length - 1 && message.finish === "stop"}
            onSelect={() => setSelected(index === selected ? null : index)}
          />
        ))}
        {selected !== null && token && (
          <Alternatives message={message} token={token} index={selected} box={box} onClose={close} />
        )}
      </div>
      <Legend tokens={tokens} />
    </div>
  );
}

interface TokenButtonProps {
  token: Token;
  index: number;
  isSelected: boolean;
  isEntry: boolean; // the one that Tab reaches
  isEnd: boolean; // it ended the answer
  onSelect: () => void;
}

function TokenButton({ token, index, isSelected, isEntry, isEnd, onSelect }: TokenButtonProps) {
  const text = token.text.startsWith(NO_TEXT) ? "" : token.text;
  const classes = ["token", `level-${levelOf(token.logprob)}`];
  if (token.chosen) classes.push("chosen");
  if (!text) classes.push("silent");
  if (text.startsWith("\n")) classes.push("breaks");
  // Spans, since the text of buttons does not wrap.
  return (
    <span
      class={classes.join(" ")}
      role="button"
      tabIndex={isEntry ? 0 : -1}
      data-index={index}
      aria-expanded={isSelected}
      aria-haspopup="dialog"
      title={`${percent(token.logprob)}${token.chosen ? ", your choice" : ""}`}
      onClick={onSelect}
      onKeyDown={(event) => {
        if (event.key !== "Enter" && event.key !== " ") return;
        event.preventDefault();
        onSelect();
      }}
    >
      {text || (isEnd ? "end" : "·")}
    </span>
  );
}

interface AlternativesProps {
  message: Message;
  token: Token;
  index: number;
  box: { current: HTMLElement | null };
  onClose: () => void;
}

/** The most likely tokens at one place, below the token; a click continues from one. */
function Alternatives({ message, token, index, box, onClose }: AlternativesProps) {
  const panel = useRef<HTMLDivElement>(null);
  useEffect(() => {
    const anchor = box.current?.querySelectorAll<HTMLElement>(".token")[index];
    if (!anchor || !panel.current || !box.current) return;
    const [line] = Array.from(anchor.getClientRects()).slice(-1);
    const outer = box.current.getBoundingClientRect();
    if (!line) return;
    const room = outer.width - panel.current.offsetWidth;
    panel.current.style.left = `${Math.max(0, Math.min(line.left - outer.left, room))}px`;
    panel.current.style.top = `${line.bottom - outer.top + 6}px`;
    panel.current.scrollIntoView({ block: "nearest" });
    panel.current.querySelector<HTMLElement>("button:not(:disabled)")?.focus({ preventScroll: true });
  }, [index]);
  useEffect(() => {
    const onPointer = (event: PointerEvent) => {
      const target = event.target as HTMLElement;
      if (!panel.current?.contains(target) && !target.closest(".token")) onClose();
    };
    document.addEventListener("pointerdown", onPointer);
    return () => document.removeEventListener("pointerdown", onPointer);
  });
  const isListed = token.top.some(([text]) => text === token.text);
  const rows: Token["top"] =
    isListed || token.logprob === null ? token.top : [...token.top, [token.text, token.logprob]];
  return (
    <div
      ref={panel}
      class="alternatives"
      role="dialog"
      aria-label={`Alternatives to ${visible(token.text)}`}
      onKeyDown={(event) => {
        if (event.key === "Escape") {
          event.stopPropagation();
          onClose();
        }
        moveFocus(event);
      }}
    >
      <div class="alternatives-head">
        <span>
          <code>{visible(token.text)}</code> {percent(token.logprob)}
          {token.chosen && " · your choice"}
        </span>
        <IconButton icon="close" label="Close" onClick={onClose} />
      </div>
      <p class="faint">
        {rows.length > 1 ? "Continue from another token:" : "The server reported no alternatives."}
      </p>
      <ul>
        {rows.map(([text, logprob]) => (
          <li key={text}>
            <Alternative
              text={text}
              logprob={logprob}
              isSampled={text === token.text}
              onChoose={() => {
                onClose();
                continueFrom(message, index, [text, logprob]);
              }}
            />
          </li>
        ))}
      </ul>
    </div>
  );
}

interface AlternativeProps {
  text: string;
  logprob: number;
  isSampled: boolean; // it is the token that the answer has
  onChoose: () => void;
}

function Alternative({ text, logprob, isSampled, onChoose }: AlternativeProps) {
  const hasText = text !== "" && !text.startsWith(NO_TEXT);
  const title = isSampled
    ? "The token of this answer"
    : hasText
      ? "Continue from here with this token"
      : "A control token, or a part of a character: it has no text";
  return (
    <button
      type="button"
      class={isSampled ? "sampled" : ""}
      disabled={isSampled || !hasText || isBusy.value}
      title={title}
      onClick={onChoose}
    >
      <code>{visible(text)}</code>
      <meter min={0} max={1} value={Math.exp(logprob)} aria-hidden="true" />
      <span class="percent">{percent(logprob)}</span>
    </button>
  );
}

/** Move the focus between the alternatives. */
function moveFocus(event: KeyboardEvent & { currentTarget: HTMLElement }): void {
  if (event.key !== "ArrowDown" && event.key !== "ArrowUp") return;
  event.preventDefault();
  event.stopPropagation();
  const buttons = [...event.currentTarget.querySelectorAll<HTMLElement>("li button:not(:disabled)")];
  const at = buttons.indexOf(document.activeElement as HTMLElement) + (event.key === "ArrowDown" ? 1 : -1);
  buttons[(at + buttons.length) % buttons.length]?.focus();
}

/** What the colours mean, and how sure the model was on the whole. */
function Legend({ tokens }: { tokens: Token[] }) {
  const known = tokens.map(({ logprob }) => logprob).filter((logprob) => logprob !== null);
  const mean = known.reduce((sum, logprob) => sum + logprob, 0) / (known.length || 1);
  const perplexity = Math.exp(-mean);
  return (
    <div class="legend">
      {LEVELS.slice(0, -1).map((least, level) => (
        <span key={least} class={`level-${level}`}>
          ≥ {least * 100} %
        </span>
      ))}
      <span class={`level-${LEVELS.length - 1}`}>less</span>
      {known.length > 0 && (
        <span class="faint" title="The exponential of the mean negative log-probability of its tokens">
          perplexity {perplexity.toFixed(perplexity < 10 ? 2 : 0)}
        </span>
      )}
    </div>
  );
}

function levelOf(logprob: number | null): number | "unknown" {
  return logprob === null ? "unknown" : LEVELS.findIndex((least) => Math.exp(logprob) >= least);
}

function percent(logprob: number | null): string {
  if (logprob === null) return "unknown";
  const share = Math.exp(logprob) * 100;
  if (share < 0.01) return "< 0.01 %";
  return `${share.toFixed(share < 1 ? 2 : share < 99.95 ? 1 : 0)} %`;
}

/** A token's text with its whitespace shown. */
function visible(text: string): string {
  if (text.startsWith(NO_TEXT)) return `token ${text.slice(NO_TEXT.length)}`;
  if (!text) return "no text";
  return text.replaceAll(" ", "␣").replaceAll("\n", "⏎").replaceAll("\t", "⇥");
}
