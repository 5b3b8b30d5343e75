// The list of conversations.

import { useEffect, useRef, useState } from "preact/hooks";
import { asJson, download, fromJson } from "../exchange";
import { type Hit, search } from "../search";
import {
  addConversations,
  closeCoveringPanels,
  conversation,
  dialog,
  dialogSubject,
  flush,
  notice,
  openConversation,
  openMessage,
  renameConversation,
  running,
  sidebarOpen,
  startConversation,
  summaries,
} from "../state";
import { loadAllConversations, type Summary } from "../storage";
import { Icon, IconButton } from "./icons";

const SEARCH_FROM = 4; // conversations
const TYPING_MS = 200;

export function Sidebar() {
  const [query, setQuery] = useState("");
  const hits = useSearch(query);
  return (
    <nav class="sidebar" aria-label="Conversations">
      <div class="sidebar-top">
        <strong class="brand">genserve</strong>
        <IconButton
          icon="close"
          label="Close the list"
          keys="Alt+L"
          onClick={() => (sidebarOpen.value = false)}
        />
      </div>
      <button type="button" class="wide" onClick={newChat} title="New chat (Alt+N)">
        <Icon name="plus" /> New chat
      </button>
      {(query || summaries.value.length >= SEARCH_FROM) && (
        <input
          type="search"
          placeholder="Search conversations"
          aria-label="Search conversations"
          value={query}
          onInput={(event) => setQuery(event.currentTarget.value)}
        />
      )}
      <ul class="conversations">
        {hits
          ? hits.map((hit) => <Found key={`${hit.id} ${hit.message}`} hit={hit} />)
          : summaries.value.map((summary) => <Entry key={summary.id} summary={summary} />)}
        {hits?.length === 0 && <li class="faint">Nothing is found.</li>}
        {!summaries.value.length && <li class="faint">Conversations stay in this browser.</li>}
      </ul>
      <Files />
    </nav>
  );
}

/** What is found for a query, the newest conversation first; null: nothing is searched. */
function useSearch(query: string): Hit[] | null {
  const [hits, setHits] = useState<Hit[] | null>(null);
  const words = query.trim();
  useEffect(() => {
    if (!words) {
      setHits(null);
      return;
    }
    let isCurrent = true;
    const timer = setTimeout(async () => {
      await flush();
      const all = await loadAllConversations().catch(() => []);
      if (isCurrent) setHits(search(all, words));
    }, TYPING_MS);
    return () => {
      isCurrent = false;
      clearTimeout(timer);
    };
  }, [words, summaries.value]);
  return hits;
}

function Found({ hit: { id, title, message, before, match, after } }: { hit: Hit }) {
  const open = async () => {
    await openMessage(id, message);
    closeCoveringPanels();
  };
  return (
    <li>
      <button type="button" class="title found" onClick={open}>
        {title || "Untitled"}
        {message && (
          <span class="faint">
            {before}
            <mark>{match}</mark>
            {after}
          </span>
        )}
      </button>
    </li>
  );
}

export function newChat(): void {
  startConversation();
  closeCoveringPanels();
}

function Entry({ summary: { id, title } }: { summary: Summary }) {
  const [renames, setRenames] = useState(false);
  if (renames) {
    const done = (text: string) => {
      setRenames(false);
      if (text.trim()) renameConversation(id, text.trim());
    };
    return (
      <li>
        <input
          aria-label="Title"
          value={title}
          ref={(input) => input?.focus()}
          onBlur={(event) => done(event.currentTarget.value)}
          onKeyDown={(event) => {
            if (event.key === "Enter") done(event.currentTarget.value);
            if (event.key === "Escape") setRenames(false);
          }}
        />
      </li>
    );
  }
  const remove = () => {
    dialogSubject.value = id;
    dialog.value = "delete";
  };
  const isOpen = id === conversation.value.id;
  const open = () => {
    openConversation(id);
    closeCoveringPanels();
  };
  return (
    <li class={isOpen ? "current" : ""}>
      <button
        type="button"
        class="title"
        aria-current={isOpen ? "page" : undefined}
        title={title}
        onClick={open}
      >
        {id in running.value && <span class="dot" role="img" aria-label="is being answered" />}
        {title || "Untitled"}
      </button>
      <span class="entry-actions">
        <IconButton icon="edit" label={`Rename ${title}`} onClick={() => setRenames(true)} />
        <IconButton icon="trash" label={`Delete ${title}`} onClick={remove} />
      </span>
    </li>
  );
}

/** Export of all conversations, and import. */
function Files() {
  const input = useRef<HTMLInputElement>(null);
  const exportAll = async () => {
    await flush();
    download("genserve-conversations.json", "application/json", asJson(await loadAllConversations()));
  };
  const read = async (file: File | undefined) => {
    try {
      if (file) await addConversations(fromJson(await file.text()));
    } catch (error) {
      notice.value = { text: (error as Error).message };
    }
  };
  return (
    <div class="sidebar-files">
      <button
        type="button"
        class="small"
        title="Export all conversations"
        disabled={!summaries.value.length}
        onClick={exportAll}
      >
        Export
      </button>
      <button type="button" class="small" onClick={() => input.current?.click()}>
        Import
      </button>
      <input
        ref={input}
        type="file"
        accept="application/json,.json"
        hidden
        aria-label="File with conversations"
        onChange={(event) => {
          read(event.currentTarget.files?.[0]);
          event.currentTarget.value = "";
        }}
      />
      <a href="dashboard" class="small">
        Dashboard
      </a>
      <a href="docs" class="small">
        API
      </a>
    </div>
  );
}
