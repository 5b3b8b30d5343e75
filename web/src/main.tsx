// Starts the page.

import { effect } from "@preact/signals";
import { render } from "preact";
import { theme } from "./preferences";
import { connect, flush, restore } from "./state";
import { App } from "./view/app";

effect(() => {
  document.documentElement.dataset.theme = theme.value;
});
document.addEventListener("visibilitychange", () => {
  if (document.hidden) flush(); // the page may be closed
});
addEventListener("pagehide", flush);

const root = document.getElementById("page") as HTMLElement;
root.replaceChildren();
await Promise.all([restore().catch(() => undefined), connect()]);
render(<App />, root);
