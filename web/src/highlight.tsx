// Code with coloured syntax, as elements: the text of a model never becomes HTML.

import bash from "highlight.js/lib/languages/bash";
import c from "highlight.js/lib/languages/c";
import cpp from "highlight.js/lib/languages/cpp";
import css from "highlight.js/lib/languages/css";
import diff from "highlight.js/lib/languages/diff";
import go from "highlight.js/lib/languages/go";
import java from "highlight.js/lib/languages/java";
import javascript from "highlight.js/lib/languages/javascript";
import json from "highlight.js/lib/languages/json";
import python from "highlight.js/lib/languages/python";
import rust from "highlight.js/lib/languages/rust";
import sql from "highlight.js/lib/languages/sql";
import typescript from "highlight.js/lib/languages/typescript";
import xml from "highlight.js/lib/languages/xml";
import yaml from "highlight.js/lib/languages/yaml";
import { createLowlight } from "lowlight";
import type { ComponentChildren } from "preact";

const lowlight = createLowlight({
  ...{ bash, c, cpp, css, diff, go, java, javascript, json, python, rust, sql, typescript, xml, yaml },
});
const MAX_CHARS = 50_000; // longer code is shown plain

type Node = ReturnType<typeof lowlight.highlight>["children"][number];

export function highlighted(code: string, language: string): ComponentChildren {
  if (!lowlight.registered(language) || code.length > MAX_CHARS) return code;
  return lowlight.highlight(language, code).children.map(element);
}

function element(node: Node): ComponentChildren {
  if (node.type === "text") return node.value;
  if (node.type !== "element") return null;
  const classes = node.properties.className as string[] | undefined;
  return <span class={classes?.join(" ")}>{node.children.map((child) => element(child as Node))}</span>;
}
