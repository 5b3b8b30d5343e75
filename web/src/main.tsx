// Starts the page.

import { effect } from "@preact/signals";
import { render } from "preact";
import { followLink } from "./links";
import { theme } from "./preferences";
import {
  connect,
  flush,
  hasKeyProblem,
  isConnecting,
  models,
  refresh,
  restore,
  serverProblem,
} from "./state";
import { App } from "./view/app";

effect(() => {
  document.documentElement.dataset.theme = theme.value;
});
document.addEventListener("visibilitychange", () => {
  if (document.hidden) {
    flush(); // the page may be closed
    return;
  }
  refresh();
  look();
});
addEventListener("pagehide", flush);

/** Ask again what the server has, if it had no model or did not answer. */
function look(): void {
  const isMissing = serverProblem.value !== "" || !models.value.length;
  if (isMissing && !isConnecting.value && !hasKeyProblem.value && !document.hidden) connect();
}
setInterval(look, 3000);

const PATIENCE_MS = 500; // before the page is shown without the server's answer

const root = document.getElementById("page") as HTMLElement;
root.replaceChildren();
await restore().catch(() => undefined);
await Promise.race([connect(), new Promise((shown) => setTimeout(shown, PATIENCE_MS))]);
render(<App />, root);
await followLink();
addEventListener("hashchange", followLink);
