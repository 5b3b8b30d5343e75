// The page: the list on the left, the conversation, the settings on the right.

import { useEffect } from "preact/hooks";
import { regenerate, stop } from "../answering";
import { needsKey } from "../api";
import type { Setup } from "../conversation";
import { asJson, asMarkdown, download, fileName } from "../exchange";
import { showsProbabilities, type Theme, theme } from "../preferences";
import {
  changeSetup,
  closeCoveringPanels,
  connect,
  conversation,
  dialog,
  dialogSubject,
  hasKeyProblem,
  isBusy,
  isConnecting,
  isUnloaded,
  modelOf,
  models,
  notice,
  serverProblem,
  settingsOpen,
  shown,
  sidebarOpen,
} from "../state";
import { Composer } from "./composer";
import { Dialogs } from "./dialogs";
import { IconButton } from "./icons";
import { SettingsPanel } from "./settings";
import { newChat, Sidebar } from "./sidebar";
import { Thread } from "./thread";

export function App() {
  useEffect(() => {
    document.addEventListener("keydown", onKey);
    return () => document.removeEventListener("keydown", onKey);
  }, []);
  useEffect(() => {
    document.title = conversation.value.title || "genserve";
  }, [conversation.value.title]);
  return (
    <div class="app">
      {sidebarOpen.value && <Sidebar />}
      <main>
        {shown.value.length > 0 && <h1 class="only-spoken">{conversation.value.title}</h1>}
        <Header />
        <Problem />
        <Thread />
        <Composer />
      </main>
      {settingsOpen.value && <SettingsPanel />}
      {(sidebarOpen.value || settingsOpen.value) && (
        <button type="button" class="shade" aria-label="Close" tabIndex={-1} onClick={closeCoveringPanels} />
      )}
      <Dialogs />
      <Notice />
      <Progress />
    </div>
  );
}

function Header() {
  return (
    <header>
      {!sidebarOpen.value && (
        <IconButton
          icon="menu"
          label="Conversations"
          keys="Alt+L"
          onClick={() => (sidebarOpen.value = true)}
        />
      )}
      <ModelPicker />
      <span class="space" />
      <button
        type="button"
        class="toggle"
        aria-pressed={showsProbabilities.value}
        aria-label="Token probabilities"
        title="Token probabilities (Alt+P)"
        onClick={() => (showsProbabilities.value = !showsProbabilities.value)}
      >
        <i class="level-0" />
        <i class="level-2" />
        <i class="level-4" />
        <span>Probabilities</span>
      </button>
      <IconButton
        icon="sliders"
        label="Settings"
        class={isChanged(conversation.value) ? "is-changed" : ""}
        keys="Alt+S"
        pressed={settingsOpen.value}
        onClick={() => (settingsOpen.value = !settingsOpen.value)}
      />
      <More />
    </header>
  );
}

function ModelPicker() {
  const model = modelOf(conversation.value);
  return (
    <select
      class="model"
      aria-label="Model"
      value={model}
      disabled={!models.value.length}
      onPointerDown={() => connect()}
      onChange={(event) => changeSetup({ model: event.currentTarget.value })}
    >
      {!models.value.length && <option value={model}>No model</option>}
      {models.value.map(({ id }) => (
        <option key={id} value={id}>
          {isUnloaded(id) ? `${id} (not loaded)` : id}
        </option>
      ))}
    </select>
  );
}

/** Whether a conversation has settings of its own. */
function isChanged({ system, params, tools }: Setup): boolean {
  return Boolean(system.trim() || tools.trim() || Object.keys(params).length);
}

const THEMES: Record<Theme, Theme> = { auto: "light", light: "dark", dark: "auto" };
const THEME_NAMES: Record<Theme, string> = { auto: "as the system", light: "light", dark: "dark" };

