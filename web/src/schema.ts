// The fields of a chat request, read from the server's own OpenAPI document.

export type JsonObject = Record<string, unknown>;
export type Kind = "number" | "integer" | "boolean" | "choice" | "texts" | "text" | "json";

/** One field that the settings offer. */
export interface Field {
  name: string;
  kind: Kind;
  description: string;
  default: unknown; // undefined: the document has none
  minimum?: number;
  maximum?: number;
  range: string; // in words
  allows: (value: number) => boolean;
  choices: unknown[];
  section: string;
  isCommon: boolean;
}

interface Schema extends JsonObject {
  type?: string;
  anyOf?: Schema[];
  enum?: unknown[];
  items?: Schema;
  default?: unknown;
  description?: string;
}

// What the page itself writes into requests, or cannot show.
const OWN = new Set([
  ...["messages", "model", "stream", "stream_options", "n", "best_of", "logprobs", "top_logprobs"],
  ...["logprob_token_ids", "prompt_logprobs", "return_token_ids", "return_tokens_as_token_ids"],
  ...[
    "max_completion_tokens",
    "add_generation_prompt",
    "continue_final_message",
    "tools",
    "tool_choice",
    "functions",
    "function_call",
    "return_progress",
    "return_cache_match",
    "return_receipt",
  ],
]);
// The order of the fields that the document marks as common.
const ORDER = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "repetition_penalty", "seed", "stop"];

/** The fields of a chat request; common ones first. */
export function chatFields(document: JsonObject): Field[] {
  const paths = document.paths as Record<string, Record<string, JsonObject>>;
  const operation = paths["/v1/chat/completions"]?.post;
  const body = resolve(dig(operation, "requestBody", "content", "application/json", "schema"), document);
  const fields = Object.entries((body.properties ?? {}) as Record<string, Schema>)
    .filter(([name, schema]) => !OWN.has(name) && !schema.deprecated)
    .map(([name, schema]) => readField(name, schema, document));
  const rank = ({ name }: Field) => (ORDER.includes(name) ? ORDER.indexOf(name) : ORDER.length);
  return fields.sort((one, other) => rank(one) - rank(other));
}

function readField(name: string, schema: Schema, document: JsonObject): Field {
  const cases = (schema.anyOf ?? [schema]).map((one) => resolve(one, document));
  // Where one text stands for a list of it, the list.
  const main = cases.find(isTexts) ?? cases.find((one) => one.type !== "null") ?? schema;
  const merged: Schema = { ...main, ...schema };
  return {
    name,
    kind: kindOf(main),
    description: merged.description ?? "",
    default: merged.default ?? main.default ?? undefined,
    minimum: bound(merged.minimum ?? merged.exclusiveMinimum),
    maximum: bound(merged.maximum ?? merged.exclusiveMaximum),
    range: rangeOf(merged),
    allows: (value) => isWithin(value, merged),
    choices: main.enum ?? [],
    section: (merged["x-section"] as string | undefined) ?? "",
    isCommon: merged["x-common"] === true,
  };
}

function isWithin(value: number, schema: Schema): boolean {
  const low = bound(schema.minimum) ?? Number.NEGATIVE_INFINITY;
  const above = bound(schema.exclusiveMinimum) ?? Number.NEGATIVE_INFINITY;
  const high = bound(schema.maximum) ?? Number.POSITIVE_INFINITY;
  const below = bound(schema.exclusiveMaximum) ?? Number.POSITIVE_INFINITY;
  return value >= low && value > above && value <= high && value < below;
}

const UNLIMITED = 2 ** 31 - 1;

function rangeOf(schema: Schema): string {
  const above = bound(schema.exclusiveMinimum);
  const [low, high] = [
    bound(schema.minimum) ?? above,
    bound(schema.maximum) ?? bound(schema.exclusiveMaximum),
  ];
  const isLowest = low === undefined || low <= -UNLIMITED;
  const from = isLowest ? "" : above === undefined ? `${low}` : `above ${above}`;
  if (high === undefined || high >= UNLIMITED) return from && (above === undefined ? `from ${from}` : from);
  const to = schema.maximum === undefined ? `below ${high}` : `${high}`;
  if (above !== undefined) return `${from}, at most ${to}`;
  return from ? `${from} to ${to}` : `up to ${to}`;
}

function kindOf(schema: Schema): Kind {
  if (schema.enum) return "choice";
  if (schema.type === "number" || schema.type === "integer" || schema.type === "boolean") return schema.type;
  if (isTexts(schema)) return "texts";
  return schema.type === "string" ? "text" : "json";
}

function isTexts(schema: Schema): boolean {
  return schema.type === "array" && schema.items?.type === "string";
}

function resolve(schema: Schema, document: JsonObject): Schema {
  const reference = schema.$ref as string | undefined;
  return reference ? (dig(document, ...reference.slice(2).split("/")) as Schema) : schema;
}

function dig(from: unknown, ...keys: string[]): Schema {
  return keys.reduce((value, key) => (value as JsonObject | undefined)?.[key], from) as Schema;
}

function bound(value: unknown): number | undefined {
  return typeof value === "number" ? value : undefined;
}
