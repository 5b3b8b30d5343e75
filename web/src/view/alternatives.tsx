// The alternatives at a token, from which an answer can go on.

import type { RefObject } from "preact";
import { useEffect, useRef } from "preact/hooks";
import { continueFrom, endAt } from "../answering";
import type { Message, Token } from "../conversation";
import { isBusy, modelOf } from "../state";
import { isEnd, isSilent, loadNames, nameOf } from "../token_names";
import { IconButton } from "./icons";

interface AlternativesProps {
  message: Message;
  token: Token;
  index: number; // of the token
  box: { current: HTMLElement | null }; // with the tokens
  onClose: () => void;
}

/** The most likely tokens at one place, below the token. */
export function Alternatives({ message, token, index, box, onClose }: AlternativesProps) {
  const panel = useRef<HTMLDivElement>(null);
  const model = message.model || modelOf({ model: "" });
  const isListed = token.top.some(([text]) => text === token.text);
  const rows: Token["top"] =
    isListed || token.logprob === null ? token.top : [...token.top, [token.text, token.logprob]];
  useEffect(() => {
    if (panel.current && box.current) place(panel.current, box.current, index);
    loadNames(
      model,
      rows.map(([text]) => text),
    );
  }, [index]);
  useEffect(
    () => () => {
      if (box.current) box.current.style.minHeight = "";
    },
    [],
  );
  useOutsidePress(panel, onClose);
  const choose = ([text, logprob]: [string, number]) => {
    onClose();
    if (isSilent(text)) endAt(message, index, logprob);
    else continueFrom(message, index, [text, logprob]);
  };
  const ended = index === (message.tokens?.length ?? 0) - 1 && message.finish === "stop";
  const shown = token.text === "" && ended ? "end of answer" : visible(model, token.text);
  return (
    <div
      ref={panel}
      class="alternatives"
      role="dialog"
      aria-label={`Alternatives to ${shown}`}
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
          <code>{shown}</code> {percent(token.logprob)}
          {token.chosen && " · your choice"}
        </span>
        <IconButton icon="close" label="Close" onClick={onClose} />
      </div>
      <p class="faint">
        {rows.length > 1 ? "Continue from another token:" : "The server reported no alternatives."}
      </p>
      <ul>
        {rows.map((row) => (
          <li key={row[0]}>
            <Alternative
              name={visible(model, row[0])}
              logprob={row[1]}
              effect={effectOf(model, row[0])}
              sampledAs={row[0] === token.text ? shown : undefined}
              onChoose={() => choose(row)}
            />
          </li>
        ))}
      </ul>
    </div>
  );
}

interface AlternativeProps {
  name: string;
  logprob: number;
  effect: string; // of a choice; empty: it cannot be chosen
  sampledAs?: string; // it is the token that the answer has, and this is its name there
  onChoose: () => void;
}

function Alternative({ name, logprob, effect, sampledAs, onChoose }: AlternativeProps) {
  const isSampled = sampledAs !== undefined;
  const title = isSampled
    ? "The token of this answer"
    : effect || "An answer cannot continue from it: it has no text";
  return (
    <button
      type="button"
      class={isSampled ? "sampled" : ""}
      disabled={isSampled || !effect || isBusy.value}
      title={title}
      onClick={onChoose}
    >
      <code>{sampledAs ?? name}</code>
      <meter min={0} max={1} value={Math.exp(logprob)} aria-hidden="true" />
      <span class="percent">{percent(logprob)}</span>
    </button>
  );
}

function effectOf(model: string, text: string): string {
  if (isEnd(model, text)) return "End the answer here";
  return isSilent(text) ? "" : "Continue from here with this token";
}

function useOutsidePress(panel: RefObject<HTMLElement | null>, onPress: () => void): void {
  useEffect(() => {
    const onPointer = (event: PointerEvent) => {
      const target = event.target as HTMLElement;
      if (!panel.current?.contains(target) && !target.closest(".token")) onPress();
    };
    document.addEventListener("pointerdown", onPointer);
    return () => document.removeEventListener("pointerdown", onPointer);
  });
}

const GAP_PX = 6;

/** Put the panel below its token and focus it; the box grows, so that it covers nothing but tokens. */
function place(panel: HTMLElement, box: HTMLElement, index: number): void {
  const lines = box.querySelectorAll<HTMLElement>(".token")[index]?.getClientRects() ?? [];
  const [line] = Array.from(lines).slice(-1);
  if (!line) return;
  const outer = box.getBoundingClientRect();
  const room = outer.width - panel.offsetWidth;
  panel.style.left = `${Math.max(0, Math.min(line.left - outer.left, room))}px`;
  panel.style.top = `${line.bottom - outer.top + GAP_PX}px`;
  box.style.minHeight = `${panel.offsetTop + panel.offsetHeight + GAP_PX}px`;
  panel.scrollIntoView({ block: "nearest" });
  panel.querySelector<HTMLElement>("button:not(:disabled)")?.focus({ preventScroll: true });
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

export function percent(logprob: number | null): string {
  if (logprob === null) return "unknown";
  const share = Math.exp(logprob) * 100;
  if (share < 0.01) return "< 0.01 %";
  return `${share.toFixed(share < 1 ? 2 : share < 99.95 ? 1 : 0)} %`;
}

/** A token's text with its whitespace shown, or its name. */
function visible(model: string, text: string): string {
  if (isEnd(model, text)) return "end of answer";
  if (isSilent(text)) return nameOf(model, text);
  return text.replaceAll(" ", "␣").replaceAll("\n", "⏎").replaceAll("\t", "⇥");
}