/** The menu of what is needed less often. */
function More() {
  const exported = (kind: "json" | "md") => () => {
    const { value } = conversation;
    const [type, text] =
      kind === "json" ? ["application/json", asJson([value])] : ["text/markdown", asMarkdown(value)];
    download(fileName(value.title, kind), type, text);
  };
  const raw = () => {
    dialogSubject.value = "";
    dialog.value = "raw";
  };
  const items: [string, () => void][] = [
    ["Request as curl and Python", raw],
    ["Export as Markdown", exported("md")],
    ["Export as JSON", exported("json")],
    [`Colours: ${THEME_NAMES[theme.value]}`, () => (theme.value = THEMES[theme.value])],
    ["Models", () => (dialog.value = "models")],
    ["API key", () => (dialog.value = "key")],
    ["Keyboard shortcuts", () => (dialog.value = "shortcuts")],
  ];
  return (
    <>
      <button type="button" class="icon-button" popovertarget="more" aria-label="More" title="More">
        <svg class="icon" viewBox="0 0 24 24" aria-hidden="true">
          <path d="M5 12h.01M12 12h.01M19 12h.01" stroke-width="3" />
        </svg>
      </button>
      <div id="more" class="menu" popover="auto">
        {items.map(([label, act]) => (
          <button
            type="button"
            key={label}
            popovertarget={label.startsWith("Colours") ? undefined : "more"}
            onClick={act}
          >
            {label}
          </button>
        ))}
      </div>
    </>
  );
}

/** What keeps the page from chatting, which it tries to end by itself. */
function Problem() {
  if (isConnecting.value) return null;
  const isUnasked = needsKey.value || hasKeyProblem.value;
  const text = serverProblem.value || (models.value.length ? "" : "No text model is loaded on this server.");
  if (!text) return null;
  return (
    <div class="error banner" role="alert">
      <p>
        {text}
        {!isUnasked && " This page tries again every few seconds."}
      </p>
      {isUnasked ? (
        <button type="button" onClick={() => (dialog.value = "key")}>
          Enter the key
        </button>
      ) : (
        <span class="banner-actions">
          {!serverProblem.value && (
            <button type="button" onClick={() => (dialog.value = "models")}>
              Load a model
            </button>
          )}
          <button type="button" onClick={() => connect()}>
            Try now
          </button>
        </span>
      )}
    </div>
  );
}

/** Announces the beginning and the end of an answer to screen readers. */
function Progress() {
  const last = shown.value.at(-1);
  const ended = last?.role === "assistant" ? "The answer is complete." : "";
  return <output class="only-spoken">{isBusy.value ? "The model is answering." : ended}</output>;
}

const NOTICE_MS = 5000;

function Notice() {
  const shownNotice = notice.value;
  useEffect(() => {
    if (!shownNotice) return;
    const timer = setTimeout(() => (notice.value = null), NOTICE_MS);
    return () => clearTimeout(timer);
  }, [shownNotice]);
  const undo = () => {
    shownNotice?.undo?.();
    notice.value = null;
  };
  return (
    <div class="notice" role="status">
      {shownNotice?.text}
      {shownNotice?.undo && (
        <button type="button" onClick={undo}>
          Undo
        </button>
      )}
    </div>
  );
}

const SHORTCUTS: Record<string, () => void> = {
  KeyN: newChat,
  KeyL: () => (sidebarOpen.value = !sidebarOpen.value),
  KeyS: () => (settingsOpen.value = !settingsOpen.value),
  KeyP: () => (showsProbabilities.value = !showsProbabilities.value),
  KeyK: () => (dialog.value = "shortcuts"),
  KeyR: () => {
    const last = shown.value.at(-1);
    if (last?.role === "assistant") regenerate(last);
  },
};

function onKey(event: KeyboardEvent): void {
  if (event.key === "Escape" && !document.querySelector("dialog[open], :popover-open")) {
    if (isBusy.value) stop();
    else closeCoveringPanels();
    return;
  }
  // By the key's place, since Alt changes its character on a Mac.
  const shortcut = event.altKey && !event.ctrlKey && !event.metaKey && SHORTCUTS[event.code];
  if (!shortcut) return;
  event.preventDefault();
  shortcut();
}
