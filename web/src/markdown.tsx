// Markdown as elements. HTML in it is shown as text, and pictures as links, so that nothing is loaded.

import { Marked, type MarkedToken, type Token, type Tokens } from "marked";
import type { ComponentChildren, JSX } from "preact";
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { highlighted } from "./highlight";

const SAFE_LINK = /^(https?:|mailto:)/i;

export function Markdown({ text }: { text: string }) {
  const blocks = useMemo(() => withoutGaps(parser.lexer(text)), [text]);
  return (
    <div class="markdown">
      {blocks.map((block, index) => (
        <Block key={index} block={block} />
      ))}
    </div>
  );
}

/** Give headings levels without gaps, from the first on; models leave some out. */
function withoutGaps(blocks: Token[]): Token[] {
  let level = 0;
  for (const block of blocks) {
    if (block.type === "heading") block.depth = level = Math.min(block.depth, level + 1);
  }
  return blocks;
}

/** A formula as models write it: `\\(…\\)` and `$…$` in a line, `\\[…\\]` and `$$…$$` by itself. */
interface Formula {
  type: "math";
  raw: string;
  text: string;
  isBlock: boolean;
}

const DISPLAYED = /^(?:\$\$([\s\S]+?)\$\$|\\\[([\s\S]+?)\\\])/;
const IN_LINE = /^\\\(([\s\S]+?)\\\)/;
// As Pandoc has it, so that prices are none: no space within, no digit behind.
const DOLLARS = /^\$(?!\s)((?:\\[^\n]|[^\\$\n])+?)(?<!\s)\$(?!\d)/;
const BY_ITSELF = /^ {0,3}(?:\$\$([\s\S]+?)\$\$|\\\[([\s\S]+?)\\\])[ \t]*(?:\n|$)/;

function formula(source: string, pattern: RegExp, isBlock: boolean): Formula | undefined {
  const found = pattern.exec(source);
  if (!found) return undefined;
  return { type: "math", raw: found[0], text: (found[1] ?? found[2] ?? "").trim(), isBlock };
}

