// Markdown as elements. HTML in it is shown as text, and pictures as links, so that nothing is loaded.

import { lexer, type MarkedToken, type Token, type Tokens } from "marked";
import type { ComponentChildren, JSX } from "preact";
import { useMemo, useState } from "preact/hooks";
import { highlighted } from "./highlight";

const SAFE_LINK = /^(https?:|mailto:)/i;

export function Markdown({ text }: { text: string }) {
  const blocks = useMemo(() => lexer(text, { gfm: true, breaks: false }), [text]);
  return (
    <div class="markdown">
      {blocks.map((block, index) => (
        <Block key={index} block={block} />
      ))}
    </div>
  );
}

/** A top-level block, which is not rendered again while later ones are streamed. */
function Block({ block }: { block: Token }) {
  return useMemo(() => <>{rendered(block)}</>, [block.raw, block.type]);
}

function all(tokens: Token[] | undefined): ComponentChildren {
  return (tokens ?? []).map((token) => rendered(token));
}

function rendered(any: Token): ComponentChildren {
  const token = any as MarkedToken;
  switch (token.type) {
    case "heading": {
      // The page has headings of its own above.
      const Heading = `h${Math.min(token.depth + 2, 6)}` as "h3";
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

export function CopyButton({ text, label = "Copy" }: { text: string; label?: string }) {
  const [copied, setCopied] = useState(false);
  const copy = async () => {
    await copyText(text);
    setCopied(true);
    setTimeout(() => setCopied(false), COPIED_MS);
  };
  return (
    <button type="button" class="small" onClick={copy}>
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
