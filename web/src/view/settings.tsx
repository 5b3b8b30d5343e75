// The settings of a conversation: system prompt, sampling, tools.

import { useState } from "preact/hooks";
import { toolNames, toolsProblem } from "../chat_request";
import type { Settings } from "../conversation";
import { apiKey, asksProbabilities, DEFAULTS, newSettings, presets } from "../preferences";
import { changeSetup, connect, conversation, fields, modelOf, settingsOpen } from "../state";
import { FieldControl } from "./field_control";
import { IconButton } from "./icons";

export function SettingsPanel() {
  return (
    <aside class="settings" aria-label="Settings">
      <div class="settings-top">
        <h2>Settings</h2>
        <IconButton
          icon="close"
          label="Close settings"
          keys="Alt+S"
          onClick={() => (settingsOpen.value = false)}
        />
      </div>
      <SystemPrompt />
      <Sampling />
      <Tools />
      <OtherFields />
      <Presets />
      <NewChats />
      <Page />
    </aside>
  );
}

function SystemPrompt() {
  return (
    <section>
      <h3>
        <label for="system">System prompt</label>
      </h3>
      <textarea
        id="system"
        rows={3}
        placeholder="You are a helpful assistant."
        value={conversation.value.system}
        onInput={(event) => changeSetup({ system: event.currentTarget.value })}
      />
    </section>
  );
}

function Sampling() {
  const common = fields.value.filter((field) => field.isCommon);
  const numChanged = Object.keys(conversation.value.params).length;
  return (
    <section>
      <h3>
        Sampling
        {numChanged > 0 && (
          <button type="button" class="small" onClick={() => changeSetup({ params: {} })}>
            Reset all {numChanged}
          </button>
        )}
      </h3>
      {common.map((field) => (
        <FieldControl key={field.name} field={field} />
      ))}
    </section>
  );
}

function OtherFields() {
  const [filter, setFilter] = useState("");
  const others = fields.value.filter((field) => !field.isCommon);
  const found = others.filter(({ name, description }) =>
    `${name} ${description}`.toLowerCase().includes(filter),
  );
  const numSet = others.filter(({ name }) => name in conversation.value.params).length;
  if (!others.length) return null;
  return (
    <details>
      <summary>
        {others.length} more fields{numSet > 0 && `, ${numSet} set`}
      </summary>
      <input
        type="search"
        placeholder="Search fields"
        aria-label="Search fields"
        value={filter}
        onInput={(event) => setFilter(event.currentTarget.value.toLowerCase())}
      />
      {sections(found).map(([section, members]) => (
        <div key={section}>
          {section && <h4>{section}</h4>}
          {members.map((field) => (
            <FieldControl key={field.name} field={field} />
          ))}
        </div>
      ))}
    </details>
  );
}

function sections(list: typeof fields.value): [string, typeof fields.value][] {
  const names = [...new Set(list.map(({ section }) => section))];
  return names.map((name) => [name, list.filter(({ section }) => section === name)]);
}

const EXAMPLE = JSON.stringify(
  [
    {
      type: "function",
      function: {
        name: "get_weather",
        description: "Get the current weather of a city.",
        parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
      },
    },
  ],
  null,
  2,
);

function Tools() {
  const { tools, toolChoice } = conversation.value;
  const names = toolNames(tools);
  const problem = toolsProblem(tools);
  return (
    <section>
      <h3>
        <label for="tools">Tools</label>
        {!tools.trim() && (
          <button type="button" class="small" onClick={() => changeSetup({ tools: EXAMPLE })}>
            Example
          </button>
        )}
      </h3>
      <textarea
        id="tools"
        class="mono"
        rows={tools.trim() ? 10 : 2}
        spellcheck={false}
        placeholder="A JSON list of functions, as in OpenAI's field tools"
        value={tools}
        aria-invalid={problem !== ""}
        onInput={(event) => changeSetup({ tools: event.currentTarget.value })}
      />
      {problem && <p class="problem">{problem}</p>}
      {names.length > 0 && (
        <label class="row">
          Choice
          <select
            value={toolChoice}
            onChange={(event) => changeSetup({ toolChoice: event.currentTarget.value })}
          >
            <option value="auto">auto: the model decides</option>
            <option value="required">required: one at least</option>
            <option value="none">none</option>
            {names.map((name) => (
              <option key={name}>{name}</option>
            ))}
          </select>
        </label>
      )}
    </section>
  );
}

