// Mathematics: KaTeX with its style and its fonts, which the page loads once an answer has a formula.

import "katex/dist/katex.min.css";
import katex from "katex";

/** Write a formula into an element, as elements; what KaTeX cannot read is shown as it was written. */
export function renderMath(tex: string, element: HTMLElement, isBlock: boolean): void {
  katex.render(tex, element, {
    displayMode: isBlock,
    throwOnError: false,
    strict: false,
    trust: false, // no links, no pictures, no classes
    maxSize: 20,
    maxExpand: 1000,
    errorColor: "inherit",
  });
}