const parser = new Marked({
  gfm: true,
  breaks: false,
  extensions: [
    {
      name: "math",
      level: "block",
      start: (source) => source.match(/^ {0,3}(?:\$\$|\\\[)/m)?.index,
      tokenizer: (source) => formula(source, BY_ITSELF, true),
    },
    {
      name: "math-in-line",
      level: "inline",
      start: (source) => source.match(/\$|\\[([]/)?.index,
      tokenizer: (source) =>
        formula(source, DISPLAYED, true) ??
        formula(source, IN_LINE, false) ??
        formula(source, DOLLARS, false),
    },
  ],
});

/** A formula; its source until KaTeX is loaded. */
function Mathematics({ text, isBlock }: Formula) {
  const element = useRef<HTMLSpanElement>(null);
  useEffect(() => {
    let isCurrent = true;
    import("./math.js" as string)
      .then(({ renderMath }) => {
        if (isCurrent && element.current) renderMath(text, element.current, isBlock);
      })
      .catch(() => {}); // the server is gone: the source stays
    loadMathStyle();
    return () => {
      isCurrent = false;
    };
  }, [text, isBlock]);
  return (
    <span
      key={text}
      ref={element}
      class={isBlock ? "math scroll-x" : "math"}
      tabIndex={isBlock ? 0 : undefined}
    >
      {text}
    </span>
  );
}

function loadMathStyle(): void {
  if (document.getElementById("math-style")) return;
  const link = document.createElement("link");
  link.id = "math-style";
  link.rel = "stylesheet";
  link.href = "page/math.css";
  document.head.append(link);
}

/** A top-level block, which is not rendered again while later ones are streamed. */
function Block({ block }: { block: Token }) {
  return useMemo(() => <>{rendered(block)}</>, [block.raw, block.type]);
}

function all(tokens: Token[] | undefined): ComponentChildren {
  return (tokens ?? []).map((token) => rendered(token));
}

function rendered(any: Token): ComponentChildren {
  const token = any as MarkedToken | Formula;
  switch (token.type) {
    case "heading": {
      const Heading = `h${Math.min(token.depth + 1, 6)}` as "h2"; // the page has one above
      return <Heading>{all(token.tokens)}</Heading>;
    }
    case "paragraph":
      return <p>{all(token.tokens)}</p>;
    case "list":
      return <List token={token} />;
    case "code":
      return <Code text={token.text} language={(token.lang ?? "").split(/\s/)[0] ?? ""} />;
    case "blockquote":
      return <blockquote>{all(token.tokens)}</blockquote>;
    case "table":
      return <Table token={token} />;
    case "math":
      return <Mathematics key={token.text} {...token} />;
    case "hr":
      return <hr />;
    case "strong":
      return <strong>{all(token.tokens)}</strong>;
    case "em":
      return <em>{all(token.tokens)}</em>;
    case "del":
      return <del>{all(token.tokens)}</del>;
    case "codespan":
      return <code>{token.text}</code>;
    case "br":
      return <br />;
    case "link":
      return <Link href={token.href}>{all(token.tokens)}</Link>;
    case "image":
      return <Link href={token.href}>{token.text || token.href}</Link>;
    case "checkbox":
      return <input type="checkbox" checked={token.checked} disabled />;
    case "text":
      return token.tokens ? all(token.tokens) : token.text;
    case "escape":
      return token.text;
    case "space":
      return null;
    default: // HTML, definitions
      return token.raw;
  }
}

function Link({ href, children }: { href: string; children: ComponentChildren }) {
  if (!SAFE_LINK.test(href)) return <span>{children}</span>;
  return (
    <a href={href} target="_blank" rel="noopener noreferrer nofollow" title={href}>
      {children}
    </a>
  );
}

function List({ token }: { token: Tokens.List }) {
  const items = token.items.map((item) => <li>{all(item.tokens)}</li>);
  return token.ordered ? <ol start={Number(token.start) || 1}>{items}</ol> : <ul>{items}</ul>;
}

function Table({ token }: { token: Tokens.Table }) {
  const cells = (row: Tokens.TableCell[], Cell: "th" | "td"): JSX.Element[] =>
    row.map((cell) => <Cell class={cell.align ? `align-${cell.align}` : undefined}>{all(cell.tokens)}</Cell>);
  return (
    <div class="scroll-x" tabIndex={0} role="group" aria-label="Table">
      <table>
        <thead>
          <tr>{cells(token.header, "th")}</tr>
        </thead>
        <tbody>
          {token.rows.map((row) => (
            <tr>{cells(row, "td")}</tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

/** A block of code with its language and a button that copies it. */
export function Code({ text, language }: { text: string; language: string }) {
  const children = useMemo(() => highlighted(text, language), [text, language]);
  return (
    <div class="code">
      <div class="code-bar">
        <span>{language || "text"}</span>
        <CopyButton text={text} />
      </div>
      <pre tabIndex={0}>
        <code>{children}</code>
      </pre>
    </div>
  );
}

const COPIED_MS = 1500;

interface CopyButtonProps {
  text: string;
  label?: string;
  title?: string;
}

export function CopyButton({ text, label = "Copy", title }: CopyButtonProps) {
  const [copied, setCopied] = useState(false);
  const copy = async () => {
    await copyText(text);
    setCopied(true);
    setTimeout(() => setCopied(false), COPIED_MS);
  };
  return (
    <button type="button" class="small" title={title} onClick={copy}>
      {copied ? "Copied" : label}
    </button>
  );
}

async function copyText(text: string): Promise<void> {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  // Over plain HTTP from another machine browsers have no clipboard.
  const area = document.createElement("textarea");
  area.value = text;
  (document.querySelector("dialog[open]") ?? document.body).append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}