/** Settings that were kept under a name, for this model. */
function Presets() {
  const model = modelOf(conversation.value);
  const ofModel = presets.value.filter((preset) => preset.model === model);
  const own = settingsText(conversation.value);
  const used = ofModel.find(({ settings }) => settingsText(settings) === own);
  const others = (name: string) => presets.value.filter((one) => one.model !== model || one.name !== name);
  const save = (event: SubmitEvent & { currentTarget: HTMLFormElement }) => {
    event.preventDefault();
    const form = event.currentTarget;
    const name = String(new FormData(form).get("name")).trim();
    const { system, params, tools, toolChoice } = conversation.value;
    if (name)
      presets.value = [...others(name), { model, name, settings: { system, params, tools, toolChoice } }];
    form.reset();
  };
  return (
    <section>
      <h3>
        <label for="preset">Presets of {model || "the model"}</label>
      </h3>
      <div class="row">
        <select
          id="preset"
          value={used?.name ?? ""}
          disabled={!ofModel.length}
          onChange={(event) => {
            const found = ofModel.find(({ name }) => name === event.currentTarget.value);
            changeSetup(found?.settings ?? DEFAULTS);
          }}
        >
          <option value="">{ofModel.length ? "none" : "none yet"}</option>
          {ofModel.map(({ name }) => (
            <option key={name}>{name}</option>
          ))}
        </select>
        {used && (
          <button type="button" class="small" onClick={() => (presets.value = others(used.name))}>
            Delete
          </button>
        )}
      </div>
      <form class="row" onSubmit={save}>
        <input name="name" placeholder="Name" aria-label="Name of a new preset" maxLength={40} required />
        <button type="submit">Save</button>
      </form>
      <p class="faint">System prompt, parameters and tools under a name, for this model.</p>
    </section>
  );
}

/** What new chats begin with, where that or this chat is not at the defaults. */
function NewChats() {
  const [own, ofNew, defaults] = [conversation.value, newSettings.value, DEFAULTS].map(settingsText);
  if (own === defaults && ofNew === defaults) return null;
  const areKept = own === ofNew;
  const { system, params, tools, toolChoice } = areKept ? DEFAULTS : conversation.value;
  return (
    <section>
      <h3>New chats</h3>
      <p class="faint">
        {areKept
          ? "New chats begin with the settings of this one."
          : ofNew === defaults
            ? "These settings are for this chat; new chats begin with the defaults."
            : "These settings are for this chat; new chats begin with others, which you kept."}
      </p>
      <button
        type="button"
        class="stack"
        onClick={() => (newSettings.value = { system, params, tools, toolChoice })}
      >
        {areKept ? "Begin new chats with the defaults" : "Begin new chats with these"}
      </button>
    </section>
  );
}

function settingsText({ system, params, tools, toolChoice }: Settings): string {
  return JSON.stringify([system, params, tools, toolChoice]);
}

function Page() {
  return (
    <section>
      <h3>This page</h3>
      <label class="row">
        <input
          type="checkbox"
          checked={asksProbabilities.value}
          onChange={(event) => (asksProbabilities.value = event.currentTarget.checked)}
        />
        Ask for token probabilities
      </label>
      <form onSubmit={(event) => event.preventDefault()}>
        <label class="stack">
          API key
          <input
            type="password"
            autocomplete="off"
            value={apiKey.value}
            placeholder="if the server has one"
            onChange={(event) => {
              apiKey.value = event.currentTarget.value.trim();
              connect();
            }}
          />
        </label>
      </form>
      <p class="faint">The key and all conversations stay in this browser.</p>
    </section>
  );
}
